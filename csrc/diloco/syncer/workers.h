// Threads for what takes longer than a millisecond: screening payloads and merging fragments. Screens go first: a
// contribution counts toward the quorum only when it has been screened.
//
// submit() is the I/O thread's; jobs run on a worker and hand their result over themselves.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
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

 private:
  void run();

  std::mutex mutex_;  // guards the next four
  std::condition_variable ready_;
  std::deque<std::function<void()>> screens_;
  std::deque<std::function<void()>> merges_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace diloco
