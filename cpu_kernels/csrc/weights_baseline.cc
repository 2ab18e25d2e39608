#include "processors.h"
#include "weights_panels.h"

const kvq::Multiplier kvq::multiplier_baseline{multiply_by_floats};
