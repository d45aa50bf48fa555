#include <algorithm>

#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/segment_merge.h"

namespace diloco {

void mean_merge(SegmentMembers members, std::uint64_t begin, std::uint64_t count, float* out) {
  if (members.empty()) std::fill_n(out, count, 0.0f);
  bool first = true;
  for (const SegmentMember& member : members) {
    kernels::scaled_accumulate(member.payload + codec_bytes(member.codec, begin), member.codec == Codec::kBf16,
                               static_cast<float>(member.weight), first, out, count);
    first = false;
  }
}

}  // namespace diloco
