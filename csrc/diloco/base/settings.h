// All settings of a run, in one table: the C++ programs' options, the Python keyword arguments, the environment
// (DILOCO_<NAME>), the TOML file and docs/settings.md are generated from it.
//
// Settings live on the syncer and reach learners with WELCOME. A learner may name algorithm settings of its own;
// they must equal the syncer's or the learner is refused, naming both.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "diloco/base/types.h"

namespace diloco {

enum class Mode { kDecoupled, kLockstep };
enum class Offsets { kStaggered, kStreaming };
enum class Fragmenter { kBalanced, kLayer, kStrided, kTensor };
enum class Grace { kAdaptive, kFixed, kNone };
enum class Weights { kTokensPerStep, kTokens, kEqual };
enum class MergeKind { kRda, kMean };
enum class OuterKind { kSgd, kNesterov, kAdam, kDelayedNesterov };
enum class Anchor { kLearner, kSyncer };
enum class Trigger { kDue, kArrival };
enum class StepCounts { kFixed, kDylu };
enum class Preset { kNone, kDecoupled, kStreaming, kDiloco, kAsync, kFinetune };
enum class Adopt { kRebase, kOverwrite, kBlend };
enum class WireDtype { kF32, kBf16, kParam };  // kParam: the parameter's own (downlink only)

struct Settings {
  Preset preset = Preset::kNone;  // defaults of the settings that set() was not called for; presets.h

  // Schedule.
  std::uint32_t sync_every = 24;     // H: inner steps between two syncs of one fragment
  std::uint32_t num_fragments = 24;  // P: at most the number of tensors is used
  std::uint32_t overlap_steps = 2;   // tau: steps a fragment may be under way
  Mode mode = Mode::kDecoupled;
  Offsets offsets = Offsets::kStaggered;  // lockstep only has a choice of adoption steps
  Trigger trigger = Trigger::kDue;        // arrival: every learner by its own step count, answered alone (Async Local-SGD)
  StepCounts step_counts = StepCounts::kFixed;  // dylu: with trigger = arrival, sync_every * own speed / the fastest's
  Fragmenter fragmenter = Fragmenter::kBalanced;
  std::uint32_t max_inflight = 0;  // open rounds at a time; 0 = from the measured round time

  // Quorum and grace.
  std::uint32_t min_quorum = 1;  // K
  Grace grace = Grace::kAdaptive;
  double grace_gamma = 0.8;  // share of the slack spent waiting (paper Eq. 3), in (0, 1)
  Seconds grace_s = 0.0;     // grace = fixed
  Seconds grace_cap_s = 0.0;  // upper bound of the adaptive window; 0 = one step of the K-th fastest learner

  // Merge and outer step.
  Weights weights = Weights::kTokensPerStep;
  double staleness_discount = 0.0;  // lambda: weight / (1 + lambda * versions behind)
  std::uint32_t max_staleness = 0;  // versions a contribution's base may be behind; 0: see staleness_limit()
  Anchor anchor = Anchor::kLearner;
  MergeKind merge = MergeKind::kRda;  // of matrices; 1-D tensors are averaged
  std::string merge_overrides = "embed|wte|wpe|lm_head=mean";  // "regex=mean;regex=rda": first match of the name wins
  OuterKind outer_optimizer = OuterKind::kSgd;
  double outer_lr = 1.0;
  double outer_momentum = 0.0;  // nesterov, delayed_nesterov; adam: beta1
  double outer_beta2 = 0.95;    // adam
  double outer_epsilon = 0.1;   // adam
  std::uint32_t outer_delay = 4;  // delayed_nesterov: outer steps between two updates of the momentum (N)
  double outer_delay_c = 0.0;     // delayed_nesterov: share of the momentum applied in between, in [0, 1/N]

  // Adoption.
  Adopt adopt = Adopt::kRebase;
  double blend_alpha = 0.5;           // weight of *local* with adopt = blend
  std::uint32_t max_carry_steps = 0;  // 0 = 4 * sync_every

  // Wire.
  WireDtype wire_dtype = WireDtype::kBf16;       // uplink
  WireDtype downlink_dtype = WireDtype::kParam;  // downlink
  std::uint64_t chunk_bytes = 1 << 20;
  std::uint64_t credit_window_bytes = 8 << 20;
  std::uint64_t payload_memory_bytes = 0;  // syncer: bound on contributions held; 0 = half of the machine's memory
  std::uint64_t staging_bytes = 0;         // learner: bound on armed copies; 0 = what the schedule asks for

  // People and patience.
  std::uint32_t max_learners = 256;
  std::uint32_t max_bad_payloads = 3;
  Seconds heartbeat_interval_s = 1.0;
  Seconds heartbeat_timeout_s = 5.0;
  std::string run_id;  // if given, learners' must match

  // Derived values used in more than one place.
  std::uint32_t carry_limit_steps() const { return max_carry_steps ? max_carry_steps : 4 * sync_every; }
  // Versions behind beyond which a contribution is refused; 0 = none is. With anchor = syncer so many are kept.
  std::uint32_t staleness_limit() const { return max_staleness == 0 && anchor == Anchor::kSyncer ? 8 : max_staleness; }

  // Sets one setting from text. Throws ConfigError (unknown name with a suggestion; bad value with what is allowed).
  // "preset" gives every setting that set() was never called for the preset's value, else its default: the order of the
  // calls does not matter. Members assigned directly count as never set.
  void set(const std::string& name, const std::string& value);
  std::string get(const std::string& name) const;
  std::map<std::string, std::string> to_map() const;  // every setting, canonical text
  // Checks ranges and combinations. Throws ConfigError naming the setting, the value and the allowed range.
  void validate() const;

  std::set<std::string> given;  // names that set() was called for
};

struct SettingInfo {
  std::string name;
  std::string type;  // "integer", "number", "text", "choice"
  std::string unit;  // "steps", "s", "bytes", "" ...
  std::string default_value;
  std::vector<std::string> choices;
  std::string help;   // one or two sentences
  std::string range;  // of numbers: "at least 1", "above 0 and below 1"; "" = any
};

const std::vector<SettingInfo>& settings_table();

// Reads settings from a TOML file of `name = value` lines. Throws ConfigError with file and line.
void apply_toml_file(Settings& settings, const std::string& path);
// Applies DILOCO_<NAME> variables. `environment` is name -> value. Unknown DILOCO_* names throw ConfigError with a
// suggestion, except the names in `also_allowed`.
void apply_environment(Settings& settings, const std::map<std::string, std::string>& environment,
                       const std::vector<std::string>& also_allowed);
// Nearest known name, or "" if none is near.
std::string suggest(const std::string& wrong, const std::vector<std::string>& known);

}  // namespace diloco
