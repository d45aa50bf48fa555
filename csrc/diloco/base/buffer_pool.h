// Buffers that are used again: a fresh one of many megabytes costs more in page faults than the arithmetic that fills it.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "diloco/base/types.h"

namespace diloco {

// Thread-safe. What make() gave comes back by itself when the last owner lets go, also after the pool is gone.
class BufferPool {
 public:
  // Keeps buffers that were asked for with at most so many bytes in all; what comes back beyond that is freed.
  explicit BufferPool(std::size_t idle_bytes = 0) : state_(std::make_shared<State>(idle_bytes)) {}
  void keep_at_least(std::size_t idle_bytes);  // from now on

  // Unlike Buffer::make(), the contents are arbitrary. An idle buffer is taken if at most an eighth of it would be unused;
  // else idle ones are freed to make room for a fresh one.
  BufferPtr make(std::size_t bytes);
  std::size_t idle_bytes() const;

 private:
  struct State {
    explicit State(std::size_t most) : most(most) {}
    std::mutex mutex;  // guards the rest
    std::size_t most;
    std::multimap<std::size_t, std::unique_ptr<Buffer>> idle;  // by capacity
    std::size_t idle_bytes = 0;
  };
  std::unique_ptr<Buffer> take(std::size_t bytes);
  std::shared_ptr<State> state_;
};

}  // namespace diloco
