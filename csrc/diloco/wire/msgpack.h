// Bounds of an untrusted MessagePack body, checked before anything is built from it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace diloco {

constexpr int kMaxMsgpackDepth = 32;
constexpr std::size_t kMaxMsgpackValues = std::size_t{1} << 20;

// True if `bytes` are exactly one MessagePack value nested at most kMaxMsgpackDepth deep, of at most kMaxMsgpackValues
// values, whose counts and lengths fit the bytes that are there, whose maps have distinct text keys, and whose floats
// are finite. Otherwise false with the reason in `why`. Allocates no more than the bytes' own size.
bool msgpack_well_formed(std::span<const std::byte> bytes, std::string* why);

// Text from a stranger that may go into logs and JSON: valid UTF-8 without control characters (newline and tab
// pass with `lines`).
bool is_clean_text(std::string_view text, bool lines);

}  // namespace diloco
