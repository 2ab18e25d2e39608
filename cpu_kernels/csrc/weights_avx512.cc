#include "processors.h"
#include "weights_panels.h"

const kvq::Multiplier kvq::multiplier_avx512{multiply_by_floats};
