#include "processors.h"
#include "weights_digits.h"

const kvq::Multiplier kvq::multiplier_vnni{multiply_by_digits, make_digits};
