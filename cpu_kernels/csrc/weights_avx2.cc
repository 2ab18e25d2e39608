#include "processors.h"
#include "weights_panels.h"

void kvq::multiply_panels_avx2(const PanelProduct& product) { multiply_packed(product); }
