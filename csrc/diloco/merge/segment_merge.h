// The merge of one tensor: weighted mean or Radial-Directional Averaging (RDA, Decoupled DiLoCo App. D.2) of the members'
// displacements. Pure functions, no allocation.
//
// Member order is the order of summation. Error bounds against exact arithmetic with M members, as long as no product is
// subnormal: the mean is within (M + 2) * 2^-24 * sum_i |w_i v_i| per element; RDA, in norm, within
// (M + 8) * 2^-24 * (sum_i w_i ||v_i||) * (sum_i w_i) / ||s||.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "diloco/fragment/plan.h"

namespace diloco {

// One tensor's part of a contribution. Members without weight are left out by the caller.
struct SegmentMember {
  Codec codec = Codec::kF32;
  const std::byte* payload = nullptr;  // first byte of the tensor's segment; may be unaligned
  double weight = 0.0;                 // normalised: the weights of a merge add up to 1
  double norm = 0.0;                   // l2 of the segment
};
using SegmentMembers = std::span<const SegmentMember>;

// out <- sum_i w_i v_i for elements [begin, begin + count). Zeros without members. One member: v exactly.
void mean_merge(SegmentMembers members, std::uint64_t begin, std::uint64_t count, float* out);

// RDA in two passes: sum <- a multiple of s = sum_i w_i v_i / ||v_i||, then merged = gain * sum with
// gain * ||sum|| = sum_i w_i ||v_i||. Returns the gain; nullopt, with `sum` unspecified, where the mean is to be taken:
// fewer than two members with a non-zero tensor (there RDA *is* the mean, and the mean is exact for a single one), or
// directions that cancel (||s|| below 1e-6 of the sum of their weights).
std::optional<float> rda_direction(SegmentMembers members, std::uint64_t numel, float* sum);

// Whole tensor at once, the mean where RDA has no direction.
void rda_merge(SegmentMembers members, std::uint64_t numel, float* out);

}  // namespace diloco
