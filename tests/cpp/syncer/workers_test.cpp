#include "diloco/syncer/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <string>

namespace diloco {
namespace {

using Priority = Workers::Priority;

TEST(Workers, ScreensGoBeforeMergesThatWaitLonger) {
  Workers workers(1);
  std::promise<void> started, go;
  std::mutex mutex;
  std::string order;
  std::promise<void> last;
  const auto note = [&](char c, bool final = false) {
    return [&, c, final] {
      const std::lock_guard lock(mutex);
      order.push_back(c);
      if (final) last.set_value();
    };
  };
  workers.submit(Priority::kMerge, [&] {
    started.set_value();
    go.get_future().wait();
  });
  started.get_future().wait();
  workers.submit(Priority::kMerge, note('m'));
  workers.submit(Priority::kMerge, note('n', true));
  workers.submit(Priority::kScreen, note('s'));
  workers.submit(Priority::kScreen, note('t'));
  go.set_value();
  last.get_future().wait();
  EXPECT_EQ(order, "stmn");
}

TEST(Workers, SeveralThreadsWorkAtTheSameTime) {
  Workers workers(2);
  std::promise<void> first, second;
  std::promise<void> done;
  workers.submit(Priority::kMerge, [&] {
    first.set_value();
    second.get_future().wait();
    done.set_value();
  });
  workers.submit(Priority::kMerge, [&] {
    first.get_future().wait();
    second.set_value();
  });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
}

TEST(Workers, StopDropsTheQueueAndWaitsForTheRunningJob) {
  std::atomic<int> ran{0};
  std::promise<void> started, go;
  Workers workers(1);
  workers.submit(Priority::kMerge, [&] {
    started.set_value();
    go.get_future().wait();
    ++ran;
  });
  started.get_future().wait();
  workers.submit(Priority::kMerge, [&] { ran += 100; });
  std::thread stopper([&] { workers.stop(); });
  go.set_value();
  stopper.join();
  EXPECT_TRUE(ran == 1 || ran == 101) << ran;  // 101: the second one was taken before stop() came
  workers.submit(Priority::kScreen, [&] { ran = -1; });
  workers.stop();
  EXPECT_NE(ran, -1);
}

}  // namespace
}  // namespace diloco
