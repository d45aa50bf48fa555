#include "diloco/torch/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

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
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> tensors;
  std::string who;
  const char* call;
};

bool Pending::completed() const { return state_->work->isCompleted(); }

void Pending::wait() const {
  try {
    if (state_->work->wait()) return;
  } catch (...) {
    fail(state_->who, state_->call, std::current_exception());
  }
  throw TransportError(state_->who + ": " + state_->call + " was aborted");
}

bool Pending::wait_for(Seconds timeout_s) const {
  if (completed()) {
    wait();
    return true;
  }
  try {
    state_->work->wait(std::chrono::milliseconds(std::max<std::int64_t>(1, static_cast<std::int64_t>(timeout_s * 1e3))));
    return true;
  } catch (...) {
    if (!completed()) return false;
    wait();  // it ended, well or badly, while the time ran out
    return true;
  }
}

void Pending::order_after() const { state_->work->synchronize(); }

Collectives::Collectives(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) throw ConfigError("expected a process group that this rank belongs to, got none");
  // Held by a pointer that needs no definition of the class where it is destroyed.
  group_ = std::shared_ptr<c10d::ProcessGroup>(group.get(), [kept = group](c10d::ProcessGroup*) mutable { kept.reset(); });
  rank_ = group->getRank();
  size_ = group->getSize();
  who_ = "rank " + std::to_string(rank_) + " of " + std::to_string(size_);
}

Pending Collectives::start_all_reduce(at::Tensor tensor, Reduce op) const {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op == Reduce::kMin ? c10d::ReduceOp::MIN : c10d::ReduceOp::SUM;
  try {
    auto work = group_->allreduce(tensors, options);
    return Pending(std::make_shared<Pending::State>(std::move(work), std::move(tensors), who_, "all_reduce"));
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
    return Pending(std::make_shared<Pending::State>(std::move(work), std::move(tensors), who_, "broadcast"));
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
    return Pending(std::make_shared<Pending::State>(std::move(work), std::move(kept), who_, "all_gather"));
  } catch (...) {
    fail(who_, "all_gather", std::current_exception());
  }
}

}  // namespace diloco
