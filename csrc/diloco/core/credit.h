// Receiver credit in bytes, cumulative over a session and one direction. The sender may have sent at most `granted`
// bytes; the receiver grants `received + window`. Bounds what is queued anywhere between the two, so that no
// high-water mark ever has to drop data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace diloco {

class SenderCredit {
 public:
  void reset(std::uint64_t granted) { granted_ = granted, sent_ = 0; }
  void grant(std::uint64_t total) { granted_ = std::max(granted_, total); }  // late, smaller grants do no harm
  bool allows(std::uint64_t bytes) const { return bytes <= granted_ - std::min(sent_, granted_); }
  void spend(std::uint64_t bytes) { sent_ += bytes; }
  std::uint64_t sent() const { return sent_; }
  std::uint64_t granted() const { return granted_; }

 private:
  std::uint64_t granted_ = 0;
  std::uint64_t sent_ = 0;
};

class ReceiverCredit {
 public:
  void reset(std::uint64_t window, std::uint64_t granted) { window_ = window, granted_ = granted, received_ = 0; }
  void set_window(std::uint64_t window) { window_ = window; }
  void receive(std::uint64_t bytes) { received_ += bytes; }
  bool overrun() const { return received_ > granted_; }  // the sender broke the agreement
  // The new total to announce, when half a window has been consumed since the last announcement.
  std::optional<std::uint64_t> announce() {
    const std::uint64_t total = received_ + window_;
    if (total < granted_ + (window_ + 1) / 2) return std::nullopt;
    granted_ = total;
    return total;
  }
  // The current total, for a message that carries credit anyway.
  std::uint64_t grant_now() { return granted_ = std::max(granted_, received_ + window_); }
  std::uint64_t received() const { return received_; }

 private:
  std::uint64_t window_ = 0;
  std::uint64_t granted_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace diloco
