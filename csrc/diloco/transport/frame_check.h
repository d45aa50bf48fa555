// What every transport does to a frame on its way out and in. Private to the transports.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "diloco/transport/transport.h"

namespace diloco {

// What a frame under way costs beside its bytes: about what the bookkeeping of either transport takes.
constexpr std::uint64_t kFrameOverhead = 768;

// Why a peer is cut to which too much is unsent.
std::string unread_text(std::uint64_t unsent, const TransportLimits& limits);

// Sets header.payload_bytes, and header.checksum unless it is known.
void seal(OutFrame& frame);
// Decodes the header and verifies that the payload is as long and as whole as it says, and not longer than its type
// may be. Of another protocol version's frame only the length limit is checked. nullopt with the reason in `why`.
std::optional<Header> open_frame(std::span<const std::byte> header, std::span<const std::byte> payload,
                                 const TransportLimits& limits, std::string* why);

}  // namespace diloco
