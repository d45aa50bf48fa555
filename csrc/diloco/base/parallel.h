// How the cores of a machine are lent to one computation, without a thread in the layers that compute.
#pragma once

#include <cstddef>
#include <functional>

namespace diloco {

// Runs body(0) ... body(count - 1), each once, in any order and on any threads; returns when all have ended. What comes out
// must depend on neither. Bodies do not throw.
using Parallel = std::function<void(std::size_t count, const std::function<void(std::size_t)>& body)>;

// On the caller's thread, in order.
inline void serially(std::size_t count, const std::function<void(std::size_t)>& body) {
  for (std::size_t i = 0; i < count; ++i) body(i);
}

}  // namespace diloco
