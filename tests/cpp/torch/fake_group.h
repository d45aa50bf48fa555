// Process groups of several ranks in one process, without a network: each rank is a thread, or all are one thread that
// starts every rank's calls before it waits for any. They record what was asked of them.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace diloco::testing {

class FakeWork final : public c10d::Work {
 public:
  using Work::finish;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    ++host_waits;
    return Work::wait(timeout);
  }
  void synchronize() override { ++stream_waits; }
  int host_waits = 0, stream_waits = 0;
};

struct FakeCall {
  std::string op;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  std::int64_t numel = 0;
  c10::intrusive_ptr<FakeWork> work;
};

// What the ranks of one group share: the n-th call of every rank is one collective.
struct FakeRoom {
  explicit FakeRoom(int ranks) : size(ranks) {}
  struct Collective {
    std::vector<std::vector<at::Tensor>> outs;  // by rank
    std::vector<at::Tensor> ins;
    std::vector<c10::intrusive_ptr<FakeWork>> works;
    int arrived = 0;
  };
  const int size;
  std::mutex mutex;
  std::map<std::size_t, Collective> collectives;
  std::string failure;  // if set, every call from now on, and what is under way, fails with it
};

class FakeGroup final : public c10d::ProcessGroup {
 public:
  FakeGroup(std::shared_ptr<FakeRoom> room, int rank) : ProcessGroup(rank, room->size), room_(std::move(room)) {}

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                                           const c10d::AllgatherOptions&) override {
    return call("all_gather", out.at(0), in.at(0), [](FakeRoom::Collective& all) {
      for (auto& rows : all.outs) {
        for (std::size_t rank = 0; rank < rows.size(); ++rank) rows[rank].copy_(all.ins[rank]);
      }
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& in, const c10d::AllreduceOptions& options) override {
    const bool least = options.reduceOp == c10d::ReduceOp::MIN;
    return call("all_reduce", in, in.at(0), [least](FakeRoom::Collective& all) {
      const at::Tensor stacked = at::stack(all.ins);
      const at::Tensor result = least ? std::get<0>(stacked.min(0)) : stacked.sum(0);
      for (auto& out : all.outs) out[0].copy_(result);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& in, const c10d::BroadcastOptions& options) override {
    const auto root = static_cast<std::size_t>(options.rootRank);
    return call("broadcast", in, in.at(0), [root](FakeRoom::Collective& all) {
      const at::Tensor from = all.ins[root].clone();
      for (auto& out : all.outs) out[0].copy_(from);
    });
  }

  std::vector<FakeCall> calls;

 private:
  template <class Finish>
  c10::intrusive_ptr<c10d::Work> call(const char* op, std::vector<at::Tensor> outs, const at::Tensor& in,
                                      Finish finish) {
    auto work = c10::make_intrusive<FakeWork>();
    const std::lock_guard lock(room_->mutex);
    if (!room_->failure.empty()) throw std::runtime_error(room_->failure);
    auto& all = room_->collectives[calls.size()];
    const auto size = static_cast<std::size_t>(room_->size);
    all.outs.resize(size);
    all.ins.resize(size);
    calls.push_back({op, in.device(), in.scalar_type(), in.numel(), work});
    all.outs[static_cast<std::size_t>(rank_)] = std::move(outs);
    all.ins[static_cast<std::size_t>(rank_)] = in;
    all.works.push_back(work);
    if (++all.arrived == room_->size) {
      finish(all);
      for (auto& one : all.works) one->finish();
      room_->collectives.erase(calls.size() - 1);
    }
    return work;
  }

  std::shared_ptr<FakeRoom> room_;
};

}  // namespace diloco::testing
