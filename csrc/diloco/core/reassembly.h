// Puts the chunks of one direction of a session back together. One transfer is open at a time and its chunks arrive in
// order (one TCP stream, the sender finishes what it began), so a gap, an overlap, a duplicate or a second BEGIN is a
// protocol violation and costs the sender the connection. Nothing is allocated before the announced size has been
// checked against the negotiated one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "diloco/base/types.h"
#include "diloco/wire/header.h"
#include "diloco/wire/messages.h"

namespace diloco {

class Reassembly {
 public:
  struct Outcome {
    std::string error;                // not empty: protocol violation
    std::optional<Begin> complete;    // the whole transfer is here
    BufferPtr bytes;                  // with complete; null if it was skipped
  };

  // `expected_bytes` is the negotiated size of this kind of payload. `keep` false: a transfer nobody wants (too late);
  // its chunks are counted and dropped. With `sink` the bytes go there, and none come with `complete`.
  using Sink = std::function<void(std::uint64_t offset, std::span<const std::byte> bytes)>;
  Outcome begin(const Header& header, const Begin& begin, std::uint64_t expected_bytes, bool keep, Sink sink = {});
  Outcome chunk(const Header& header, std::span<const std::byte> payload);
  void reset();

  bool open() const { return open_.has_value(); }
  const Begin* current() const { return open_ ? &*open_ : nullptr; }
  std::uint64_t bytes_held() const { return bytes_ ? bytes_->size() : 0; }

 private:
  Outcome finish();
  std::optional<Begin> open_;
  BufferPtr bytes_;
  Sink sink_;
  std::uint64_t transfer_ = 0;
  std::uint64_t last_transfer_ = 0;
  std::uint64_t total_ = 0;
  std::uint64_t at_ = 0;
};

}  // namespace diloco
