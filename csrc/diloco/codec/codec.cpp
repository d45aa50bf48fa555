#include "diloco/codec/codec.h"

#include <cstring>

#include "diloco/kernels/kernels.h"

namespace diloco {

std::size_t codec_bytes(Codec codec, std::uint64_t numel) { return numel * (codec == Codec::kBf16 ? 2 : 4); }

void encode(Codec codec, const float* in, std::uint64_t numel, std::byte* out) {
  if (numel == 0) return;
  if (codec == Codec::kBf16) {
    kernels::f32_to_bf16(in, numel, out);
  } else {
    std::memcpy(out, in, numel * sizeof(float));
  }
}

void decode(Codec codec, const std::byte* in, std::uint64_t numel, float* out) {
  if (numel == 0) return;
  if (codec == Codec::kBf16) {
    kernels::bf16_to_f32(in, numel, out);
  } else {
    std::memcpy(out, in, numel * sizeof(float));
  }
}

void clear_padding(const PayloadLayout& layout, std::byte* payload) {
  std::uint64_t written = 0;
  for (const Segment& segment : layout.segments) {
    if (segment.byte_offset > written) std::memset(payload + written, 0, segment.byte_offset - written);
    written = segment.byte_offset + codec_bytes(segment.codec, segment.numel);
  }
}

void encode_payload(const PayloadLayout& layout, const float* dense, std::byte* payload) {
  clear_padding(layout, payload);
  for (const Segment& segment : layout.segments) {
    encode(segment.codec, dense + segment.element_offset, segment.numel, payload + segment.byte_offset);
  }
}

void decode_payload(const PayloadLayout& layout, const std::byte* payload, float* dense) {
  for (const Segment& segment : layout.segments) {
    decode(segment.codec, payload + segment.byte_offset, segment.numel, dense + segment.element_offset);
  }
}

}  // namespace diloco
