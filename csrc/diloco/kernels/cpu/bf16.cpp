#include "diloco/kernels/element.h"
#include "diloco/kernels/kernels.h"

namespace diloco::kernels {

DILOCO_CLONES
void f32_to_bf16(const float* in, std::uint64_t n, std::byte* out) {
  for (std::uint64_t i = 0; i < n; ++i) Bf16Element::store(out, i, in[i]);
}

DILOCO_CLONES
void bf16_to_f32(const std::byte* in, std::uint64_t n, float* out) {
  for (std::uint64_t i = 0; i < n; ++i) out[i] = Bf16Element::load(in, i);
}

}  // namespace diloco::kernels
