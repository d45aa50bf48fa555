#include "diloco/wire/header.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace diloco {
namespace {

namespace at = header_at;

template <typename T>
void put(std::array<std::byte, kHeaderBytes>& out, std::size_t offset, T value) {
  static_assert(std::is_unsigned_v<T>);
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out[offset + i] = static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i));
  }
}

template <typename T>
T get(std::span<const std::byte> in, std::size_t offset) {
  static_assert(std::is_unsigned_v<T>);
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value |= std::to_integer<std::uint64_t>(in[offset + i]) << (8 * i);
  }
  return static_cast<T>(value);
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::nullopt_t refuse(std::string* why, std::string text) {
  if (why) *why = std::move(text);
  return std::nullopt;
}

Header read_fields(std::span<const std::byte> bytes) {
  Header h;
  h.type = static_cast<MessageType>(get<std::uint8_t>(bytes, at::kType));
  h.flags = get<std::uint8_t>(bytes, at::kFlags);
  h.protocol = get<std::uint16_t>(bytes, at::kProtocol);
  h.session = get<std::uint64_t>(bytes, at::kSession);
  h.epoch = get<std::uint64_t>(bytes, at::kEpoch);
  h.incarnation = get<std::uint64_t>(bytes, at::kIncarnation);
  h.fragment = get<std::uint32_t>(bytes, at::kFragment);
  h.shard = get<std::uint32_t>(bytes, at::kShard);
  h.version.epoch = get<std::uint64_t>(bytes, at::kVersionEpoch);
  h.version.n = get<std::uint64_t>(bytes, at::kVersionN);
  h.lane = get<std::uint16_t>(bytes, at::kLane);
  h.part = get<std::uint16_t>(bytes, at::kPart);
  h.parts = get<std::uint16_t>(bytes, at::kParts);
  h.codec = get<std::uint8_t>(bytes, at::kCodec);
  h.colour = get<std::uint32_t>(bytes, at::kColour);
  h.transfer = get<std::uint64_t>(bytes, at::kTransfer);
  h.offset = get<std::uint64_t>(bytes, at::kOffset);
  h.total = get<std::uint64_t>(bytes, at::kTotal);
  h.payload_bytes = get<std::uint64_t>(bytes, at::kPayloadBytes);
  h.checksum = get<std::uint64_t>(bytes, at::kChecksum);
  return h;
}

}  // namespace

const char* message_name(MessageType type) {
  switch (type) {
    case MessageType::kHello: return "HELLO";
    case MessageType::kWelcome: return "WELCOME";
    case MessageType::kReject: return "REJECT";
    case MessageType::kRehello: return "REHELLO";
    case MessageType::kStep: return "STEP";
    case MessageType::kHeartbeat: return "HEARTBEAT";
    case MessageType::kArm: return "ARM";
    case MessageType::kPull: return "PULL";
    case MessageType::kCredit: return "CREDIT";
    case MessageType::kBegin: return "BEGIN";
    case MessageType::kChunk: return "CHUNK";
    case MessageType::kLane: return "LANE";
    case MessageType::kVerdict: return "VERDICT";
    case MessageType::kGoodbye: return "GOODBYE";
    case MessageType::kStatus: return "STATUS";
    case MessageType::kStatusReply: return "STATUS_REPLY";
    case MessageType::kMiss: return "MISS";
    case MessageType::kProbe: return "PROBE";
    case MessageType::kProbeReply: return "PROBE_REPLY";
    case MessageType::kMarker: return "MARKER";
    case MessageType::kDonorOffer: return "DONOR_OFFER";
    case MessageType::kDonorRequest: return "DONOR_REQUEST";
    case MessageType::kDonorChunk: return "DONOR_CHUNK";
    case MessageType::kFinish: return "FINISH";
    case MessageType::kFinishAck: return "FINISH_ACK";
    case MessageType::kCtl: return "CTL";
  }
  return "unknown";
}

bool is_reserved(MessageType type) { return type >= MessageType::kMarker && type <= MessageType::kCtl; }

std::array<std::byte, kHeaderBytes> encode_header(const Header& h) {
  std::array<std::byte, kHeaderBytes> out{};
  put(out, at::kMagicAt, kMagic);
  put(out, at::kProtocol, h.protocol);
  put(out, at::kType, static_cast<std::uint8_t>(h.type));
  put(out, at::kFlags, h.flags);
  put(out, at::kSession, h.session);
  put(out, at::kEpoch, h.epoch);
  put(out, at::kIncarnation, h.incarnation);
  put(out, at::kFragment, h.fragment);
  put(out, at::kShard, h.shard);
  put(out, at::kVersionEpoch, h.version.epoch);
  put(out, at::kVersionN, h.version.n);
  put(out, at::kLane, h.lane);
  put(out, at::kPart, h.part);
  put(out, at::kParts, h.parts);
  put(out, at::kCodec, h.codec);
  put(out, at::kColour, h.colour);
  put(out, at::kTransfer, h.transfer);
  put(out, at::kOffset, h.offset);
  put(out, at::kTotal, h.total);
  put(out, at::kPayloadBytes, h.payload_bytes);
  put(out, at::kChecksum, h.checksum);
  put(out, at::kHeaderChecksum, static_cast<std::uint64_t>(XXH3_64bits(out.data(), at::kHeaderChecksum)));
  return out;
}

std::optional<Header> decode_header(std::span<const std::byte> received, std::string* why) {
  if (received.size() != kHeaderBytes) {
    return refuse(why, "a header has " + std::to_string(kHeaderBytes) + " bytes, this one " +
                           std::to_string(received.size()));
  }
  std::array<std::byte, kHeaderBytes> copy;
  std::memcpy(copy.data(), received.data(), kHeaderBytes);
  const std::span<const std::byte> bytes(copy);
  if (get<std::uint32_t>(bytes, at::kMagicAt) != kMagic) {
    return refuse(why, "bad magic number: not a message of this protocol");
  }
  const Header h = read_fields(bytes);
  if (h.protocol != kProtocolVersion) {
    if (h.type == MessageType::kHello || h.type == MessageType::kReject) return h;
    return refuse(why, "protocol version " + std::to_string(h.protocol) + ", expected " +
                           std::to_string(kProtocolVersion) + ", in a message that is neither HELLO nor REJECT");
  }
  if (get<std::uint64_t>(bytes, at::kHeaderChecksum) != XXH3_64bits(bytes.data(), at::kHeaderChecksum)) {
    return refuse(why, "header checksum does not match: damaged on the way");
  }
  if (std::strcmp(message_name(h.type), "unknown") == 0) {
    return refuse(why, "unknown message type " + std::to_string(static_cast<int>(h.type)));
  }
  if (h.parts == 0 || h.part >= h.parts) {
    return refuse(why, "part " + std::to_string(h.part) + " of " + std::to_string(h.parts) + " does not exist");
  }
  if (bytes[at::kReserved1] != std::byte{0} || !all_zero(bytes.subspan(at::kReserved2, 4)) ||
      !all_zero(bytes.subspan(at::kReserved3, at::kHeaderChecksum - at::kReserved3))) {
    return refuse(why, "reserved header bytes are not zero");
  }
  return h;
}

std::uint64_t payload_checksum(std::span<const std::byte> payload) {
  return XXH3_64bits(payload.data(), payload.size());
}

std::uint64_t max_payload_bytes(MessageType type, std::uint64_t chunk_bytes) {
  constexpr std::uint64_t kKiB = 1024, kMiB = 1024 * 1024;
  switch (type) {
    case MessageType::kHello: return 16 * kMiB;    // names and shapes of every tensor
    case MessageType::kWelcome: return 32 * kMiB;  // the same, plan and settings
    case MessageType::kProbeReply: return 32 * kMiB;  // may be a WELCOME's body
    case MessageType::kStatusReply: return 32 * kMiB;
    case MessageType::kBegin: return 2 * kMiB;     // a line per incarnation ever merged
    case MessageType::kStep:
    case MessageType::kArm: return kMiB;
    case MessageType::kProbe: return kProbeFrameBytes;
    case MessageType::kReject:
    case MessageType::kHeartbeat:
    case MessageType::kVerdict:
    case MessageType::kGoodbye: return 64 * kKiB;
    case MessageType::kPull:
    case MessageType::kStatus: return 4 * kKiB;
    case MessageType::kLane: return 4 * kMiB;      // a box of every tensor
    case MessageType::kRehello:
    case MessageType::kCredit:
    case MessageType::kMiss: return 0;
    case MessageType::kChunk: return chunk_bytes;
    case MessageType::kMarker:
    case MessageType::kDonorOffer:
    case MessageType::kDonorRequest:
    case MessageType::kDonorChunk:
    case MessageType::kFinish:
    case MessageType::kFinishAck:
    case MessageType::kCtl: return 4 * kKiB;  // refused anyway: enough to be read and named
  }
  return 0;
}

}  // namespace diloco
