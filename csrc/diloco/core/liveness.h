// One connection's signs of life, without a clock: the owner passes `now`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "diloco/base/types.h"

namespace diloco {

// How long to wait before a connection is tried again after so many failures: doubling, with jitter by `random`, and never
// longer than a recovering syncer gathers holders.
inline Seconds back_off_s(unsigned failures, std::uint64_t random) {
  constexpr Seconds kFirstS = 0.1, kLastS = 2.0;
  const double jitter = static_cast<double>(random % 1024) / 1024.0;
  return std::min(kLastS, kFirstS * std::pow(2.0, std::min(failures, 10u))) * (0.5 + 0.5 * jitter);
}

class Liveness {
 public:
  // `first`: how long the first sign may take; the way there and back, and what we have just sent, are in it.
  void start(TimePoint now, Seconds interval, Seconds timeout, Seconds first) {
    heard_ = said_ = now;
    interval_ = interval;
    timeout_ = timeout;
    limit_ = first;
    heard_once_ = false;
  }
  void start(TimePoint now, Seconds interval, Seconds timeout) { start(now, interval, timeout, timeout); }
  void heard(TimePoint now) {
    heard_ = now;
    limit_ = timeout_;
    heard_once_ = true;
  }
  void said(TimePoint now) { said_ = now; }
  bool silent(TimePoint now) const { return now >= heard_ + limit_; }
  bool must_speak(TimePoint now) const { return now >= said_ + interval_; }
  TimePoint deadline() const { return std::min(heard_ + limit_, said_ + interval_); }
  TimePoint last_heard() const { return heard_; }
  bool heard_once() const { return heard_once_; }

 private:
  TimePoint heard_ = 0.0;
  TimePoint said_ = 0.0;
  Seconds interval_ = 1.0;
  Seconds timeout_ = 5.0;
  Seconds limit_ = 5.0;
  bool heard_once_ = false;
};

}  // namespace diloco
