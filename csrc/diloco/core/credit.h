// Receiver credit in bytes, cumulative over a session and one direction. The sender may have sent at most `granted`
// bytes; the receiver grants `received + window`. Bounds what is queued anywhere between the two, so that no
// high-water mark ever has to drop data. A sender that serves strangers has a window of its own besides: a receiver may
// grant itself what it likes, and still has no more than that window under way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "diloco/base/settings.h"

namespace diloco {

// The window of a sender in a run of this `credit_window_bytes`. A receiver's first grant is said before it knows the
// run's window, from the default one.
inline std::uint64_t sender_window(std::uint64_t credit_window_bytes) {
  return std::max(credit_window_bytes, Settings{}.credit_window_bytes);
}

class SenderCredit {
 public:
  void reset(std::uint64_t granted, std::uint64_t window) {
    granted_ = granted, window_ = window, sent_ = received_ = 0;
  }
  // Late, smaller grants do no harm. `received`: what the receiver says has reached it.
  void grant(std::uint64_t total, std::uint64_t received) {
    granted_ = std::max(granted_, total);
    received_ = std::max(received_, std::min(received, sent_));
  }
  bool allows(std::uint64_t bytes) const {
    const std::uint64_t under_way = sent_ - received_;
    return bytes <= granted_ - std::min(sent_, granted_) && bytes <= window_ - std::min(under_way, window_);
  }
  void spend(std::uint64_t bytes) { sent_ += bytes; }
  std::uint64_t sent() const { return sent_; }
  std::uint64_t granted() const { return granted_; }

 private:
  std::uint64_t granted_ = 0;
  std::uint64_t window_ = 0;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

class ReceiverCredit {
 public:
  void reset(std::uint64_t window, std::uint64_t granted) {
    window_ = window, granted_ = granted, received_ = announced_ = 0;
  }
  void set_window(std::uint64_t window) { window_ = window; }
  void receive(std::uint64_t bytes) { received_ += bytes; }
  // The new total to announce, when half a window has been consumed since the last announcement, also of what was
  // granted under a larger window: the sender may go by the smaller one. And when the window has grown.
  std::optional<std::uint64_t> announce() {
    const std::uint64_t half = (window_ + 1) / 2;
    if (received_ < announced_ + half && received_ + window_ < granted_ + half) return std::nullopt;
    return grant_now();
  }
  // The current total, for a message that carries credit anyway.
  std::uint64_t grant_now() {
    announced_ = received_;
    return granted_ = std::max(granted_, received_ + window_);
  }
  std::uint64_t received() const { return received_; }
  std::uint64_t left() const { return granted_ - std::min(received_, granted_); }  // what the sender may still send

 private:
  std::uint64_t window_ = 0;
  std::uint64_t granted_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t announced_ = 0;  // received at the last announcement
};

}  // namespace diloco
