// How the ranks of an island agree: one exchange per boundary, in the background. torch/ implements it over a c10d group,
// the tests over threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "diloco/base/types.h"

namespace diloco {

class RankGroup {
 public:
  struct Result {
    std::vector<std::int64_t> minimum;  // element by element, over all ranks
    std::uint64_t tokens = 0;           // their sum
    std::string blob;                   // rank 0's
  };
  virtual ~RankGroup() = default;
  virtual std::uint32_t rank() const = 0;  // 0: the leader
  virtual std::uint32_t size() const = 0;
  // Begins an exchange with all other ranks; returns at once. One at a time; every rank passes as many numbers. `blob` of
  // other ranks than 0 is ignored.
  virtual void start(std::vector<std::int64_t> numbers, std::uint64_t tokens, std::string blob) = 0;
  virtual bool done() const = 0;  // the exchange has ended: wait() does not wait
  // Its result. `interrupted` is polled meanwhile (may throw). TransportError if a rank is gone.
  virtual Result wait(const std::function<void()>& interrupted) = 0;
  // From the rank with a connection to its replicas, in the background and in the order of the calls, which is the same on
  // all of them. `finished` is called on another thread when the bytes are here; never if the group died.
  virtual void share(BufferPtr bytes, std::function<void()> finished) = 0;
  virtual bool has_replicas() const = 0;  // share() does something
  virtual void close() = 0;  // ends the threads; nothing is called back afterwards. Does not wait for other ranks
};

// What a process is in its island.
struct Rank {
  std::uint32_t part = 0, parts = 1;  // `part`: the one it holds
  bool replica = false;               // another rank has the connection for it
};

}  // namespace diloco
