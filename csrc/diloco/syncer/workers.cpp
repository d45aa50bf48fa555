#include "diloco/syncer/workers.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <utility>

#include "diloco/base/parallel.h"

namespace diloco {

Workers::Workers(unsigned threads) {
  for (unsigned i = 0; i < std::max(1u, threads); ++i) threads_.emplace_back([this] { run(); });
}

Workers::~Workers() { stop(); }

void Workers::submit(Priority priority, std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    (priority == Priority::kScreen ? screens_ : merges_).push_back(std::move(job));
    screens_waiting_ = screens_.size();
  }
  ready_.notify_one();
}

void Workers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    screens_.clear();
    helps_.clear();
    merges_.clear();
  }
  ready_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

// What the threads of one parallel() share. Whoever comes late finds nothing left, and does not look at `body`.
struct Workers::Shared {
  const std::size_t count;
  const std::function<void(std::size_t)>& body;
  std::atomic<std::size_t> next{0}, done{0};

  bool work_one() {
    const std::size_t i = next++;
    if (i >= count) return false;
    body(i);
    if (++done == count) done.notify_all();
    return true;
  }
};

void Workers::parallel(std::size_t count, const std::function<void(std::size_t)>& body) {
  if (count < 2 || threads_.size() < 2) return serially(count, body);
  const auto shared = std::make_shared<Shared>(count, body);
  {
    const std::lock_guard lock(mutex_);
    try {
      for (std::size_t i = 1; !stopping_ && i < std::min(count, threads_.size()); ++i) {
        helps_.emplace_back([this, shared] { help(shared); });
      }
    } catch (const std::bad_alloc&) {
      // With less help, then.
    }
  }
  ready_.notify_all();
  while (shared->work_one()) {
  }
  for (std::size_t done = shared->done; done < count; done = shared->done) shared->done.wait(done);
}

void Workers::help(const std::shared_ptr<Shared>& shared) {
  while (shared->work_one()) {
    if (screens_waiting_ == 0) continue;
    const std::lock_guard lock(mutex_);
    try {
      if (!stopping_) helps_.emplace_back([this, shared] { help(shared); });
    } catch (const std::bad_alloc&) {
      // The job goes on without.
    }
    return;
  }
}

void Workers::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return stopping_ || !screens_.empty() || !helps_.empty() || !merges_.empty(); });
    if (stopping_) return;
    auto& queue = !screens_.empty() ? screens_ : !helps_.empty() ? helps_ : merges_;
    std::function<void()> job = std::move(queue.front());
    queue.pop_front();
    screens_waiting_ = screens_.size();
    lock.unlock();
    job();
    job = nullptr;  // payloads it holds are released here, not under the lock
    lock.lock();
  }
}

}  // namespace diloco
