// The fixed binary header in front of every message: 144 bytes, little-endian, 64-bit sizes. docs/protocol.md has the
// table. Decoding never trusts: every field is bounds-checked, nothing is allocated, nothing is cast in place
// (received frames are unaligned).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "diloco/base/types.h"

namespace diloco {

constexpr std::uint32_t kMagic = 0x6f434c44;  // "DLCo"
constexpr std::uint16_t kProtocolVersion = 1;
constexpr std::size_t kHeaderBytes = 144;

enum class MessageType : std::uint8_t {
  kHello = 1,      // learner -> syncer, control, msgpack Hello: first message of every connection
  kWelcome = 2,    // syncer -> learner, control, msgpack Welcome
  kReject = 3,     // syncer -> peer, control, msgpack Reject: final, do not come back unchanged
  kRehello = 4,    // syncer -> peer: unknown session; introduce yourself again
  kStep = 5,       // learner -> syncer, control, fixed binary: one per boundary
  kHeartbeat = 6,  // both ways, control, msgpack Heartbeat (may be empty)
  kArm = 7,        // syncer -> learner, control, msgpack: fragments to keep staged
  kPull = 8,       // syncer -> learner, control, msgpack Pull: send a contribution (or your anchor)
  kCredit = 9,     // receiver -> sender, control, header only: `offset` = chunk bytes the sender may have sent
                   // in this session, `total` = chunk bytes received so far
  kBegin = 10,     // sender -> receiver, bulk, msgpack Begin: announces a transfer
  kChunk = 11,     // sender -> receiver, bulk, raw bytes: next piece of the transfer
  kLane = 12,      // learner -> syncer, bulk, msgpack Lane (empty but for parts of an island): binds this connection to
                   // `session` by `transfer` = token, as `part` of `parts`; `offset` = bytes the syncer may send to a part
  kVerdict = 13,   // syncer -> learner, control, msgpack Verdict: a contribution was refused
  kGoodbye = 14,   // either way, control, msgpack {reason}: leaves on purpose
  kStatus = 15,    // monitor -> syncer, control: asks; needs no HELLO
  kStatusReply = 16,  // syncer -> monitor, control, JSON
  kMiss = 17,      // learner -> syncer, control, header only: nothing will come for the PULL of `fragment`
  kProbe = 18,     // monitor -> syncer, control, any bytes: asks for `total` bytes back; needs no HELLO
  kProbeReply = 19,  // syncer -> monitor, control: the bytes; or by its flags something else
  // Reserved; refused until built.
  kMarker = 32,
  kDonorOffer = 33,
  kDonorRequest = 34,
  kDonorChunk = 35,
  kFinish = 36,
  kFinishAck = 37,
  kCtl = 38,
};
// Header::flags of kProbe and kProbeReply.
constexpr std::uint8_t kProbeRun = 1;      // the body asked for, or sent, is that of a WELCOME: layout, plan, settings
constexpr std::uint8_t kProbeRefused = 2;  // reply: the body is a text, why; `offset` = ms until asking again makes sense
constexpr std::uint64_t kProbeFrameBytes = 256 << 10;  // payload of a kProbe, and what it may ask for
const char* message_name(MessageType type);
bool is_reserved(MessageType type);

struct Header {
  MessageType type = MessageType::kHeartbeat;
  std::uint8_t flags = 0;
  std::uint16_t protocol = kProtocolVersion;
  SessionId session = 0;
  std::uint64_t epoch = 0;
  Incarnation incarnation = 0;
  FragmentId fragment = 0;
  std::uint32_t shard = 0;
  Version version;
  std::uint16_t lane = 0;
  std::uint16_t part = 0;   // of an island: of the rank this message comes from or goes to
  std::uint16_t parts = 1;
  std::uint8_t codec = 0;
  std::uint32_t colour = 0;    // snapshot colour
  std::uint64_t transfer = 0;  // id of a transfer within the session and direction; the lane token for kLane
  std::uint64_t offset = 0;    // first byte of a chunk; the granted total for kCredit
  std::uint64_t total = 0;     // bytes of the whole transfer
  std::uint64_t payload_bytes = 0;  // of this message
  std::uint64_t checksum = 0;       // xxh3-64 of this message's payload
  bool operator==(const Header&) const = default;
};

// Position of every field; the layout of docs/protocol.md. Magic, protocol and type keep their places in every future
// version, and so do the size of the header and the bodies' being MessagePack maps of HELLO and REJECT: that is what
// lets two versions tell each other apart. Bytes not listed are reserved and zero.
namespace header_at {
constexpr std::size_t kMagicAt = 0, kProtocol = 4, kType = 6, kFlags = 7, kSession = 8, kEpoch = 16, kIncarnation = 24,
                      kFragment = 32, kShard = 36, kVersionEpoch = 40, kVersionN = 48, kLane = 56, kPart = 58,
                      kParts = 60, kCodec = 62, kReserved1 = 63, kColour = 64, kReserved2 = 68, kTransfer = 72,
                      kOffset = 80, kTotal = 88, kPayloadBytes = 96, kChecksum = 104, kReserved3 = 112,
                      kHeaderChecksum = 136;  // xxh3-64 of bytes [0, 136)
}  // namespace header_at

std::array<std::byte, kHeaderBytes> encode_header(const Header& header);
// nullopt with the reason in `why`: wrong size, magic, unknown type, parts/part out of range, header checksum.
// A header of another protocol version decodes as long as its magic, size and HELLO/REJECT type hold, so that the
// refusal can name both versions; of its other fields nothing is checked and nothing may be believed.
// Reserved types decode (is_reserved), so that the refusal can name them.
std::optional<Header> decode_header(std::span<const std::byte> bytes, std::string* why);

// xxh3-64: Header::checksum of this payload.
std::uint64_t payload_checksum(std::span<const std::byte> payload);

// Largest payload a message of this type may have, before anything is known about the model (chunks: chunk_bytes).
std::uint64_t max_payload_bytes(MessageType type, std::uint64_t chunk_bytes);

}  // namespace diloco
