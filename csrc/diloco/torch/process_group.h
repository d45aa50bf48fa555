// The few calls on a process group of torch that this package makes: from C++, without Python and without the GIL.
//
// Tensors are contiguous and live on a device the group has a backend for; a call under way keeps them alive. All ranks
// of a group make the same calls in the same order; on one rank from one thread at a time. What a group throws (a rank
// that has died, the group's timeout) becomes a TransportError of one sentence, a tensor that does not fit a ConfigError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "diloco/base/types.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // its header costs 10 s: only process_group.cpp and the bindings include it

namespace diloco {

enum class Reduce { kSum, kMin };

// A collective that has been started; the default value is none. Copies stand for the same one.
class Pending {
 public:
  struct State;
  Pending() = default;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool none() const { return !state_; }
  bool completed() const;
  // Blocks the host until it is done. Throws TransportError if it failed.
  void wait() const;
  // The same for at most `timeout_s`; false if it is still under way then.
  bool wait_for(Seconds timeout_s) const;
  // For tensors on a device: what is queued on the current stream from now on comes after it. Never blocks the host, and
  // says nothing of CPU tensors.
  void order_after() const;

 private:
  std::shared_ptr<State> state_;
};

class Collectives {
 public:
  explicit Collectives(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // tensor <- sum or minimum over ranks, element by element. f32, f64 or integers.
  Pending start_all_reduce(at::Tensor tensor, Reduce op) const;
  // tensor <- that of rank `root`.
  Pending start_broadcast(at::Tensor tensor, int root) const;
  // out[r] <- `in` of rank r: size() tensors, each like `in`.
  Pending start_all_gather(std::vector<at::Tensor> out, at::Tensor in) const;
  // The same in place, rows[rank()] being this rank's, by a broadcast from every rank: Gloo copies nothing then, and for
  // large CPU tensors that is several times as fast as its all_gather (benchmarks/python/collective_cost.py).
  Pending start_exchange(std::vector<at::Tensor> rows) const;

  // Start, and block the host until it is done.
  void all_reduce(at::Tensor tensor, Reduce op) const { start_all_reduce(std::move(tensor), op).wait(); }
  void broadcast(at::Tensor tensor, int root) const { start_broadcast(std::move(tensor), root).wait(); }
  void all_gather(std::vector<at::Tensor> out, at::Tensor in) const {
    start_all_gather(std::move(out), std::move(in)).wait();
  }

 private:
  Pending pending(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> tensors,
                  const char* call) const;

  std::shared_ptr<c10d::ProcessGroup> group_;
  int rank_ = 0, size_ = 1;
  std::string who_;  // "rank 0 of 2", for messages
};

}  // namespace diloco
