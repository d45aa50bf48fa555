// Messages as they pass between a core and a transport.
#pragma once

#include <span>
#include <string>

#include "diloco/base/types.h"
#include "diloco/wire/header.h"

namespace diloco {

enum class Channel : std::uint8_t { kControl = 0, kBulk = 1 };

// Outgoing message. At most one of body and slice is non-empty. The transport fills in header.payload_bytes, and
// header.checksum unless `checksum_known`.
struct OutFrame {
  Header header;
  std::string body;
  Slice slice;  // sent without a copy; the buffer must not change until the transport has released it
  bool checksum_known = false;

  std::span<const std::byte> payload() const { return body.empty() ? slice.bytes() : std::as_bytes(std::span(body)); }
};

}  // namespace diloco
