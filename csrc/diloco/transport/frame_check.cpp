#include "diloco/transport/frame_check.h"

namespace diloco {

std::string unread_text(std::uint64_t unsent, const TransportLimits& limits) {
  return "does not read: " + std::to_string(unsent) + " bytes to it are unsent, at most " +
         std::to_string(limits.max_unsent_bytes) + " may be; read faster or ask for less";
}

void seal(OutFrame& frame) {
  const auto payload = frame.payload();
  frame.header.payload_bytes = payload.size();
  if (!frame.checksum_known) frame.header.checksum = payload_checksum(payload);
}

std::optional<Header> open_frame(std::span<const std::byte> header, std::span<const std::byte> payload,
                                 const TransportLimits& limits, std::string* why) {
  const auto refuse = [&](const Header& h, const std::string& text) -> std::optional<Header> {
    if (why) *why = std::string(message_name(h.type)) + " " + text;
    return std::nullopt;
  };
  const auto decoded = decode_header(header, why);
  if (!decoded) return std::nullopt;
  const std::uint64_t limit = max_payload_bytes(decoded->type, limits.chunk_bytes);
  if (payload.size() > limit) {
    return refuse(*decoded, "with a payload of " + std::to_string(payload.size()) + " bytes, at most " +
                                std::to_string(limit) + " are allowed");
  }
  if (decoded->protocol != kProtocolVersion) return decoded;
  if (decoded->payload_bytes != payload.size()) {
    return refuse(*decoded, "announces a payload of " + std::to_string(decoded->payload_bytes) + " bytes and has " +
                                std::to_string(payload.size()));
  }
  if (decoded->checksum != payload_checksum(payload)) {
    return refuse(*decoded, "payload does not match its checksum: damaged on the way");
  }
  return decoded;
}

}  // namespace diloco
