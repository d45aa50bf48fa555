#include <gtest/gtest.h>

#include "diloco/base/errors.h"
#include "merge/jobs.h"

namespace diloco {
namespace {

TEST(Image, OneChecksumPerChunk) {
  const BufferPtr bytes = test::buffer_of(test::random_floats(25, 1));
  const Image image = make_image(bytes, 32);
  ASSERT_EQ(image.checksums.size(), 4u);  // 32, 32, 32, 4
  EXPECT_EQ(image.chunk_bytes, 32u);
  EXPECT_EQ(image.bytes, bytes);
  EXPECT_EQ(image.checksums[1], checksum(bytes->bytes().subspan(32, 32)));
  EXPECT_EQ(image.checksums[3], checksum(bytes->bytes().subspan(96)));
  EXPECT_EQ(make_image(bytes, 100).checksums.size(), 1u);
  EXPECT_EQ(make_image(bytes, 1000).checksums, make_image(bytes, 100).checksums);
}

TEST(Image, NoBytesNoChunks) { EXPECT_TRUE(make_image(Buffer::make(0), 32).checksums.empty()); }

TEST(Image, RefusesChunksOfNothing) { EXPECT_THROW(make_image(Buffer::make(1), 0), ConfigError); }

// xxh3-64 with seed 0 is part of the protocol: the value of the empty input and of one byte 0.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2ull);
  const std::byte zero{0};
  EXPECT_EQ(checksum({&zero, 1}), 0xc44bdff4074eecdbull);
}

TEST(Checksum, SeesEveryBitAtAnyAddress) {
  test::Bytes bytes = test::bytes_of(test::random_floats(64, 1));
  test::Unaligned odd(bytes);
  const std::uint64_t before = checksum(bytes);
  EXPECT_EQ(checksum({odd.data(), bytes.size()}), before);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_NE(checksum(bytes), before);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

}  // namespace
}  // namespace diloco
