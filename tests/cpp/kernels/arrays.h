// Arrays for the tests of the arithmetic: random values, bytes at odd addresses, ulp distance.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "diloco/kernels/kernels.h"

namespace diloco::test {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

inline Floats random_floats(std::uint64_t n, std::uint64_t seed, float scale = 1.0f) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Floats values(n);
  for (float& value : values) value = normal(engine);
  return values;
}

inline Bytes bytes_of(std::span<const float> values) {
  Bytes bytes(values.size_bytes());
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline Bytes bf16_bytes_of(std::span<const float> values) {
  Bytes bytes(values.size() * 2);
  kernels::f32_to_bf16(values.data(), values.size(), bytes.data());
  return bytes;
}

inline Floats floats_of(std::span<const std::byte> bytes) {
  Floats values(bytes.size() / 4);
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * 4);
  return values;
}

// The same bytes at an odd address.
class Unaligned {
 public:
  explicit Unaligned(std::span<const std::byte> bytes) : storage_(bytes.size() + 2) {
    if (!bytes.empty()) std::memcpy(data(), bytes.data(), bytes.size());
  }
  std::byte* data() { return storage_.data() + (reinterpret_cast<std::uintptr_t>(storage_.data()) % 2 == 0 ? 1 : 0); }

 private:
  Bytes storage_;
};

inline std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float from_bits(std::uint32_t value) { return std::bit_cast<float>(value); }

inline std::vector<std::uint32_t> bits_of(std::span<const float> values) {
  std::vector<std::uint32_t> result;
  for (const float value : values) result.push_back(bits(value));
  return result;
}

}  // namespace diloco::test
