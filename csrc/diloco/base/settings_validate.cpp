#include <fmt/format.h>

#include <algorithm>

#include "diloco/base/errors.h"
#include "diloco/base/merge_rules.h"
#include "diloco/base/settings_fields.h"

namespace diloco {
namespace {

template <typename... Args>
void require(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) throw ConfigError(fmt::format(message, std::forward<Args>(args)...));
}

void check_ranges(const Settings& s) {
  for (const auto& f : detail::fields()) {
    if (f.number) {
      require(f.range.contains(f.number(s)), "{} must be {}, got {}", f.info.name, f.info.range, f.get(s));
    }
    if (!f.info.choices.empty()) {
      const auto& choices = f.info.choices;
      require(std::find(choices.begin(), choices.end(), f.get(s)) != choices.end(), "{} must be one of {}, got {}",
              f.info.name, fmt::join(choices, ", "), f.get(s));
    }
  }
}

void check_schedule(const Settings& s) {
  require(s.overlap_steps < s.sync_every,
          "overlap_steps must be below sync_every, got overlap_steps {} with sync_every {}; lower the one or raise "
          "the other",
          s.overlap_steps, s.sync_every);
  require(s.offsets == Offsets::kStaggered || s.mode == Mode::kLockstep,
          "offsets = streaming needs mode = lockstep; with mode = decoupled the syncer's clock says when fragments "
          "are due");
  require(s.trigger == Trigger::kDue || s.mode == Mode::kDecoupled,
          "trigger = arrival needs mode = decoupled; in lockstep all learners are merged together");
  require(s.trigger == Trigger::kDue || s.min_quorum == 1,
          "trigger = arrival needs min_quorum = 1, got {}; each learner is merged alone", s.min_quorum);
  require(s.trigger == Trigger::kDue || s.grace == Grace::kNone,
          "trigger = arrival needs grace = none; nobody is waited for when each learner is merged alone");
  require(s.trigger == Trigger::kArrival || s.step_counts == StepCounts::kFixed,
          "step_counts = dylu needs trigger = arrival; with trigger = due every learner joins every round");
  require(s.max_carry_steps == 0 || s.max_carry_steps >= s.sync_every,
          "max_carry_steps must be 0 or at least sync_every ({}), got {}", s.sync_every, s.max_carry_steps);
}

void check_quorum(const Settings& s) {
  require(s.min_quorum <= s.max_learners,
          "min_quorum must be at most max_learners ({}), got {}; no round could ever be merged", s.max_learners,
          s.min_quorum);
  require(s.grace != Grace::kFixed || s.grace_s > 0, "grace = fixed needs grace_s above 0, got {}", s.grace_s);
  require(s.grace == Grace::kFixed || s.grace_s == 0,
          "grace_s is used only with grace = fixed, got grace_s {} with another grace; leave it out or set grace",
          s.grace_s);
  require(s.grace == Grace::kAdaptive || s.grace_cap_s == 0,
          "grace_cap_s is used only with grace = adaptive, got grace_cap_s {} with another grace; leave it out",
          s.grace_cap_s);
}

void check_outer(const Settings& s) {
  require(s.outer_optimizer != OuterKind::kSgd || s.outer_momentum == 0,
          "outer_momentum is used only with outer_optimizer = nesterov, delayed_nesterov or adam, got {} with sgd; leave it "
          "out or set outer_optimizer",
          s.outer_momentum);
  const bool nesterov = s.outer_optimizer == OuterKind::kNesterov || s.outer_optimizer == OuterKind::kDelayedNesterov;
  require(!nesterov || s.outer_momentum > 0,
          "outer_optimizer = {} needs outer_momentum above 0, got {}; the DiLoCo papers use 0.9", s.get("outer_optimizer"),
          s.outer_momentum);
  require(s.outer_optimizer == OuterKind::kDelayedNesterov || s.outer_delay_c == 0,
          "outer_delay_c is used only with outer_optimizer = delayed_nesterov, got {} with {}; leave it out",
          s.outer_delay_c, s.get("outer_optimizer"));
  require(s.outer_delay_c * s.outer_delay <= 1.0,
          "outer_delay_c must be at most 1 / outer_delay ({}), got {}", 1.0 / s.outer_delay, s.outer_delay_c);
}

// A setting that was given, is not its default, and that nothing would read.
void check_used(const Settings& s) {
  const struct {
    const char* name;
    bool used;
    const char* where;
  } table[] = {
      {"outer_delay", s.outer_optimizer == OuterKind::kDelayedNesterov, "outer_optimizer = delayed_nesterov"},
      {"outer_beta2", s.outer_optimizer == OuterKind::kAdam, "outer_optimizer = adam"},
      {"outer_epsilon", s.outer_optimizer == OuterKind::kAdam, "outer_optimizer = adam"},
      {"blend_alpha", s.adopt == Adopt::kBlend, "adopt = blend"},
      {"max_carry_steps", s.adopt == Adopt::kRebase, "adopt = rebase"},
      {"grace_gamma", s.grace == Grace::kAdaptive, "grace = adaptive"},
      {"max_inflight", s.mode == Mode::kDecoupled, "mode = decoupled"},  // lockstep waits for all due rounds in any case
  };
  const Settings defaults;
  for (const auto& one : table) {
    require(one.used || !s.given.contains(one.name) || s.get(one.name) == defaults.get(one.name),
            "{} is used only with {}, got {} = {} without it; leave it out", one.name, one.where, one.name, s.get(one.name));
  }
}

void check_wire(const Settings& s) {
  require(s.credit_window_bytes >= s.chunk_bytes, "credit_window_bytes must be at least chunk_bytes ({}), got {}",
          s.chunk_bytes, s.credit_window_bytes);
  require(s.heartbeat_timeout_s >= 2 * s.heartbeat_interval_s,
          "heartbeat_timeout_s must be at least twice heartbeat_interval_s ({}), got {}; one late heartbeat would "
          "end a session",
          s.heartbeat_interval_s, s.heartbeat_timeout_s);
  const auto printable = [](unsigned char c) { return c >= 0x20 && c != 0x7f; };
  require(s.run_id.size() <= 64 && std::all_of(s.run_id.begin(), s.run_id.end(), printable),
          "run_id must be at most 64 bytes without control characters, got {} bytes", s.run_id.size());
}

}  // namespace

void Settings::validate() const {
  try {
    check_ranges(*this);
    check_schedule(*this);
    check_quorum(*this);
    merge_rules(merge_overrides);
    check_outer(*this);
    check_used(*this);
    check_wire(*this);
  } catch (const ConfigError& error) {
    if (preset == Preset::kNone) throw;
    throw ConfigError(fmt::format("{} (preset = {} gives every setting that is not named)", error.what(), get("preset")));
  }
}

}  // namespace diloco
