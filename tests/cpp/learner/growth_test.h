// Learners whose models grow while they train.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "diloco/base/errors.h"
#include "learner/net_test.h"

namespace diloco::testing {

inline const std::vector<NamedShape> kHead = {{"head.weight", {5, 3}}, {"head.bias", {5}}};

inline const std::vector<NamedShape> kTail = {{"tail", {3}}};

struct GrowthTest : NetTest {
  struct One {
    Bowl bowl;
    std::unique_ptr<Learner> learner;
  };

  void start(Mode mode = Mode::kDecoupled, std::uint32_t quorum = 2) {
    options.settings = small_settings();
    options.settings.mode = mode;
    options.settings.min_quorum = quorum;
    options.log = [this](LogLevel, const std::string& text) {
      const std::lock_guard lock(mutex);
      lines += text + "\n";
    };
    syncer = net.syncer(options);
    options.bind = syncer->endpoint();
  }
  One& join(const std::string& id, std::vector<NamedShape> shapes = bowl_shapes()) {
    ones.push_back({Bowl(static_cast<float>(ones.size() + 1), std::move(shapes)), nullptr});
    ones.back().learner = net.learner(syncer->endpoint(), named(id), ones.back().bowl.store);
    EXPECT_TRUE(ones.back().learner->join(20));
    return ones.back();
  }
  void add(One& one, const std::vector<NamedShape>& shapes, float value = 0.0f) {
    one.learner->grow([&] { one.bowl.store->append(shapes, value); });
  }
  // All train in turn, on this thread; lockstep would wait for the others.
  bool train(const std::function<bool()>& done, Seconds limit_s = 30) {
    const TimePoint deadline = monotonic_now() + limit_s;
    while (!done()) {
      if (monotonic_now() > deadline) return false;
      compute();
      for (One& one : ones) {
        if (!one.learner) continue;
        one.bowl.step(0.05f);
        one.learner->boundary({1});
      }
    }
    return true;
  }
  // Every fragment it knows has been merged at least `n` times.
  static bool merged(const One& one, std::uint64_t n, std::size_t fragments) {
    const auto versions = one.learner->stats().versions;
    return versions.size() == fragments && std::all_of(versions.begin(), versions.end(), [&](const Version& v) { return v.n >= n; });
  }
  std::size_t tensors() { return syncer->layout().tensors.size(); }
  std::string said() {
    const std::lock_guard lock(mutex);
    return lines;
  }
  bool heard(const std::string& text) { return said().find(text) != std::string::npos; }
  static void add_up(const One& one) {
    const LearnerStats stats = one.learner->stats();
    std::uint64_t sum = stats.tokens_merged + stats.tokens_outstanding + stats.tokens_absent;
    for (const auto& [reason, tokens] : stats.discarded) sum += tokens;
    EXPECT_EQ(sum, stats.tokens * stats.versions.size());
  }

  struct GivenUp {};
  // Makes `steps` steps on this thread, the head being added before step `add_at`; false if `over` said so while it waited.
  // In lockstep a boundary waits for the others'.
  bool run(One& one, int add_at, int steps, std::atomic<int>* made, const std::function<bool()>& over) {
    try {
      for (int step = 1; step <= steps && !over(); ++step) {
        if (step == add_at) add(one, kHead, 0.5f);
        one.bowl.step(0.05f);
        one.learner->boundary({1}, [&] {
          if (over()) throw GivenUp{};
        });
        *made = step;
      }
      return *made == steps;
    } catch (const GivenUp&) {
      return false;
    }
  }

  std::mutex mutex;
  std::string lines;
  SyncerOptions options;
  std::unique_ptr<Syncer> syncer;
  std::vector<One> ones;
};

}  // namespace diloco::testing
