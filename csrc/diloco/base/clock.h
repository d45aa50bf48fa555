// The shells' clock: seconds, monotonic, origin of no meaning. Cores never call it; they are given `now`.
#pragma once

#include <chrono>

#include "diloco/base/types.h"

namespace diloco {

inline TimePoint monotonic_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace diloco
