#include "processors.h"
#include "weights_panels.h"

void kvq::multiply_panels_baseline(const PanelProduct& product) { multiply_packed(product); }
