#include <algorithm>
#include <cmath>

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

}  // namespace

RdaMerge::RdaMerge(SegmentMembers members) {
  double largest_factor = 0.0;
  for (const SegmentMember& member : members) {
    if (member.norm == 0.0) continue;
    ++directed_;
    radius_ += member.weight * member.norm;
    directed_weight_ += member.weight;
    largest_factor = std::max(largest_factor, member.weight / member.norm);
  }
  if (is_mean()) return;
  exponent_ = range_exponent(largest_factor);
  for (const SegmentMember& member : members) {
    if (member.norm == 0.0) continue;
    const auto factor = static_cast<float>(std::ldexp(member.weight / member.norm, exponent_));
    if (factor != 0.0f) terms_.push_back({member.payload, member.codec == Codec::kBf16, factor});
  }
}

// Its norm costs no pass of its own: the block is in the cache.
double RdaMerge::direction(std::uint64_t begin, std::uint64_t count, float* sum) const {
  kernels::weighted_sum(terms_.data(), terms_.size(), begin, sum, count);
  return kernels::norm_squared_f32(sum, count);
}

std::optional<float> RdaMerge::gain(double squares) const {
  const double length = std::sqrt(squares);
  if (is_mean() || !(length >= kCancelled * std::ldexp(directed_weight_, exponent_))) return std::nullopt;
  return static_cast<float>(radius_ / length);
}

void rda_merge(SegmentMembers members, std::uint64_t numel, float* out) {
  const RdaMerge rda(members);
  double squares = 0.0;
  for (std::uint64_t begin = 0; begin < numel && !rda.is_mean(); begin += kernels::kBlock) {
    squares += rda.direction(begin, std::min(kernels::kBlock, numel - begin), out + begin);
  }
  if (const std::optional<float> gain = rda.gain(squares)) {
    kernels::scale(out, *gain, out, numel);
  } else {
    mean_merge(members, numel, out);
  }
}

}  // namespace diloco
