#include "diloco/kernels/element.h"
#include "diloco/kernels/kernels.h"

namespace diloco::kernels {

DILOCO_CLONES
void fragment_diff_f32(const float* anchor, const float* local, std::uint64_t n, std::byte* out) {
  for (std::uint64_t i = 0; i < n; ++i) F32Element::store(out, i, anchor[i] - local[i]);
}

DILOCO_CLONES
void fragment_diff_bf16(const float* anchor, const float* local, std::uint64_t n, std::byte* out) {
  for (std::uint64_t i = 0; i < n; ++i) Bf16Element::store(out, i, anchor[i] - local[i]);
}

}  // namespace diloco::kernels
