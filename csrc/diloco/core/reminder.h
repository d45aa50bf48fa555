// When something that lasts is to be said: once it has lasted for a while, and then every so often until it is over.
#pragma once

#include <limits>

#include "diloco/base/types.h"

namespace diloco {

class Reminder {
 public:
  // Asked whenever the owner looks: whether it is time to say it.
  bool due(bool lasts, TimePoint now) {
    constexpr Seconds kAfterS = 5.0, kEveryS = 30.0;
    if (!lasts) at_ = kNever;
    else if (at_ == kNever) at_ = now + kAfterS;
    if (now < at_) return false;
    at_ = now + kEveryS;
    return true;
  }
  TimePoint next() const { return at_; }  // infinity while nothing lasts

 private:
  static constexpr TimePoint kNever = std::numeric_limits<TimePoint>::infinity();
  TimePoint at_ = kNever;
};

}  // namespace diloco
