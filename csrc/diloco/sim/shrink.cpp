// Makes a scenario smaller as long as it still violates the same invariant first, in no more events.
#include <algorithm>
#include <functional>

#include "diloco/sim/scenario.h"

namespace diloco::sim {

namespace {

class Shrinker {
 public:
  Shrinker(Scenario scenario, std::size_t max_runs) : best_(std::move(scenario)), runs_left_(max_runs) {
    const Outcome outcome = run_scenario(best_);
    if (outcome.violations.empty()) return;
    invariant_ = outcome.violations.front().invariant;
    events_ = outcome.events;
  }

  Scenario shrink() {
    if (invariant_.empty()) return best_;
    bool better = true;
    while (better && runs_left_ > 0) {
      better = false;
      better = drop_shards() || better;
      better = drop_faults() || better;
      better = drop_learners() || better;
      better = simplify_settings() || better;
      better = simplify_shape() || better;
      better = simplify_learners() || better;
      better = simplify_faults() || better;
    }
    return best_;
  }

 private:
  // True if this was an improvement: fewer events, or the same with less in it.
  bool attempt(const std::function<void(Scenario&)>& change) {
    if (runs_left_ == 0) return false;
    Scenario changed = best_;
    change(changed);
    if (to_json(changed) == to_json(best_)) return false;
    --runs_left_;
    try {
      const Outcome outcome = run_scenario(changed, events_);
      if (outcome.violations.empty() || outcome.violations.front().invariant != invariant_) return false;
      events_ = outcome.events;
      best_ = std::move(changed);
      return true;
    } catch (const std::exception&) {  // settings that contradict each other
      return false;
    }
  }

  bool drop_shards() {
    const auto fewer = [&](std::uint32_t shards) {
      return shards < best_.shards && attempt([&](Scenario& s) {
        s.shards = shards;
        for (auto& fault : s.faults) fault.shard = std::min(fault.shard, shards - 1);
      });
    };
    return fewer(1) || fewer(2);
  }

  bool drop_faults() {
    bool better = attempt([](Scenario& s) { s.faults.clear(); });
    for (std::size_t size = best_.faults.size() / 2; size > 0; size /= 2) {
      for (std::size_t from = 0; from + size <= best_.faults.size();) {
        const bool dropped = attempt([&](Scenario& s) {
          s.faults.erase(s.faults.begin() + static_cast<std::ptrdiff_t>(from),
                         s.faults.begin() + static_cast<std::ptrdiff_t>(from + size));
        });
        better = dropped || better;
        if (!dropped) from += size;
      }
    }
    return better;
  }

  bool drop_learners() {
    bool better = false;
    for (std::size_t i = best_.learners.size(); i-- > 0;) {
      better = attempt([&](Scenario& s) {
        s.learners.erase(s.learners.begin() + static_cast<std::ptrdiff_t>(i));
        std::erase_if(s.faults, [&](const Fault& fault) { return fault.learner == i; });
        for (auto& fault : s.faults) fault.learner -= fault.learner > i;
      }) || better;
    }
    return better;
  }

  bool simplify_settings() {
    bool better = false;
    const auto set = [&](const char* name, const char* value) {
      better = attempt([&](Scenario& s) { s.settings[name] = value; }) || better;
    };
    // Together first: each alone may need more events.
    better = attempt([](Scenario& s) {
      for (const auto& [name, value] : std::map<std::string, std::string>{
               {"num_fragments", "1"}, {"sync_every", "1"}, {"overlap_steps", "0"}, {"min_quorum", "1"}}) {
        s.settings[name] = value;
      }
      s.settings.erase("max_carry_steps");
    }) || better;
    for (const char* name : {"num_fragments", "sync_every", "min_quorum"}) {
      set(name, "1");
      set(name, "2");
    }
    set("overlap_steps", "0");
    set("heartbeat_timeout_s", "3600");
    set("heartbeat_interval_s", "1000");
    set("chunk_bytes", "65536");
    set("credit_window_bytes", "8388608");
    const auto names = best_.settings;
    for (const auto& [name, value] : names) better = attempt([&](Scenario& s) { s.settings.erase(name); }) || better;
    return better;
  }

  bool simplify_shape() {
    bool better = attempt([](Scenario& s) { s.matrices = 1; });
    better = attempt([](Scenario& s) { s.rows = s.cols = 1; }) || better;
    better = attempt([](Scenario& s) { s.merge_s = s.persist_s = 0.0; }) || better;
    return better;
  }

  bool simplify_learners() {
    bool better = false;
    for (std::size_t i = 0; i < best_.learners.size(); ++i) {
      const auto change = [&](const std::function<void(LearnerSpec&)>& what) {
        better = attempt([&](Scenario& s) { what(s.learners[i]); }) || better;
      };
      change([](LearnerSpec& spec) { spec.link = Link{}; });
      change([](LearnerSpec& spec) { spec.link = Link{0.001, 0.0, 0.0, 0.0}; });
      change([](LearnerSpec& spec) { spec.start_s = 0.0; });
      change([](LearnerSpec& spec) { spec.jitter = 0.0; });
      change([](LearnerSpec& spec) { spec.token_jitter = 0, spec.tokens_per_step = 1; });
      change([](LearnerSpec& spec) { spec.step_s *= 2.0; });
      change([](LearnerSpec& spec) { spec.step_s = 1.0; });
    }
    return better;
  }

  bool simplify_faults() {
    bool better = false;
    for (std::size_t i = 0; i < best_.faults.size(); ++i) {
      for (const double factor : {0.0, 0.25, 0.5, 0.9}) {
        better = attempt([&](Scenario& s) { s.faults[i].at_s *= factor; }) || better;
        better = attempt([&](Scenario& s) { s.faults[i].lasts_s *= factor; }) || better;
      }
    }
    // All of them earlier by the same time.
    for (const double factor : {0.25, 0.5, 0.9}) {
      better = attempt([&](Scenario& s) {
        for (auto& fault : s.faults) fault.at_s *= factor;
        s.script_s *= factor;
      }) || better;
    }
    return better;
  }

  Scenario best_;
  std::size_t runs_left_;
  std::string invariant_;
  std::uint64_t events_ = 0;
};

}  // namespace

Scenario shrink(const Scenario& scenario, std::size_t max_runs) { return Shrinker(scenario, max_runs).shrink(); }

}  // namespace diloco::sim
