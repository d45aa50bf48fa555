#define DILOCO_CLONE kernels_v3
#include "kernels/clone.inc"
