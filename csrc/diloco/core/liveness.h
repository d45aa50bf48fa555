// One connection's signs of life, without a clock: the owner passes `now`.
#pragma once

#include <algorithm>

#include "diloco/base/types.h"

namespace diloco {

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
