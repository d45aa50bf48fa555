#include <cstring>

#include "diloco/kernels/clones.h"
#include "diloco/kernels/kernels.h"

namespace diloco::kernels {

void adopt_overwrite(const float* next, float* anchor, float* local, std::uint64_t n) {
  if (n == 0) return;
  std::memcpy(local, next, n * sizeof(float));
  if (anchor != next) std::memcpy(anchor, next, n * sizeof(float));
}

DILOCO_CLONES
void adopt_blend(const float* next, float alpha, float* anchor, float* local, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const float value = next[i];
    local[i] = value + alpha * (local[i] - value);
    anchor[i] = value;
  }
}

DILOCO_CLONES
void adopt_rebase(const float* next, const float* sent, float* anchor, float* local, std::uint64_t n) {
  if (sent) {
    for (std::uint64_t i = 0; i < n; ++i) {
      const float value = next[i];
      local[i] = value - ((anchor[i] - local[i]) - sent[i]);
      anchor[i] = value;
    }
  } else {
    for (std::uint64_t i = 0; i < n; ++i) {
      const float value = next[i];
      local[i] = value - (anchor[i] - local[i]);
      anchor[i] = value;
    }
  }
}

}  // namespace diloco::kernels
