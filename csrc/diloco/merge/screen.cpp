#include <cmath>

#include "diloco/kernels/kernels.h"
#include "diloco/merge/merge.h"

namespace diloco {

ScreenResult screen(const PayloadLayout& layout, const std::byte* payload) {
  ScreenResult result;
  result.finite = true;
  result.norms.reserve(layout.segments.size());
  for (const Segment& segment : layout.segments) {
    bool finite = true;
    const double squared = kernels::norm_squared(payload + segment.byte_offset, segment.codec == Codec::kBf16,
                                                 segment.numel, &finite);
    result.finite = result.finite && finite;
    result.norms.push_back(std::sqrt(squared));
  }
  return result;
}

}  // namespace diloco
