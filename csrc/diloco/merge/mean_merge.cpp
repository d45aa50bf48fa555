#include <algorithm>

#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/segment_merge.h"

namespace diloco {

void mean_merge(Codec codec, SegmentMembers members, std::uint64_t begin, std::uint64_t count, float* out) {
  if (members.empty()) std::fill_n(out, count, 0.0f);
  const std::size_t skip = codec_bytes(codec, begin);
  bool first = true;
  for (const SegmentMember& member : members) {
    kernels::scaled_accumulate(member.payload + skip, codec == Codec::kBf16, static_cast<float>(member.weight), first, out,
                               count);
    first = false;
  }
}

}  // namespace diloco
