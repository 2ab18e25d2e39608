#include "processors.h"
#include "weights_pairs.h"

const kvq::Multiplier kvq::multiplier_avx2{multiply_by_digits, reads_digits, make_digits};
