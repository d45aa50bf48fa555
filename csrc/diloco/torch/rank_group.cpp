#include "diloco/torch/rank_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "diloco/base/errors.h"
#include "diloco/torch/process_group.h"

namespace diloco {
namespace {

constexpr Seconds kLookS = 0.1;  // how often a collective that takes long is asked whether this rank is leaving
constexpr auto kSlice = std::chrono::milliseconds(50);

class C10dRankGroup final : public RankGroup {
 public:
  C10dRankGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& plan, const c10::intrusive_ptr<c10d::ProcessGroup>& replicas,
                bool any_replicas)
      : plan_(plan), any_replicas_(any_replicas) {
    if (replicas) replicas_.emplace(replicas);
    exchanger_ = std::thread([this] { exchange(); });
    if (replicas_) sharer_ = std::thread([this] { broadcast(); });
  }
  ~C10dRankGroup() override { close(); }

  std::uint32_t rank() const override { return static_cast<std::uint32_t>(plan_.rank()); }
  std::uint32_t size() const override { return static_cast<std::uint32_t>(plan_.size()); }
  bool has_replicas() const override { return any_replicas_; }

  void start(std::vector<std::int64_t> numbers, std::uint64_t tokens, std::string blob) override {
    // Behind them: how long rank 0's blob is.
    numbers.push_back(rank() == 0 ? static_cast<std::int64_t>(blob.size()) : std::numeric_limits<std::int64_t>::max());
    const std::lock_guard lock(mutex_);
    result_.reset();
    wanted_ = Result{std::move(numbers), tokens, std::move(blob)};
    changed_.notify_all();
  }

  bool done() const override {
    const std::lock_guard lock(mutex_);
    return result_.has_value() || !failure_.empty();
  }

  Result wait(const std::function<void()>& interrupted) override {
    std::unique_lock lock(mutex_);
    while (!result_ && failure_.empty()) {
      if (changed_.wait_for(lock, kSlice) == std::cv_status::no_timeout || !interrupted) continue;
      lock.unlock();
      interrupted();
      lock.lock();
    }
    if (!failure_.empty()) throw TransportError(failure_);
    return *std::exchange(result_, std::nullopt);
  }

  void share(BufferPtr bytes, std::function<void()> finished) override {
    if (!replicas_) return;
    const std::lock_guard lock(mutex_);
    shares_.emplace_back(std::move(bytes), std::move(finished));
    changed_.notify_all();
  }

  void close() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      changed_.notify_all();
    }
    if (exchanger_.joinable()) exchanger_.join();
    if (sharer_.joinable()) sharer_.join();
  }

 private:
  // False if this rank leaves meanwhile.
  bool finish(const Pending& pending) {
    while (!pending.wait_for(kLookS)) {
      const std::lock_guard lock(mutex_);
      if (closing_) return false;
    }
    return true;
  }

  void fail(const std::exception& error) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = std::string("island: ") + error.what();
    changed_.notify_all();
  }

  void exchange() {
    while (true) {
      Result work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || wanted_; });
        if (closing_) return;
        work = *std::exchange(wanted_, std::nullopt);
      }
      try {
        if (!exchange(&work)) return;
      } catch (const std::exception& error) {
        return fail(error);
      }
      const std::lock_guard lock(mutex_);
      result_ = std::move(work);
      changed_.notify_all();
    }
  }

  bool exchange(Result* work) {
    const auto count = static_cast<std::int64_t>(work->minimum.size());
    at::Tensor numbers = at::empty({count}, at::kLong);
    std::copy(work->minimum.begin(), work->minimum.end(), static_cast<std::int64_t*>(numbers.data_ptr()));
    at::Tensor sum = at::empty({1}, at::kLong);
    *static_cast<std::int64_t*>(sum.data_ptr()) = static_cast<std::int64_t>(work->tokens);
    const Pending minimum = plan_.start_all_reduce(numbers, Reduce::kMin);
    const Pending tokens = plan_.start_all_reduce(sum, Reduce::kSum);
    if (!finish(minimum) || !finish(tokens)) return false;
    const auto* values = static_cast<const std::int64_t*>(numbers.data_ptr());
    work->minimum.assign(values, values + count - 1);
    work->tokens = static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(sum.data_ptr()));
    const std::int64_t length = values[count - 1];
    if (length == 0) {
      work->blob.clear();
      return true;
    }
    at::Tensor blob = at::empty({length}, at::kByte);
    if (rank() == 0) std::memcpy(blob.data_ptr(), work->blob.data(), static_cast<std::size_t>(length));
    if (!finish(plan_.start_broadcast(blob, 0))) return false;
    work->blob.assign(static_cast<const char*>(blob.data_ptr()), static_cast<std::size_t>(length));
    return true;
  }

  void broadcast() {
    while (true) {
      std::pair<BufferPtr, std::function<void()>> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !shares_.empty(); });
        if (closing_) return;
        work = std::move(shares_.front());
        shares_.pop_front();
      }
      try {
        const BufferPtr& bytes = work.first;
        if (bytes->size() > 0) {
          const at::Tensor tensor = at::from_blob(bytes->data(), {static_cast<std::int64_t>(bytes->size())},
                                                  [bytes](void*) {}, at::TensorOptions().dtype(at::kByte));
          if (!finish(replicas_->start_broadcast(tensor, 0))) return;
        }
      } catch (const std::exception& error) {
        return fail(error);
      }
      if (work.second) work.second();
    }
  }

  const Collectives plan_;
  std::optional<Collectives> replicas_;
  const bool any_replicas_;
  mutable std::mutex mutex_;  // all below
  std::condition_variable changed_;
  std::optional<Result> wanted_, result_;
  std::deque<std::pair<BufferPtr, std::function<void()>>> shares_;
  std::string failure_;
  bool closing_ = false;
  std::thread exchanger_, sharer_;
};

}  // namespace

std::shared_ptr<RankGroup> make_rank_group(const c10::intrusive_ptr<c10d::ProcessGroup>& plan,
                                           const c10::intrusive_ptr<c10d::ProcessGroup>& replicas, bool any_replicas) {
  return std::make_shared<C10dRankGroup>(plan, replicas, any_replicas);
}

}  // namespace diloco
