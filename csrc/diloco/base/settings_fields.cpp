#include "diloco/base/settings_fields.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <type_traits>

namespace diloco::detail {
namespace {

template <typename E>
struct Named {
  E value;
  const char* name;
};
template <typename E>
using Names = std::vector<Named<E>>;

const Names<Mode> kModes = {{Mode::kDecoupled, "decoupled"}, {Mode::kLockstep, "lockstep"}};
const Names<Offsets> kOffsets = {{Offsets::kStaggered, "staggered"}, {Offsets::kStreaming, "streaming"}};
const Names<Fragmenter> kFragmenters = {{Fragmenter::kBalanced, "balanced"},
                                        {Fragmenter::kLayer, "layer"},
                                        {Fragmenter::kStrided, "strided"},
                                        {Fragmenter::kTensor, "tensor"}};
const Names<Grace> kGraces = {{Grace::kAdaptive, "adaptive"}, {Grace::kFixed, "fixed"}, {Grace::kNone, "none"}};
const Names<Weights> kWeights = {
    {Weights::kTokensPerStep, "tokens_per_step"}, {Weights::kTokens, "tokens"}, {Weights::kEqual, "equal"}};
const Names<MergeKind> kMerges = {{MergeKind::kRda, "rda"}, {MergeKind::kMean, "mean"}};
const Names<OuterKind> kOuters = {{OuterKind::kSgd, "sgd"},
                                  {OuterKind::kNesterov, "nesterov"},
                                  {OuterKind::kAdam, "adam"},
                                  {OuterKind::kDelayedNesterov, "delayed_nesterov"}};
const Names<Anchor> kAnchors = {{Anchor::kLearner, "learner"}, {Anchor::kSyncer, "syncer"}};
const Names<Trigger> kTriggers = {{Trigger::kDue, "due"}, {Trigger::kArrival, "arrival"}};
const Names<StepCounts> kStepCounts = {{StepCounts::kFixed, "fixed"}, {StepCounts::kDylu, "dylu"}};
const Names<Preset> kPresets = {{Preset::kNone, "none"},           {Preset::kDecoupled, "decoupled"},
                                {Preset::kStreaming, "streaming"}, {Preset::kDiloco, "diloco"},
                                {Preset::kAsync, "async"},         {Preset::kFinetune, "finetune"}};
const Names<Adopt> kAdopts = {{Adopt::kRebase, "rebase"}, {Adopt::kOverwrite, "overwrite"}, {Adopt::kBlend, "blend"}};
const Names<WireDtype> kUplink = {{WireDtype::kF32, "f32"}, {WireDtype::kBf16, "bf16"}};
const Names<WireDtype> kDownlink = {{WireDtype::kF32, "f32"}, {WireDtype::kBf16, "bf16"}, {WireDtype::kParam, "param"}};

template <typename T>
std::string parse_number(const std::string& text, T& out) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) {
    out = value;
    return "";
  }
  if constexpr (std::is_integral_v<T>) return fmt::format("a whole number up to {}", std::numeric_limits<T>::max());
  return "a number";
}

template <typename T>
Field number(const char* name, T Settings::*member, const char* unit, Range range, const char* help) {
  Field f;
  f.info = {name, std::is_integral_v<T> ? "integer" : "number", unit, "", {}, help, range.text()};
  f.range = range;
  f.set = [member](Settings& s, const std::string& text) { return parse_number(text, s.*member); };
  f.get = [member](const Settings& s) { return fmt::format("{}", s.*member); };
  f.number = [member](const Settings& s) { return static_cast<double>(s.*member); };
  return f;
}

template <typename E>
Field choice(const char* name, E Settings::*member, const Names<E>& names, const char* help) {
  Field f;
  f.info = {name, "choice", "", "", {}, help, ""};
  for (const auto& n : names) f.info.choices.emplace_back(n.name);
  f.set = [member, &names, choices = f.info.choices](Settings& s, const std::string& text) {
    for (const auto& n : names) {
      if (text == n.name) {
        s.*member = n.value;
        return std::string();
      }
    }
    return fmt::format("one of {}", fmt::join(choices, ", "));
  };
  f.get = [member, &names](const Settings& s) {
    for (const auto& n : names) {
      if (s.*member == n.value) return std::string(n.name);
    }
    return fmt::format("{}", static_cast<int>(s.*member));  // only a cast made this; validate() refuses it
  };
  return f;
}

Field text(const char* name, std::string Settings::*member, const char* help) {
  Field f;
  f.info = {name, "text", "", "", {}, help, ""};
  f.set = [member](Settings& s, const std::string& value) {
    s.*member = value;
    return std::string();
  };
  f.get = [member](const Settings& s) { return s.*member; };
  return f;
}

Range at_least(double low) { return {.low = low}; }
Range between(double low, double high) { return {.low = low, .high = high}; }

std::vector<Field> make_fields() {
  using S = Settings;
  constexpr double kMiB = 1 << 20;
  std::vector<Field> all = {
      choice("preset", &S::preset, kPresets,
             "Values of a paper for all settings that are not given; docs/settings.md has the table."),
      number("sync_every", &S::sync_every, "steps", at_least(1), "Inner steps between two syncs of one fragment (H)."),
      number("num_fragments", &S::num_fragments, "", between(1, 65536),
             "Parts the model is synced in (P). At most as many as there are tensors are used."),
      number("overlap_steps", &S::overlap_steps, "steps", at_least(0),
             "Steps a fragment may be under way while training goes on (tau). Must be below sync_every."),
      choice("mode", &S::mode, kModes,
             "decoupled: nobody waits, fragments are adopted on arrival. lockstep: learners wait for each due fragment, "
             "as in classic and Streaming DiLoCo."),
      choice("offsets", &S::offsets, kOffsets,
             "Adoption steps in lockstep. staggered: spread over the first sync_every steps. streaming: the first "
             "fragment at sync_every, the others after it."),
      choice("trigger", &S::trigger, kTriggers,
             "due: the syncer's clock opens rounds that collect from all learners. arrival: each learner by its own step "
             "count, merged alone and answered alone (Async Local-SGD); needs grace = none and min_quorum = 1."),
      choice("step_counts", &S::step_counts, kStepCounts,
             "With trigger = arrival. fixed: every learner makes sync_every steps between its syncs. dylu: sync_every times "
             "its speed over the fastest's, rounded down."),
      choice("fragmenter", &S::fragmenter, kFragmenters,
             "balanced: fragments of equal size. layer: neighbouring layers together. strided: layers dealt out in turn "
             "(Streaming DiLoCo). tensor: tensors dealt out in turn."),
      number("max_inflight", &S::max_inflight, "rounds", at_least(0),
             "With mode = decoupled: rounds open at a time. 0: as many as the measured round time asks for. In lockstep all "
             "that are due."),
      number("min_quorum", &S::min_quorum, "learners", at_least(1),
             "Contributions needed before a round may be merged (K). With fewer learners the syncer waits and says so."),
      choice("grace", &S::grace, kGraces,
             "How long a round waits for others once the quorum is complete. adaptive: as long as the overlap leaves "
             "slack. fixed: grace_s. none: not at all."),
      number("grace_gamma", &S::grace_gamma, "", {.low = 0, .high = 1, .low_open = true, .high_open = true},
             "Share of the measured slack that the adaptive grace window uses."),
      number("grace_s", &S::grace_s, "s", between(0, 86400), "Length of the window with grace = fixed."),
      number("grace_cap_s", &S::grace_cap_s, "s", between(0, 86400),
             "Upper bound of the adaptive window. 0: one step of the min_quorum-th fastest learner."),
      choice("weights", &S::weights, kWeights,
             "Weight of a contribution. tokens_per_step: tokens squared over steps. tokens: its tokens. equal: one."),
      number("staleness_discount", &S::staleness_discount, "", between(0, 1e6),
             "Weights are divided by 1 + this * the versions a contribution is behind. 0: no discount."),
      number("max_staleness", &S::max_staleness, "versions", at_least(0),
             "Contributions further behind are refused. 0: none is; with anchor = syncer, which keeps so many versions of "
             "every fragment in memory, 8."),
      choice("anchor", &S::anchor, kAnchors,
             "What a contribution is a change against. learner: the version the learner last adopted. syncer: the newest "
             "version, as in Decoupled DiLoCo; the same for a learner that is up to date."),
      choice("merge", &S::merge, kMerges,
             "How matrices are merged. rda: directions and norms are averaged apart. mean: weighted mean. 1-D tensors "
             "are averaged."),
      text("merge_overrides", &S::merge_overrides,
           "Other rules for some tensors: REGEX=mean or REGEX=rda (ECMAScript), separated by semicolons. The first one that "
           "matches the name anywhere holds, for 1-D tensors too."),
      choice("outer_optimizer", &S::outer_optimizer, kOuters, "Optimizer the syncer applies to the merged change."),
      number("outer_lr", &S::outer_lr, "", {.low = 0, .high = 1e3, .low_open = true}, "Learning rate of the outer optimizer."),
      number("outer_momentum", &S::outer_momentum, "", {.low = 0, .high = 1, .high_open = true},
             "Momentum of nesterov and delayed_nesterov, which need one (0.9 in the DiLoCo papers); beta1 of adam; sgd has "
             "none."),
      number("outer_beta2", &S::outer_beta2, "", {.low = 0, .high = 1, .low_open = true, .high_open = true},
             "adam: decay of the squared change (DiLoCo tried 0.95 and 0.999)."),
      number("outer_epsilon", &S::outer_epsilon, "", {.low = 0, .high = 1e3, .low_open = true},
             "adam: added to the root of the squared change; DiLoCo needed 0.1."),
      number("outer_delay", &S::outer_delay, "outer steps", between(1, 65536),
             "delayed_nesterov: outer steps between two updates of the momentum (N); about the number of learners."),
      number("outer_delay_c", &S::outer_delay_c, "", between(0, 1),
             "delayed_nesterov: share of the momentum applied in the outer steps between; at most 1 / outer_delay."),
      choice("adopt", &S::adopt, kAdopts,
             "What a learner does with its work since it sent. rebase: keeps it on top of the new weights. overwrite: "
             "drops it. blend: keeps the share blend_alpha of its distance."),
      number("blend_alpha", &S::blend_alpha, "", between(0, 1),
             "Weight of the local parameters with adopt = blend. 1: new weights are never taken."),
      number("max_carry_steps", &S::max_carry_steps, "steps", at_least(0),
             "Unmerged work older than this is dropped. 0: 4 * sync_every."),
      choice("wire_dtype", &S::wire_dtype, kUplink, "Element type of contributions; 1-D tensors always travel as f32."),
      choice("downlink_dtype", &S::downlink_dtype, kDownlink,
             "Element type of new weights. param: bf16 for parameters in bf16, f32 for all others."),
      number("chunk_bytes", &S::chunk_bytes, "bytes", between(64, 64 * kMiB), "Size of the pieces fragments are sent in."),
      number("credit_window_bytes", &S::credit_window_bytes, "bytes", at_least(64),
             "Bytes a receiver lets a sender have under way. Should cover bandwidth times round trip."),
      number("payload_memory_bytes", &S::payload_memory_bytes, "bytes", at_least(0),
             "Syncer: bound on the contributions held in memory. 0: half of the machine's memory."),
      number("staging_bytes", &S::staging_bytes, "bytes", at_least(0),
             "Learner: bound on the copies kept ready to be sent. 0: what the schedule asks for."),
      number("max_learners", &S::max_learners, "learners", between(1, 65536), "Learners beyond this number are refused."),
      number("max_bad_payloads", &S::max_bad_payloads, "", at_least(1),
             "Contributions with NaN or infinity after which a learner is sent away."),
      number("heartbeat_interval_s", &S::heartbeat_interval_s, "s", {.low = 0, .high = 3600, .low_open = true},
             "Time between two heartbeats."),
      number("heartbeat_timeout_s", &S::heartbeat_timeout_s, "s", {.low = 0, .high = 86400, .low_open = true},
             "Silence after which a peer counts as gone. At least twice heartbeat_interval_s."),
      text("run_id", &S::run_id, "Name of the run: learners must give the same. Empty: any learner is welcome."),
  };
  const Settings defaults;
  for (auto& f : all) f.info.default_value = f.get(defaults);
  return all;
}

}  // namespace

bool Range::contains(double value) const {
  return std::isfinite(value) && (low_open ? value > low : value >= low) && (high_open ? value < high : value <= high);
}

std::string Range::text() const {
  std::string out;
  if (std::isfinite(low)) out = fmt::format("{} {}", low_open ? "above" : "at least", low);
  if (std::isfinite(high)) out += fmt::format("{}{} {}", out.empty() ? "" : " and ", high_open ? "below" : "at most", high);
  return out;
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all = make_fields();
  return all;
}

}  // namespace diloco::detail
