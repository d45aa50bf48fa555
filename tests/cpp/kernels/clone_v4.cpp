#define DILOCO_CLONE kernels_v4
#include "kernels/clone.inc"
