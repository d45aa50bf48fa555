#define DILOCO_CLONE kernels_baseline
#include "kernels/clone.inc"
