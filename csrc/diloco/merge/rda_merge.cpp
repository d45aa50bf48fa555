#include <algorithm>
#include <cmath>

#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/segment_merge.h"

namespace diloco {
namespace {

constexpr double kCancelled = 1e-6;

// Per-member factors w/||v|| leave the range of f32 for very large or very small tensors. One power of two for all of
// them brings the largest into [2^-60, 2^60]; the direction does not change and `gain` undoes it.
int range_exponent(double largest_factor) {
  const int exponent = std::ilogb(largest_factor);
  return std::clamp(exponent, -60, 60) - exponent;
}

// Block by block, so that the sum stays in the cache while every member is added, and its norm costs no pass of its own.
double accumulate_directions(SegmentMembers members, int exponent, std::uint64_t numel, float* sum) {
  double squared = 0.0;
  for (std::uint64_t begin = 0; begin < numel; begin += kernels::kBlock) {
    const std::uint64_t count = std::min(kernels::kBlock, numel - begin);
    bool first = true;
    for (const SegmentMember& member : members) {
      if (member.norm == 0.0) continue;
      const auto factor = static_cast<float>(std::ldexp(member.weight / member.norm, exponent));
      kernels::scaled_accumulate(member.payload + codec_bytes(member.codec, begin), member.codec == Codec::kBf16, factor,
                                 first, sum + begin, count);
      first = false;
    }
    squared += kernels::norm_squared_f32(sum + begin, count);
  }
  return std::sqrt(squared);
}

}  // namespace

std::optional<float> rda_direction(SegmentMembers members, std::uint64_t numel, float* sum) {
  double radius = 0.0;
  double directed_weight = 0.0;
  double largest_factor = 0.0;
  int directed = 0;
  for (const SegmentMember& member : members) {
    if (member.norm == 0.0) continue;
    ++directed;
    radius += member.weight * member.norm;
    directed_weight += member.weight;
    largest_factor = std::max(largest_factor, member.weight / member.norm);
  }
  if (directed < 2) return std::nullopt;
  const int exponent = range_exponent(largest_factor);
  const double length = accumulate_directions(members, exponent, numel, sum);
  if (!(length >= kCancelled * std::ldexp(directed_weight, exponent))) return std::nullopt;
  return static_cast<float>(radius / length);
}

void rda_merge(SegmentMembers members, std::uint64_t numel, float* out) {
  if (const std::optional<float> gain = rda_direction(members, numel, out)) {
    kernels::scale(out, *gain, out, numel);
  } else {
    mean_merge(members, 0, numel, out);
  }
}

}  // namespace diloco
