// Sums of squares in the order that every kernel keeps: 16 lanes of f64 inside a block, then a tree over the lanes.
#pragma once

#include <cstdint>

#include "diloco/kernels/clones.h"

namespace diloco::kernels {

struct Lanes {
  static constexpr std::uint64_t kCount = 16;
  double sums[kCount] = {};

  // The next `n` values of the block; but for its last ones a multiple of kCount.
  template <typename Value>
  DILOCO_INLINE void add(std::uint64_t n, const Value& value) {
    const std::uint64_t whole = n - n % kCount;
    for (std::uint64_t i = 0; i < whole; i += kCount) {
      for (std::uint64_t lane = 0; lane < kCount; ++lane) {
        const double x = value(i + lane);
        sums[lane] += x * x;
      }
    }
    for (std::uint64_t i = whole; i < n; ++i) {
      const double x = value(i);
      sums[i - whole] += x * x;
    }
  }
  DILOCO_INLINE double total() {
    for (std::uint64_t step = kCount / 2; step > 0; step /= 2) {
      for (std::uint64_t lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
    }
    return sums[0];
  }
};

}  // namespace diloco::kernels
