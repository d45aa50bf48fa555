#include "diloco/wire/header.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "wire/wire_samples.h"

namespace diloco::wire_test {
namespace {

namespace at = header_at;
using Encoded = std::array<std::byte, kHeaderBytes>;

// What a peer with a wrong idea of the field would send: the header's own checksum is right again.
Encoded with_byte(Encoded bytes, std::size_t offset, std::uint8_t value) {
  bytes[offset] = std::byte{value};
  const std::uint64_t sum = XXH3_64bits(bytes.data(), at::kHeaderChecksum);
  for (std::size_t i = 0; i < 8; ++i) bytes[at::kHeaderChecksum + i] = static_cast<std::byte>(sum >> (8 * i));
  return bytes;
}

std::string refusal(std::span<const std::byte> bytes) {
  std::string why;
  EXPECT_FALSE(decode_header(bytes, &why).has_value());
  return why;
}

TEST(WireHeader, RoundTripsEveryField) {
  Random random(1);
  for (int i = 0; i < 5000; ++i) {
    const Header header = any_header(random);
    std::string why;
    const auto back = decode_header(encode_header(header), &why);
    ASSERT_TRUE(back.has_value()) << why;
    ASSERT_EQ(*back, header);
  }
}

TEST(WireHeader, HasTheDocumentedBytes) {
  Header h;
  h.type = MessageType::kChunk;
  h.session = 0x1122334455667788;
  h.fragment = 0x01020304;
  h.lane = 0x0a0b;
  h.parts = 2;
  h.part = 1;
  h.payload_bytes = 0xffeeddccbbaa9988;
  const Encoded bytes = encode_header(h);
  const auto byte = [&](std::size_t i) { return std::to_integer<int>(bytes[i]); };
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), 4), "DLCo");
  EXPECT_EQ(byte(4), 1);
  EXPECT_EQ(byte(5), 0);
  EXPECT_EQ(byte(6), 11);
  EXPECT_EQ(byte(8), 0x88);
  EXPECT_EQ(byte(15), 0x11);
  EXPECT_EQ(byte(32), 0x04);
  EXPECT_EQ(byte(56), 0x0b);
  EXPECT_EQ(byte(58), 1);
  EXPECT_EQ(byte(60), 2);
  EXPECT_EQ(byte(96), 0x88);
  EXPECT_EQ(byte(103), 0xff);
}

TEST(WireHeader, DecodesAtEveryAlignment) {
  Random random(2);
  const Header header = any_header(random);
  const Encoded encoded = encode_header(header);
  for (std::size_t shift = 0; shift < 16; ++shift) {
    std::vector<std::byte> storage(kHeaderBytes + 16);
    std::copy(encoded.begin(), encoded.end(), storage.begin() + static_cast<std::ptrdiff_t>(shift));
    ASSERT_EQ(decode_header(std::span(storage).subspan(shift, kHeaderBytes), nullptr), header);
  }
}

TEST(WireHeader, RefusesEverySizeButItsOwn) {
  const Encoded encoded = encode_header({});
  for (std::size_t size = 0; size < kHeaderBytes; ++size) {
    EXPECT_NE(refusal(std::span(encoded).first(size)).find("144"), std::string::npos);
  }
  std::vector<std::byte> longer(encoded.begin(), encoded.end());
  longer.push_back(std::byte{0});
  EXPECT_NE(refusal(longer).find("145"), std::string::npos);
}

TEST(WireHeader, EverySingleBitFlipIsRefusedOrIsAnotherVersionsHello) {
  Random random(3);
  const Encoded good = encode_header(any_header(random));
  for (std::size_t bit = 0; bit < kHeaderBytes * 8; ++bit) {
    Encoded bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    std::string why;
    const auto header = decode_header(bad, &why);
    if (header) {
      EXPECT_NE(header->protocol, kProtocolVersion) << "bit " << bit;
    } else {
      EXPECT_FALSE(why.empty()) << "bit " << bit;
    }
  }
}

TEST(WireHeader, BadMagicIsNamed) {
  EXPECT_NE(refusal(with_byte(encode_header({}), at::kMagicAt, 'X')).find("magic"), std::string::npos);
}

TEST(WireHeader, EveryUnknownTypeIsRefusedByNumber) {
  const Encoded encoded = encode_header({});
  const std::set<int> known = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
                               32, 33, 34, 35, 36, 37, 38};
  for (int type = 0; type < 256; ++type) {
    const Encoded bytes = with_byte(encoded, at::kType, static_cast<std::uint8_t>(type));
    if (known.contains(type)) {
      EXPECT_TRUE(decode_header(bytes, nullptr).has_value()) << type;
      EXPECT_STRNE(message_name(static_cast<MessageType>(type)), "unknown");
    } else {
      EXPECT_NE(refusal(bytes).find("unknown message type " + std::to_string(type)), std::string::npos);
    }
    EXPECT_EQ(is_reserved(static_cast<MessageType>(type)), type >= 32 && type <= 38) << type;
  }
}

TEST(WireHeader, PartsMustExist) {
  Header h;
  h.parts = 0;
  EXPECT_NE(refusal(encode_header(h)).find("part 0 of 0"), std::string::npos);
  h.parts = 4;
  h.part = 4;
  EXPECT_NE(refusal(encode_header(h)).find("part 4 of 4"), std::string::npos);
  h.part = 3;
  EXPECT_TRUE(decode_header(encode_header(h), nullptr).has_value());
}

TEST(WireHeader, ReservedBytesMustBeZero) {
  for (const std::size_t offset : {at::kReserved1, at::kReserved2, at::kReserved2 + 3, at::kReserved3, at::kReserved3 + 23}) {
    EXPECT_NE(refusal(with_byte(encode_header({}), offset, 1)).find("reserved"), std::string::npos) << offset;
  }
}

TEST(WireHeader, ChecksumMismatchIsNamed) {
  Encoded bytes = encode_header({});
  bytes[at::kSession] ^= std::byte{1};
  EXPECT_NE(refusal(bytes).find("checksum"), std::string::npos);
}

TEST(WireHeader, OtherVersionsHelloAndRejectDecodeSoThatBothVersionsCanBeNamed) {
  for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t{2}, std::uint16_t{65535}}) {
    for (const MessageType type : {MessageType::kHello, MessageType::kReject}) {
      Encoded bytes = encode_header({});
      bytes[at::kProtocol] = static_cast<std::byte>(version & 0xff);
      bytes[at::kProtocol + 1] = static_cast<std::byte>(version >> 8);
      bytes[at::kType] = static_cast<std::byte>(type);
      for (std::size_t i = at::kFlags; i < kHeaderBytes; ++i) bytes[i] = std::byte{0xee};  // a layout we do not know
      const auto header = decode_header(bytes, nullptr);
      ASSERT_TRUE(header.has_value());
      EXPECT_EQ(header->protocol, version);
      EXPECT_EQ(header->type, type);
    }
  }
}

TEST(WireHeader, OtherVersionsOtherMessagesAreRefusedNamingBoth) {
  Header h;
  h.type = MessageType::kStep;
  h.protocol = 7;
  const std::string why = refusal(encode_header(h));
  EXPECT_NE(why.find("version 7"), std::string::npos) << why;
  EXPECT_NE(why.find("expected 1"), std::string::npos) << why;
}

TEST(WireHeader, LimitsExistForEveryTypeAndOnlyChunksFollowChunkBytes) {
  for (int type = 0; type < 256; ++type) {
    const auto t = static_cast<MessageType>(type);
    const bool chunk = t == MessageType::kChunk;
    EXPECT_EQ(max_payload_bytes(t, 12345) == 12345, chunk);
    EXPECT_LE(max_payload_bytes(t, 0), std::uint64_t{32} << 20);
  }
  EXPECT_EQ(max_payload_bytes(MessageType::kCredit, 1 << 20), 0u);
  EXPECT_EQ(max_payload_bytes(static_cast<MessageType>(200), 1 << 20), 0u);
}

TEST(WireHeader, PayloadChecksumSeesEveryBit) {
  Random random(4);
  std::string payload(300, '\0');
  for (char& c : payload) c = static_cast<char>(random());
  const std::uint64_t sum = payload_checksum(as_bytes(payload));
  for (std::size_t bit = 0; bit < payload.size() * 8; ++bit) {
    payload[bit / 8] = static_cast<char>(payload[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_NE(payload_checksum(as_bytes(payload)), sum);
    payload[bit / 8] = static_cast<char>(payload[bit / 8] ^ (1 << (bit % 8)));
  }
  EXPECT_EQ(payload_checksum({}), payload_checksum(as_bytes("")));
}

}  // namespace
}  // namespace diloco::wire_test
