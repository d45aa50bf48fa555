// What the training thread does inside diloco, measured: seconds in each phase, and a name for profilers.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "diloco/base/clock.h"

namespace diloco {

enum class Phase : std::size_t {
  kStage,  // copies what was trained, for the wire
  kAdopt,  // takes over fragments from the syncer
  kHold,   // waits for the due fragments; lockstep only
};

// Told on the training thread, with no lock but perhaps the learner's own held. Phases do not nest.
class PhaseObserver {
 public:
  virtual ~PhaseObserver() = default;
  virtual void begin(const char* name) = 0;  // "diloco::stage", "diloco::adopt", "diloco::hold"
  virtual void end() = 0;
};

struct PhaseSeconds {
  Seconds stage_s = 0, adopt_s = 0, hold_s = 0;  // since the learner was made; joining included
};

class PhaseClock {
 public:
  explicit PhaseClock(std::shared_ptr<PhaseObserver> observer) : observer_(std::move(observer)) {}

  // Lives as long as the phase. Training thread.
  class Range {
   public:
    Range(PhaseClock& clock, Phase phase) : clock_(clock), phase_(phase) {
      if (clock_.observer_) clock_.observer_->begin(kNames[static_cast<std::size_t>(phase)]);
    }
    ~Range() {
      if (clock_.observer_) clock_.observer_->end();
      std::atomic<Seconds>& sum = clock_.sums_[static_cast<std::size_t>(phase_)];
      // One thread writes: no read-modify-write needed.
      sum.store(sum.load(std::memory_order_relaxed) + (monotonic_now() - began_), std::memory_order_relaxed);
    }
    Range(const Range&) = delete;

   private:
    PhaseClock& clock_;
    const Phase phase_;
    const TimePoint began_ = monotonic_now();
  };

  PhaseSeconds seconds() const {  // any thread
    const auto read = [this](Phase phase) { return sums_[static_cast<std::size_t>(phase)].load(std::memory_order_relaxed); };
    return {read(Phase::kStage), read(Phase::kAdopt), read(Phase::kHold)};
  }

 private:
  static constexpr const char* kNames[] = {"diloco::stage", "diloco::adopt", "diloco::hold"};

  const std::shared_ptr<PhaseObserver> observer_;
  std::array<std::atomic<Seconds>, 3> sums_{};
};

}  // namespace diloco
