// Payload element types: f32 and bf16 (round to nearest even; NaN stays NaN). Payload bytes may be unaligned.
// Pure functions; the caller has checked that the arrays are as long as the layout says.
#pragma once

#include <cstddef>
#include <cstdint>

#include "diloco/fragment/plan.h"

namespace diloco {

std::size_t codec_bytes(Codec codec, std::uint64_t numel);
void encode(Codec codec, const float* in, std::uint64_t numel, std::byte* out);
void decode(Codec codec, const std::byte* in, std::uint64_t numel, float* out);
// Padding between segments is part of the checksummed bytes: zero, so that equal tensors give equal payloads.
void clear_padding(const PayloadLayout& layout, std::byte* payload);
// Whole fragment between its dense f32 array (layout.numel elements) and a payload (layout.bytes). Padding is zeroed.
void encode_payload(const PayloadLayout& layout, const float* dense, std::byte* payload);
void decode_payload(const PayloadLayout& layout, const std::byte* payload, float* dense);

}  // namespace diloco
