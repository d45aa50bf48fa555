// One element of a payload: unaligned loads and stores of f32 and bf16. For kernels/ and codec tests only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "diloco/kernels/clones.h"

namespace diloco::kernels {

// Round to nearest even. NaN keeps its sign and upper payload bits and becomes quiet: plain rounding would turn some
// NaNs into Inf or into -0.
DILOCO_INLINE std::uint16_t bf16_bits(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

DILOCO_INLINE float bf16_value(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

struct F32Element {
  static constexpr std::size_t kBytes = 4;
  DILOCO_INLINE static float load(const std::byte* base, std::uint64_t i) {
    float value;
    std::memcpy(&value, base + i * kBytes, kBytes);
    return value;
  }
  DILOCO_INLINE static void store(std::byte* base, std::uint64_t i, float value) {
    std::memcpy(base + i * kBytes, &value, kBytes);
  }
};

struct Bf16Element {
  static constexpr std::size_t kBytes = 2;
  DILOCO_INLINE static float load(const std::byte* base, std::uint64_t i) {
    std::uint16_t bits;
    std::memcpy(&bits, base + i * kBytes, kBytes);
    return bf16_value(bits);
  }
  DILOCO_INLINE static void store(std::byte* base, std::uint64_t i, float value) {
    const std::uint16_t bits = bf16_bits(value);
    std::memcpy(base + i * kBytes, &bits, kBytes);
  }
};

}  // namespace diloco::kernels
