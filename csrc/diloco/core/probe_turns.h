// What strangers may have the syncer send and receive to measure their link (PROBE), without a clock: the owner passes
// `now`. One peer measures at a time, so two do not measure each other; all together may move kProbeBytesPerS in the
// long run and kProbeBurstBytes at once, both directions counted, so a run loses no more than that to them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "diloco/base/types.h"

namespace diloco {

constexpr std::uint64_t kProbeBytesPerS = 8 << 20;
constexpr std::uint64_t kProbeBurstBytes = 64 << 20;  // also the largest answer there is, a WELCOME's body, fits
constexpr Seconds kProbeTurnS = 15.0;                 // of one peer, then a pause in which others can come in
constexpr Seconds kProbeIdleS = 2.0;                  // without a PROBE: the turn is over; also the pause
constexpr Seconds kProbeAskAgainS = 0.25;             // while somebody else measures

// kProbeFrameBytes that nothing on the way can compress; the same in every call.
ConstBufferPtr probe_bytes();

class ProbeTurns {
 public:
  enum class Answer { kGranted, kOtherPeer, kPause, kBudget };
  // `again_s`: unless granted, after so long it makes sense to ask again.
  Answer ask(PeerId peer, std::uint64_t bytes, TimePoint now, Seconds* again_s) {
    if (peer_ != 0 && peer_ != peer && now < free_at()) {  // who is done before its time says so by hanging up
      return not_before(std::min(free_at(), now + kProbeAskAgainS), now, Answer::kOtherPeer, again_s);
    }
    if (peer_ == peer && now >= began_ + kProbeTurnS && now < began_ + kProbeTurnS + kProbeIdleS) {
      return not_before(began_ + kProbeTurnS + kProbeIdleS, now, Answer::kPause, again_s);
    }
    refill(now);
    const auto asked = static_cast<double>(std::min(bytes, kProbeBurstBytes));
    if (left_ < asked) {
      return not_before(now + (asked - left_) / static_cast<double>(kProbeBytesPerS), now, Answer::kBudget, again_s);
    }
    if (peer_ != peer || now >= free_at()) peer_ = peer, began_ = now;
    last_ = now;
    left_ -= static_cast<double>(bytes);
    return Answer::kGranted;
  }
  // More than was asked for has been sent: it is owed.
  void owe(std::uint64_t bytes) { left_ -= static_cast<double>(bytes); }
  void gone(PeerId peer) {
    if (peer_ == peer) peer_ = 0;
  }

 private:
  TimePoint free_at() const { return std::min(began_ + kProbeTurnS, last_ + kProbeIdleS); }
  static Answer not_before(TimePoint then, TimePoint now, Answer answer, Seconds* again_s) {
    *again_s = then - now;
    return answer;
  }
  void refill(TimePoint now) {
    left_ = std::min(left_ + std::max(0.0, now - at_) * static_cast<double>(kProbeBytesPerS),
                     static_cast<double>(kProbeBurstBytes));
    at_ = now;
  }

  PeerId peer_ = 0;  // whose turn it is; 0: nobody's
  TimePoint began_ = 0.0, last_ = 0.0, at_ = 0.0;
  double left_ = static_cast<double>(kProbeBurstBytes);
};

}  // namespace diloco
