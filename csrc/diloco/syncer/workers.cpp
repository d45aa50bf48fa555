#include "diloco/syncer/workers.h"

#include <algorithm>
#include <utility>

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
  }
  ready_.notify_one();
}

void Workers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    screens_.clear();
    merges_.clear();
  }
  ready_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void Workers::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return stopping_ || !screens_.empty() || !merges_.empty(); });
    if (stopping_) return;
    auto& queue = screens_.empty() ? merges_ : screens_;
    std::function<void()> job = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // payloads it holds are released here, not under the lock
    lock.lock();
  }
}

}  // namespace diloco
