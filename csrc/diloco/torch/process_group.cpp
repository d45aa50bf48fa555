#include "diloco/torch/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"

namespace diloco {
namespace {

// The first sentence, without the place in another library's source that it may begin with: "[.../pair.cc:534] Read ...".
std::string first_sentence(std::string text) {
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". "));
  if (const auto end = text.find("] "); text.starts_with('[') && end != std::string::npos) text = text.substr(end + 2);
  while (text.ends_with('.') || text.ends_with(' ')) text.pop_back();
  return text;
}

std::string reason_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error& error) {
    return first_sentence(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return first_sentence(error.what());
  } catch (...) {
    return "unknown error";
  }
}

[[noreturn]] void fail(const std::string& who, const char* call, const std::exception_ptr& thrown) {
  throw TransportError(who + ": " + call + " failed, a rank of the group has ended or is late (" + reason_of(thrown) +
                       "); end all ranks, start them again and resume from a checkpoint");
}

}  // namespace

struct Pending::State {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> tensors;
  std::string who;
  const char* call;
};

bool Pending::completed() const {
  return std::all_of(state_->works.begin(), state_->works.end(), [](const auto& work) { return work->isCompleted(); });
}

void Pending::wait() const {
  for (const auto& work : state_->works) {
    bool done = false;
    try {
      done = work->wait();
    } catch (...) {
      fail(state_->who, state_->call, std::current_exception());
    }
    if (!done) throw TransportError(state_->who + ": " + state_->call + " was aborted");
  }
}

bool Pending::wait_for(Seconds timeout_s) const {
  const TimePoint deadline = monotonic_now() + timeout_s;
  for (const auto& work : state_->works) {
    const auto left = static_cast<std::int64_t>((deadline - monotonic_now()) * 1e3);
    try {
      if (!work->isCompleted()) work->wait(std::chrono::milliseconds(std::max<std::int64_t>(1, left)));
    } catch (...) {
      if (!work->isCompleted()) return false;  // the time is up; else it ended, and wait() below says how
    }
  }
  wait();
  return true;
}

void Pending::order_after() const {
  for (const auto& work : state_->works) work->synchronize();
}

Collectives::Collectives(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) throw ConfigError("expected a process group that this rank belongs to, got none");
  // Held by a pointer that needs no definition of the class where it is destroyed.
  group_ = std::shared_ptr<c10d::ProcessGroup>(group.get(), [kept = group](c10d::ProcessGroup*) mutable { kept.reset(); });
  rank_ = group->getRank();
  size_ = group->getSize();
  who_ = "rank " + std::to_string(rank_) + " of " + std::to_string(size_);
}

Pending Collectives::pending(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> tensors,
                             const char* call) const {
  return Pending(std::make_shared<Pending::State>(std::move(works), std::move(tensors), who_, call));
}

Pending Collectives::start_all_reduce(at::Tensor tensor, Reduce op) const {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op == Reduce::kMin ? c10d::ReduceOp::MIN : c10d::ReduceOp::SUM;
  try {
    auto work = group_->allreduce(tensors, options);
    return pending({std::move(work)}, std::move(tensors), "all_reduce");
  } catch (...) {
    fail(who_, "all_reduce", std::current_exception());
  }
}

Pending Collectives::start_broadcast(at::Tensor tensor, int root) const {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  try {
    auto work = group_->broadcast(tensors, options);
    return pending({std::move(work)}, std::move(tensors), "broadcast");
  } catch (...) {
    fail(who_, "broadcast", std::current_exception());
  }
}

Pending Collectives::start_all_gather(std::vector<at::Tensor> out, at::Tensor in) const {
  const bool fits = out.size() == static_cast<std::size_t>(size_) && in.is_contiguous() &&
                    std::all_of(out.begin(), out.end(), [&](const at::Tensor& row) {
                      return row.sizes() == in.sizes() && row.is_contiguous() &&
                             row.scalar_type() == in.scalar_type() && row.device() == in.device();
                    });
  if (!fits) {
    throw ConfigError("all_gather: expected one contiguous tensor for each of " + std::to_string(size_) +
                      " ranks, of the shape, dtype and device of the input");
  }
  std::vector<std::vector<at::Tensor>> rows{std::move(out)};
  std::vector<at::Tensor> inputs{std::move(in)};
  try {
    auto work = group_->allgather(rows, inputs);
    std::vector<at::Tensor> kept = std::move(rows[0]);
    kept.push_back(std::move(inputs[0]));
    return pending({std::move(work)}, std::move(kept), "all_gather");
  } catch (...) {
    fail(who_, "all_gather", std::current_exception());
  }
}

Pending Collectives::start_exchange(std::vector<at::Tensor> rows) const {
  if (rows.size() != static_cast<std::size_t>(size_)) {
    throw ConfigError("exchange: expected one tensor for each of " + std::to_string(size_) + " ranks, got " +
                      std::to_string(rows.size()));
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  try {
    for (int rank = 0; rank < size_; ++rank) {
      std::vector<at::Tensor> row{rows[static_cast<std::size_t>(rank)]};
      c10d::BroadcastOptions options;
      options.rootRank = rank;
      works.push_back(group_->broadcast(row, options));
    }
  } catch (...) {
    fail(who_, "exchange", std::current_exception());
  }
  return pending(std::move(works), std::move(rows), "exchange");
}

}  // namespace diloco
