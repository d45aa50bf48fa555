// Any bytes into any decoder: the first byte chooses it, the rest is the message. What decodes must encode again to
// something that decodes to the same bytes.
#include <cstdlib>
#include <span>
#include <string>

#include "diloco/wire/header.h"
#include "diloco/wire/messages.h"

namespace {

using diloco::Bytes;

template <typename Decode>
void round_trip(Decode decode, Bytes bytes) {
  std::string why;
  const auto first = decode(bytes, &why);
  if (!first) {
    if (why.empty()) std::abort();  // a refusal without a reason
    return;
  }
  const std::string once = diloco::encode(*first);
  const auto second = decode(std::as_bytes(std::span(once)), &why);
  if (!second || diloco::encode(*second) != once) std::abort();
}

void header(Bytes bytes) {
  std::string why;
  const auto decoded = diloco::decode_header(bytes, &why);
  if (!decoded && why.empty()) std::abort();
  if (!decoded || decoded->protocol != diloco::kProtocolVersion) return;
  const auto encoded = diloco::encode_header(*decoded);
  if (diloco::decode_header(encoded, &why) != decoded) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const Bytes bytes = std::as_bytes(std::span(data + 1, size - 1));
  switch (data[0] % 11) {
    case 0: header(bytes); break;
    case 1: round_trip(diloco::decode_hello, bytes); break;
    case 2: round_trip(diloco::decode_welcome, bytes); break;
    case 3: round_trip(diloco::decode_reject, bytes); break;
    case 4: round_trip(diloco::decode_step, bytes); break;
    case 5: round_trip(diloco::decode_heartbeat, bytes); break;
    case 6: round_trip(diloco::decode_arm, bytes); break;
    case 7: round_trip(diloco::decode_pull, bytes); break;
    case 8: round_trip(diloco::decode_begin, bytes); break;
    case 9: round_trip(diloco::decode_verdict, bytes); break;
    default: round_trip(diloco::decode_goodbye, bytes); break;
  }
  return 0;
}
