// The weighted sum of a merge as a loop body that other loops can be fused with. For kernels/ only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "diloco/kernels/element.h"
#include "diloco/kernels/kernels.h"

namespace diloco::kernels {

// Four members in one pass: the running sum stays in a register, not in memory, while they are added. `at`: of the payloads'
// elements the first.
template <typename Element, bool kFirst>
DILOCO_INLINE void add_four(const WeightedPayload* m, std::uint64_t at, float* __restrict out, std::uint64_t n) {
  const std::byte *p0 = m[0].payload, *p1 = m[1].payload, *p2 = m[2].payload, *p3 = m[3].payload;
  const float w0 = m[0].weight, w1 = m[1].weight, w2 = m[2].weight, w3 = m[3].weight;
  for (std::uint64_t i = 0; i < n; ++i) {
    float sum = w0 * Element::load(p0, at + i);
    if (!kFirst) sum = out[i] + sum;
    sum += w1 * Element::load(p1, at + i);
    sum += w2 * Element::load(p2, at + i);
    out[i] = sum + w3 * Element::load(p3, at + i);
  }
}

template <typename Element, bool kFirst>
DILOCO_INLINE void add_one(const WeightedPayload& m, std::uint64_t at, float* __restrict out, std::uint64_t n) {
  const std::byte* payload = m.payload;
  const float weight = m.weight;
  for (std::uint64_t i = 0; i < n; ++i) {
    const float term = weight * Element::load(payload, at + i);
    out[i] = kFirst ? term : out[i] + term;
  }
}

template <typename Element>
DILOCO_INLINE void add(const WeightedPayload* members, bool four, bool first, std::uint64_t at, float* out, std::uint64_t n) {
  if (four) {
    if (first) add_four<Element, true>(members, at, out, n);
    else add_four<Element, false>(members, at, out, n);
  } else {
    if (first) add_one<Element, true>(*members, at, out, n);
    else add_one<Element, false>(*members, at, out, n);
  }
}

// weighted_sum() of elements [at, at + n).
DILOCO_INLINE void sum_members(const WeightedPayload* members, std::size_t count, std::uint64_t at, float* __restrict out,
                               std::uint64_t n) {
  if (count == 0) {
    for (std::uint64_t i = 0; i < n; ++i) out[i] = 0.0f;
  }
  for (std::size_t i = 0; i < count;) {
    const bool bf16 = members[i].bf16;
    const bool four = count - i >= 4 && members[i + 1].bf16 == bf16 && members[i + 2].bf16 == bf16 &&
                      members[i + 3].bf16 == bf16;
    if (bf16) add<Bf16Element>(members + i, four, i == 0, at, out, n);
    else add<F32Element>(members + i, four, i == 0, at, out, n);
    i += four ? 4 : 1;
  }
}

}  // namespace diloco::kernels
