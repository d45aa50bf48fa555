#include "diloco/codec/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Bytes;
using test::Floats;

// A matrix of 5 bf16, an empty tensor, a scalar and 3 f32: bytes 0..9, 64, 64..67, 128..139.
PayloadLayout mixed_layout() {
  PayloadLayout layout;
  layout.segments = {{0, Codec::kBf16, 5, 0, 0}, {1, Codec::kBf16, 0, 5, 64}, {2, Codec::kF32, 1, 5, 64},
                     {3, Codec::kF32, 3, 6, 128}};
  layout.numel = 9;
  layout.bytes = 140;
  return layout;
}

TEST(Codec, Sizes) {
  EXPECT_EQ(codec_bytes(Codec::kF32, 3), 12u);
  EXPECT_EQ(codec_bytes(Codec::kBf16, 3), 6u);
  EXPECT_EQ(codec_bytes(Codec::kBf16, 0), 0u);
  EXPECT_EQ(codec_bytes(Codec::kF32, std::uint64_t{1} << 33), std::uint64_t{1} << 35);
}

TEST(Codec, F32IsLossless) {
  const Floats values = {1.1f, -0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::denorm_min()};
  test::Unaligned bytes{Bytes(16)};
  encode(Codec::kF32, values.data(), 4, bytes.data());
  Floats back(4);
  decode(Codec::kF32, bytes.data(), 4, back.data());
  EXPECT_EQ(test::bits_of(back), test::bits_of(values));
}

TEST(Codec, Bf16IsWithinHalfAnUlpAndIdempotent) {
  const Floats values = test::random_floats(1000, 1);
  test::Unaligned bytes{Bytes(2000)};
  encode(Codec::kBf16, values.data(), 1000, bytes.data());
  Floats back(1000), again(1000);
  decode(Codec::kBf16, bytes.data(), 1000, back.data());
  for (std::size_t i = 0; i < 1000; ++i) ASSERT_LE(std::fabs(back[i] - values[i]), std::fabs(values[i]) / 256);
  encode(Codec::kBf16, back.data(), 1000, bytes.data());
  decode(Codec::kBf16, bytes.data(), 1000, again.data());
  EXPECT_EQ(again, back);
}

TEST(Codec, NanStaysNan) {
  const float nan = test::from_bits(0x7f800001u);
  std::byte bytes[2];
  encode(Codec::kBf16, &nan, 1, bytes);
  float back;
  decode(Codec::kBf16, bytes, 1, &back);
  EXPECT_TRUE(std::isnan(back));
}

TEST(Payload, RoundTripOfMixedElementTypesAtAnyAddress) {
  const PayloadLayout layout = mixed_layout();
  Floats dense = test::random_floats(9, 4);
  for (std::size_t i = 0; i < 5; ++i) dense[i] = static_cast<float>(i) - 2.0f;  // exact in bf16
  test::Unaligned payload{Bytes(layout.bytes)};
  encode_payload(layout, dense.data(), payload.data());
  Floats back(9);
  decode_payload(layout, payload.data(), back.data());
  EXPECT_EQ(test::bits_of(back), test::bits_of(dense));
}

TEST(Payload, PaddingIsZeroWhateverWasThere) {
  const PayloadLayout layout = mixed_layout();
  const Floats dense(9, 1.0f);
  Bytes clean(layout.bytes), dirty(layout.bytes, std::byte{0xee});
  encode_payload(layout, dense.data(), clean.data());
  encode_payload(layout, dense.data(), dirty.data());
  EXPECT_EQ(clean, dirty);
  for (std::size_t i = 10; i < 64; ++i) EXPECT_EQ(dirty[i], std::byte{0});
}

TEST(Payload, OnlyEmptyTensors) {
  PayloadLayout layout;
  layout.segments = {{0, Codec::kF32, 0, 0, 0}, {1, Codec::kBf16, 0, 0, 0}};
  encode_payload(layout, nullptr, nullptr);
  decode_payload(layout, nullptr, nullptr);
}

}  // namespace
}  // namespace diloco
