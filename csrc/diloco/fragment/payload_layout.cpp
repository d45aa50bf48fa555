#include <algorithm>

#include "diloco/base/errors.h"
#include "diloco/fragment/plan.h"

namespace diloco {
namespace {

constexpr std::uint64_t kAlignment = 64;

Codec of_wire_dtype(WireDtype dtype, const TensorSpec& tensor) {
  switch (dtype) {
    case WireDtype::kF32: return Codec::kF32;
    case WireDtype::kBf16: return Codec::kBf16;
    case WireDtype::kParam: return tensor.dtype == Dtype::kBf16 ? Codec::kBf16 : Codec::kF32;
  }
  return Codec::kF32;
}

Codec segment_codec(PayloadKind kind, const TensorSpec& tensor, const Settings& settings) {
  switch (kind) {
    case PayloadKind::kContribution:
      return tensor.shape.size() < 2 ? Codec::kF32 : of_wire_dtype(settings.wire_dtype, tensor);
    case PayloadKind::kAnchor: return Codec::kF32;
    case PayloadKind::kImage: return of_wire_dtype(settings.downlink_dtype, tensor);
  }
  return Codec::kF32;
}

}  // namespace

PayloadLayout payload_layout(const Layout& layout, const Plan& plan, FragmentId fragment, PayloadKind kind,
                             const Settings& settings) {
  PayloadLayout result;
  for (const std::uint32_t index : plan.fragments.at(fragment).tensors) {
    const TensorSpec& tensor = layout.tensors.at(index);
    Segment segment;
    segment.tensor = index;
    segment.codec = segment_codec(kind, tensor, settings);
    segment.numel = tensor.numel();
    segment.element_offset = result.numel;
    segment.byte_offset = (result.bytes + kAlignment - 1) / kAlignment * kAlignment;
    result.numel += segment.numel;
    result.bytes = segment.byte_offset + segment.numel * (segment.codec == Codec::kBf16 ? 2 : 4);
    result.segments.push_back(segment);
  }
  return result;
}

PayloadLayouts payload_layouts(const Layout& layout, const Plan& plan, const Settings& settings) {
  PayloadLayouts result(plan.size());
  for (FragmentId p = 0; p < plan.size(); ++p) {
    for (const auto kind : {PayloadKind::kContribution, PayloadKind::kAnchor, PayloadKind::kImage}) {
      result[p][static_cast<std::size_t>(kind)] = payload_layout(layout, plan, p, kind, settings);
    }
  }
  return result;
}

}  // namespace diloco
