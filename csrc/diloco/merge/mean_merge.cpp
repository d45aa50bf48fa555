#include "diloco/merge/segment_merge.h"

namespace diloco {

Terms mean_terms(SegmentMembers members) {
  Terms terms;
  for (const SegmentMember& member : members) {
    const auto weight = static_cast<float>(member.weight);
    if (weight != 0.0f) terms.push_back({member.payload, member.codec == Codec::kBf16, weight});
  }
  return terms;
}

void mean_merge(SegmentMembers members, std::uint64_t numel, float* out) {
  const Terms terms = mean_terms(members);
  kernels::weighted_sum(terms.data(), terms.size(), 0, out, numel);
}

}  // namespace diloco
