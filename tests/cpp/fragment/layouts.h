// Layouts for tests.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "diloco/fragment/layout.h"

namespace diloco::test {

inline TensorSpec tensor(std::string name, std::vector<std::int64_t> shape, Dtype dtype = Dtype::kF32,
                         std::vector<std::string> aliases = {}) {
  return {std::move(name), std::move(shape), dtype, std::move(aliases)};
}

// One 1-D tensor per size, named t0, t1, ...
inline Layout of_sizes(const std::vector<std::int64_t>& sizes) {
  Layout layout;
  for (std::size_t i = 0; i < sizes.size(); ++i) layout.tensors.push_back(tensor(fmt::format("t{}", i), {sizes[i]}));
  return layout;
}

// A transformer-like layout with repeated sizes, scalars and empty tensors, in random order of registration.
inline Layout random_layout(std::mt19937_64& engine) {
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine);
  };
  Layout layout;
  const std::int64_t count = draw(1, 40);
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<std::int64_t> shape;
    for (std::int64_t d = draw(0, 3); d > 0; --d) shape.push_back(draw(0, 12) == 0 ? 0 : draw(1, 9));
    layout.tensors.push_back(tensor(fmt::format("h.{}.weight", i), shape, draw(0, 1) ? Dtype::kF32 : Dtype::kBf16));
  }
  std::shuffle(layout.tensors.begin(), layout.tensors.end(), engine);
  return layout;
}

inline Layout shuffled(Layout layout, std::mt19937_64& engine) {
  std::shuffle(layout.tensors.begin(), layout.tensors.end(), engine);
  return layout;
}

}  // namespace diloco::test
