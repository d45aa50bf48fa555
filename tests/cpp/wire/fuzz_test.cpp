// Truncation, bit flips and random bytes: a decoder answers, and what it accepts is a valid message.
#include <gtest/gtest.h>

#include "sized.h"
#include "wire/wire_samples.h"

namespace diloco::wire_test {
namespace {

using testing::sized;

TEST(WireFuzz, TruncationAtEveryByteIsRefused) {
  Random random(31);
  for (const Kind& kind : kinds()) {
    for (int i = 0; i < 5; ++i) {
      const std::string bytes = kind.sample(random);
      for (std::size_t size = 0; size < bytes.size(); ++size) {
        if (kind.name == "HEARTBEAT" && size == 0) continue;  // empty: allowed
        // A copy of its own, so that a read past the end is one ASan sees.
        const std::vector<std::byte> copy(as_bytes(bytes).begin(), as_bytes(bytes).begin() + static_cast<std::ptrdiff_t>(size));
        std::string why;
        ASSERT_FALSE(kind.decodes(copy, &why)) << kind.name << " cut at " << size;
        ASSERT_FALSE(why.empty());
      }
    }
  }
}

// Whatever is accepted must encode and decode again: no half-valid value gets through.
void expect_closed(const Kind& kind, const std::vector<std::byte>& bytes) {
  std::string why;
  if (!kind.decodes(bytes, &why)) {
    ASSERT_FALSE(why.empty()) << kind.name;
    return;
  }
  const std::string again = kind.again(bytes);
  ASSERT_TRUE(kind.decodes(as_bytes(again), &why)) << kind.name << ": " << why;
}

TEST(WireFuzz, BitFlipsNeverCrash) {
  Random random(32);
  for (const Kind& kind : kinds()) {
    for (int i = 0; i < 2; ++i) {
      const std::string bytes = kind.sample(random);
      const std::size_t bits = bytes.size() * 8;
      const std::size_t stride = std::max<std::size_t>(1, bits / 4000);
      for (std::size_t bit = 0; bit < bits; bit += stride) {
        std::vector<std::byte> bad(as_bytes(bytes).begin(), as_bytes(bytes).end());
        bad[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
        expect_closed(kind, bad);
      }
    }
  }
}

TEST(WireFuzz, SplicedAndMutatedMessagesNeverCrash) {
  Random random(33);
  for (std::int64_t i = sized("messages", 20000, 2000000); i > 0; --i) {
    const Kind& kind = kinds()[below(random, kinds().size())];
    const std::string sample = kind.sample(random);
    std::vector<std::byte> bytes(as_bytes(sample).begin(), as_bytes(sample).end());
    for (std::size_t edits = 1 + below(random, 4); edits > 0 && !bytes.empty(); --edits) {
      const auto where = bytes.begin() + static_cast<std::ptrdiff_t>(below(random, bytes.size()));
      switch (below(random, 3)) {
        case 0: *where = static_cast<std::byte>(random()); break;
        case 1: bytes.erase(where); break;
        default: bytes.insert(where, static_cast<std::byte>(random())); break;
      }
    }
    expect_closed(kind, bytes);
  }
}

TEST(WireFuzz, RandomBytesNeverCrash) {
  Random random(34);
  for (std::int64_t i = sized("messages", 100000, 5000000); i > 0; --i) {
    std::vector<std::byte> bytes(below(random, 200));
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    expect_closed(kinds()[static_cast<std::size_t>(i) % kinds().size()], bytes);
    std::string why;
    ASSERT_FALSE(decode_header(bytes, &why).has_value());
  }
}

TEST(WireFuzz, RandomHeadersNeverCrash) {
  Random random(35);
  for (std::int64_t i = sized("headers", 20000, 2000000); i > 0; --i) {
    auto bytes = encode_header(any_header(random));
    for (std::size_t edits = 1 + below(random, 8); edits > 0; --edits) {
      bytes[below(random, bytes.size())] = static_cast<std::byte>(random());
    }
    std::string why;
    const auto header = decode_header(bytes, &why);
    ASSERT_TRUE(header.has_value() || !why.empty());
  }
}

}  // namespace
}  // namespace diloco::wire_test
