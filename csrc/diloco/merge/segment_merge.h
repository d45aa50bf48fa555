// The merge of one tensor: weighted mean or Radial-Directional Averaging (RDA, Decoupled DiLoCo App. D.2) of the members'
// displacements. What depends on the members alone is worked out once per tensor; the rest allocates nothing.
//
// Member order is the order of summation. Error bounds against exact arithmetic with M members, as long as no product is
// subnormal: the mean is within (M + 2) * 2^-24 * sum_i |w_i v_i| per element; RDA, in norm, within
// (M + 8) * 2^-24 * (sum_i w_i ||v_i||) * (sum_i w_i) / ||s||.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "diloco/fragment/plan.h"
#include "diloco/kernels/kernels.h"

namespace diloco {

// One tensor's part of a contribution. Members without weight are left out by the caller.
struct SegmentMember {
  Codec codec = Codec::kF32;
  const std::byte* payload = nullptr;  // first byte of the tensor's segment; may be unaligned
  double weight = 0.0;                 // normalised: the weights of a merge add up to 1
  double norm = 0.0;                   // l2 of the segment
};
using SegmentMembers = std::span<const SegmentMember>;

// Members and their factors, for kernels::weighted_sum(). Those whose factor is 0 in f32 are left out.
using Terms = std::vector<kernels::WeightedPayload>;
// sum_i w_i v_i. One member: v exactly.
Terms mean_terms(SegmentMembers members);

// RDA in two passes: sum <- a multiple of s = sum_i w_i v_i / ||v_i||, then merged = gain * sum with
// gain * ||sum|| = sum_i w_i ||v_i||. What can be known of it before the first pass:
class RdaMerge {
 public:
  explicit RdaMerge(SegmentMembers members);

  // Fewer than two members have a non-zero tensor: there RDA *is* the mean, and the mean is exact for a single one.
  bool is_mean() const { return directed_ < 2; }
  // First pass over elements [begin, begin + count), at most kernels::kBlock of them and a whole block but at the tensor's
  // end; `sum` points to the first of them. Returns the sum of their squares.
  double direction(std::uint64_t begin, std::uint64_t count, float* sum) const;
  // Of the squares of all blocks, added in order. Nullopt where the mean is to be taken: directions that cancel (||s|| below
  // 1e-6 of the sum of their weights).
  std::optional<float> gain(double squares) const;

 private:
  Terms terms_;  // of the directions
  double radius_ = 0.0;
  double directed_weight_ = 0.0;
  int directed_ = 0;
  int exponent_ = 0;
};

// Whole tensors at once; RDA: the mean where it has no direction.
void mean_merge(SegmentMembers members, std::uint64_t numel, float* out);
void rda_merge(SegmentMembers members, std::uint64_t numel, float* out);

}  // namespace diloco
