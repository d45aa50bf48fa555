#include "diloco/syncer/workers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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

// Each index once, with the help of who is idle, and also if nobody is.
TEST(Workers, ParallelDoesEachOnceWhoeverHelps) {
  for (const unsigned threads : {1u, 2u, 4u}) {
    Workers workers(threads);
    std::vector<std::future<bool>> jobs;
    for (int job = 0; job < 4; ++job) {
      auto done = std::make_shared<std::promise<bool>>();
      jobs.push_back(done->get_future());
      workers.submit(Priority::kMerge, [&workers, done] {
        bool right = true;
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1000}}) {
          std::vector<std::atomic<int>> times(count);
          workers.parallel(count, [&](std::size_t i) { ++times[i]; });
          right = right && std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; });
        }
        done->set_value(right);
      });
    }
    for (auto& job : jobs) {
      ASSERT_EQ(job.wait_for(std::chrono::seconds(30)), std::future_status::ready);
      EXPECT_TRUE(job.get());
    }
  }
}

TEST(Workers, ParallelUsesTheOthers) {
  Workers workers(2);
  std::promise<void> done;
  workers.submit(Priority::kMerge, [&] {
    std::promise<void> both[2];
    // Each waits for the other: on one thread this would not end.
    workers.parallel(2, [&](std::size_t i) {
      both[i].set_value();
      both[1 - i].get_future().wait();
    });
    done.set_value();
  });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
}

// A helper leaves the job for a screen after the part it is at, and comes back to it.
TEST(Workers, ScreensGoBeforeHelpingAMerge) {
  Workers workers(2);
  std::promise<void> screened, done;
  auto screen = screened.get_future().share();
  std::atomic<int> times = 0, before_the_screen = -1;
  workers.submit(Priority::kMerge, [&] {
    const auto job = std::this_thread::get_id();
    std::once_flag once;
    workers.parallel(100, [&](std::size_t) {
      if (std::this_thread::get_id() == job) return screen.wait();
      ++times;
      std::call_once(once, [&] {
        workers.submit(Priority::kScreen, [&] {
          before_the_screen = times.load();
          screened.set_value();
        });
      });
    });
    done.set_value();
  });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(before_the_screen, 1);
}

TEST(Workers, StopWhileAJobIsHelped) {
  for (int round = 0; round < 50; ++round) {
    auto workers = std::make_unique<Workers>(3);
    std::promise<void> started;
    std::atomic<int> times = 0;
    workers->submit(Priority::kMerge, [&] {
      started.set_value();
      workers->parallel(200, [&](std::size_t) { ++times; });
    });
    started.get_future().wait();
    workers->stop();
    EXPECT_EQ(times, 200);
  }
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
