#include <algorithm>
#include <memory>
#include <numeric>

#include "diloco/base/types.h"
#include "diloco/bench/workload.h"
#include "diloco/kernels/clones.h"

namespace diloco::bench {
namespace {

constexpr std::size_t kPart = 1 << 18;  // elements a thread does at a time

DILOCO_CLONES
float sum(const float* in, std::size_t n) {
  float lanes[64] = {};
  for (std::size_t i = 0; i + 64 <= n; i += 64) {
    for (std::size_t k = 0; k < 64; ++k) lanes[k] += in[i + k];
  }
  return std::accumulate(lanes, lanes + 64, 0.0f);
}

// A product, so that it is not turned into memcpy.
DILOCO_CLONES
void scaled(const float* in, float factor, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = factor * in[i];
}

DILOCO_CLONES
void triad(const float* b, const float* c, float factor, float* a, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] = b[i] + factor * c[i];
}

struct Arrays {
  BufferPtr a, b, c;
  std::vector<float> sums;
};

}  // namespace

std::vector<Workload> memory_workloads(std::uint64_t megabytes, const Parallel& parallel) {
  const std::size_t n = megabytes * 1'000'000 / sizeof(float), parts = (n + kPart - 1) / kPart;
  const auto arrays = std::make_shared<Arrays>();
  for (BufferPtr* array : {&arrays->a, &arrays->b, &arrays->c}) *array = Buffer::make(n * sizeof(float));
  arrays->sums.resize(parts);
  // Written once: what was never written is one page of zeros.
  parallel(parts, [&](std::size_t i) {
    const std::size_t begin = i * kPart, end = std::min(begin + kPart, n);
    std::fill(arrays->a->f32() + begin, arrays->a->f32() + end, 1.0f);
    std::fill(arrays->b->f32() + begin, arrays->b->f32() + end, 2.0f);
    std::fill(arrays->c->f32() + begin, arrays->c->f32() + end, 3.0f);
  });
  const auto each_part = [parallel, parts, n](const auto& body) {
    return [parallel, parts, n, body] {
      parallel(parts, [&](std::size_t i) { body(i, i * kPart, std::min(kPart, n - i * kPart)); });
    };
  };
  const std::uint64_t bytes = n * sizeof(float);
  return {{"read", bytes, each_part([arrays](std::size_t i, std::size_t at, std::size_t count) {
             arrays->sums[i] = sum(arrays->a->f32() + at, count);
           })},
          {"copy", 2 * bytes, each_part([arrays](std::size_t, std::size_t at, std::size_t count) {
             scaled(arrays->b->f32() + at, 1.0000001f, arrays->c->f32() + at, count);
           })},
          {"triad", 3 * bytes, each_part([arrays](std::size_t, std::size_t at, std::size_t count) {
             triad(arrays->b->f32() + at, arrays->c->f32() + at, 3.0f, arrays->a->f32() + at, count);
           })}};
}

}  // namespace diloco::bench
