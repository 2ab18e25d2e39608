#include "weights_vnni.h"
#include "processors.h"

const kvq::Multiplier kvq::multiplier_vnni{multiply_by_digits, reads_digits, make_digits};
