#include <cmath>

#include "diloco/kernels/element.h"
#include "diloco/kernels/kernels.h"
#include "diloco/kernels/lanes.h"
#include "diloco/kernels/sum_members.h"

namespace diloco::kernels {
namespace {

template <typename Element>
DILOCO_INLINE double block_norm_squared(const std::byte* payload, std::uint64_t n) {
  Lanes lanes;
  lanes.add(n, [payload](std::uint64_t i) { return Element::load(payload, i); });
  return lanes.total();
}

template <typename Element>
DILOCO_INLINE double tensor_norm_squared(const std::byte* payload, std::uint64_t n) {
  double sum = 0.0;
  for (std::uint64_t begin = 0; begin < n; begin += kBlock) {
    const std::uint64_t count = n - begin < kBlock ? n - begin : kBlock;
    sum += block_norm_squared<Element>(payload + begin * Element::kBytes, count);
  }
  return sum;
}

// A value is Inf or NaN if its exponent bits are all ones. The largest masked exponent is an integer reduction, which
// vectorises; an early exit would not.
template <typename Bits>
DILOCO_INLINE bool exponents_finite(const std::byte* values, std::uint64_t n, Bits mask) {
  Bits worst = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i * sizeof(Bits), sizeof(Bits));
    const Bits exponent = static_cast<Bits>(bits & mask);
    worst = exponent > worst ? exponent : worst;
  }
  return worst != mask;
}

}  // namespace

DILOCO_CLONES
double norm_squared(const std::byte* payload, bool bf16, std::uint64_t n, bool* finite) {
  const double sum = bf16 ? tensor_norm_squared<Bf16Element>(payload, n) : tensor_norm_squared<F32Element>(payload, n);
  if (finite) *finite = std::isfinite(sum);
  return sum;
}

double norm_squared_f32(const float* values, std::uint64_t n) {
  return norm_squared(reinterpret_cast<const std::byte*>(values), false, n, nullptr);
}

DILOCO_CLONES
void weighted_sum(const WeightedPayload* members, std::size_t count, std::uint64_t at, float* out, std::uint64_t n) {
  sum_members(members, count, at, out, n);
}

DILOCO_CLONES
void scale(const float* in, float gain, float* out, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) out[i] = gain * in[i];
}

DILOCO_CLONES
bool all_finite(const std::byte* values, bool bf16, std::uint64_t n) {
  return bf16 ? exponents_finite<std::uint16_t>(values, n, 0x7f80u)
              : exponents_finite<std::uint32_t>(values, n, 0x7f800000u);
}

}  // namespace diloco::kernels
