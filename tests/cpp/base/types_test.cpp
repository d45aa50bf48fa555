#include "diloco/base/types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <new>

#include "diloco/base/version.h"

namespace diloco {
namespace {

TEST(Version, IsOrderedByEpochThenNumber) {
  EXPECT_LT((Version{1, 9}), (Version{2, 0}));
  EXPECT_LT((Version{2, 0}), (Version{2, 1}));
  EXPECT_EQ((Version{2, 1}), (Version{2, 1}));
  EXPECT_TRUE(Version{}.none());
  EXPECT_FALSE((Version{1, 0}).none());
  EXPECT_EQ(to_string(Version{3, 17}), "3.17");
}

TEST(Version, OfThePackageHasThreeNumbers) {
  const std::string text = kVersion;
  EXPECT_EQ(std::count(text.begin(), text.end(), '.'), 2) << text;
}

TEST(Buffer, IsAlignedAndZeroed) {
  for (const std::size_t size : {0, 1, 63, 64, 65, 4097, 1 << 20}) {
    const auto buffer = Buffer::make(size);
    ASSERT_NE(buffer->data(), nullptr) << size;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 64, 0U) << size;
    EXPECT_EQ(buffer->size(), size);
    const auto bytes = std::as_const(*buffer).bytes();
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; })) << size;
    std::fill_n(buffer->data(), size, std::byte{0xff});  // the sanitizer checks the ends
  }
}

TEST(Buffer, TooLargeThrowsInsteadOfWrapping) {
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  EXPECT_THROW(Buffer::make(most), std::bad_alloc);
  EXPECT_THROW(Buffer::make(most - 10), std::bad_alloc);
}

TEST(Slice, KeepsItsBufferAlive) {
  Slice slice;
  EXPECT_TRUE(slice.bytes().empty());
  {
    auto buffer = Buffer::make(8);
    buffer->data()[3] = std::byte{42};
    slice = {buffer, 2, 4};
  }
  ASSERT_EQ(slice.bytes().size(), 4U);
  EXPECT_EQ(slice.bytes()[1], std::byte{42});
}

}  // namespace
}  // namespace diloco
