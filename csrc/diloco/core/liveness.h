// One connection's signs of life, without a clock: the owner passes `now`.
#pragma once

#include <algorithm>

#include "diloco/base/types.h"

namespace diloco {

class Liveness {
 public:
  void start(TimePoint now, Seconds interval, Seconds timeout) {
    heard_ = said_ = now;
    interval_ = interval;
    timeout_ = timeout;
  }
  void heard(TimePoint now) { heard_ = now; }
  void said(TimePoint now) { said_ = now; }
  bool silent(TimePoint now) const { return now >= heard_ + timeout_; }
  bool must_speak(TimePoint now) const { return now >= said_ + interval_; }
  TimePoint deadline() const { return std::min(heard_ + timeout_, said_ + interval_); }
  TimePoint last_heard() const { return heard_; }

 private:
  TimePoint heard_ = 0.0;
  TimePoint said_ = 0.0;
  Seconds interval_ = 1.0;
  Seconds timeout_ = 5.0;
};

}  // namespace diloco
