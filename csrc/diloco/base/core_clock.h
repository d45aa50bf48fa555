// The clock a shell gives its core. It follows the machine's, except that no half of a turn of the I/O loop (waiting,
// then working) may take longer than it meant to plus `slack`: a process that was stopped, suspended or starved must
// not conclude that everybody else was silent meanwhile. What was too long is left out for good.
//
// Not thread-safe: its owner's mutex or its owner's thread.
#pragma once

#include <algorithm>
#include <limits>

#include "diloco/base/clock.h"

namespace diloco {

class CoreClock {
 public:
  static constexpr Seconds kLongestPoll = 1.0;
  static constexpr Seconds kShortestPoll = 0.001;

  TimePoint now() const { return std::min(running(), limit_); }

  // Begins to wait for a deadline of the core: how long, at most kLongestPoll. Once the tick of a deadline has been
  // served, one that stays in the past must not spin.
  Seconds begin_wait(TimePoint deadline, bool tick_served, Seconds slack) {
    const Seconds wait = std::clamp(deadline - now(), tick_served ? kShortestPoll : 0.0, kLongestPoll);
    waits(wait, slack);
    return wait;
  }
  // Call before and after waiting; `wait` is how long that is meant to take.
  void waits(Seconds wait, Seconds slack) { restart(wait + slack); }
  void works(Seconds slack) { restart(slack); }

 private:
  TimePoint running() const { return monotonic_now() - origin_; }
  void restart(Seconds allowed) {
    origin_ += running() - now();
    limit_ = running() + allowed;
  }

  TimePoint origin_ = monotonic_now();
  TimePoint limit_ = std::numeric_limits<double>::infinity();
};

}  // namespace diloco
