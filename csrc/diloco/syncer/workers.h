// Threads for what takes longer than a millisecond: screening payloads and merging fragments. Screens go first: a
// contribution counts toward the quorum only when it has been screened.
//
// submit() is the I/O thread's; jobs run on a worker and hand their result over themselves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace diloco {

class Workers {
 public:
  enum class Priority { kScreen, kMerge };

  explicit Workers(unsigned threads);  // at least 1
  ~Workers();                          // stop()
  Workers(const Workers&) = delete;

  // A job must not throw. Ignored after stop().
  void submit(Priority priority, std::function<void()> job);
  // Drops what is queued, waits for the jobs that run. Idempotent.
  void stop();
  // For a job: base/parallel.h with the help of the workers that have nothing else to do. They leave it for a screen.
  void parallel(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  struct Shared;
  void run();
  void help(const std::shared_ptr<Shared>& shared);

  std::mutex mutex_;  // guards the next five
  std::condition_variable ready_;
  std::deque<std::function<void()>> screens_;
  std::deque<std::function<void()>> helps_;  // with a job that is running
  std::deque<std::function<void()>> merges_;
  bool stopping_ = false;
  std::atomic<std::size_t> screens_waiting_{0};  // as screens_, for who does not want to lock
  std::vector<std::thread> threads_;
};

}  // namespace diloco
