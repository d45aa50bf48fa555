#include "diloco/torch/collective_plan.h"

#include <cctype>
#include <utility>

#include "diloco/base/errors.h"
#include "diloco/merge/merge.h"

namespace diloco {
namespace {

constexpr std::uint64_t kAlignment = 64;

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

const char* const kEverybody = "every rank is in every merge";
const char* const kUpToDate = "no rank is ever behind another";
const char* const kNoWire = "the process group moves the bytes";
const char* const kTimeout = "the process group has its own timeout";

// Settings that only a syncer or its learners read, each with the reason.
const std::vector<std::pair<const char*, const char*>> kOfASyncer = {
    {"min_quorum", kEverybody},        {"grace", kEverybody},
    {"grace_gamma", kEverybody},       {"grace_s", kEverybody},
    {"grace_cap_s", kEverybody},       {"max_learners", kEverybody},
    {"trigger", kEverybody},           {"step_counts", kEverybody},
    {"max_inflight", kEverybody},      {"anchor", kUpToDate},
    {"staleness_discount", kUpToDate}, {"max_staleness", kUpToDate},
    {"max_carry_steps", kUpToDate},    {"chunk_bytes", kNoWire},
    {"credit_window_bytes", kNoWire},  {"payload_memory_bytes", kNoWire},
    {"staging_bytes", kNoWire},        {"heartbeat_interval_s", kTimeout},
    {"heartbeat_timeout_s", kTimeout}, {"run_id", "the launcher names the run"},
};

void replace_all(std::string& text, const std::string& what, const std::string& by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
}

}  // namespace

Settings collective_settings(const std::map<std::string, std::string>& given) {
  Settings settings;
  for (const auto& [name, value] : given) settings.set(name, value);
  for (const auto& [name, reason] : kOfASyncer) {
    if (!given.contains(name)) continue;
    std::string variable = std::string("DILOCO_") + name;
    for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    throw ConfigError(std::string(name) + " means nothing without a syncer, " + reason + "; got " + name + " = " +
                      settings.get(name) + ", leave it out, as an argument and as " + variable);
  }
  if (!given.contains("mode") && settings.preset == Preset::kNone) settings.set("mode", "lockstep");
  if (settings.mode != Mode::kLockstep) {
    const std::string from = given.contains("mode") ? "mode = decoupled" : "preset = " + settings.get("preset");
    throw ConfigError("without a syncer all ranks meet at fixed steps, got " + from +
                      ", where nobody waits; use preset = diloco or streaming, mode = lockstep, or a syncer");
  }
  settings.validate();
  return settings;
}

Work work_of(const Settings& settings, std::uint64_t tokens, std::uint64_t steps, double lr) {
  return {tokens, steps, tokens > 0 ? contribution_weight(settings.weights, tokens, steps, 0.0, 0) : 0.0, lr};
}

CollectivePlan make_collective_plan(Layout layout, Settings settings, int rank, int ranks) {
  CollectivePlan out;
  out.layout = std::move(layout);
  out.settings = std::move(settings);
  out.rank = rank;
  out.ranks = ranks;
  check_layout(out.layout);
  out.plan = make_plan(out.layout, out.settings.fragmenter, out.settings.num_fragments);
  for (FragmentId p = 0; p < out.plan.size(); ++p) {
    FragmentMessage message;
    const auto payload = [&](PayloadKind kind) { return payload_layout(out.layout, out.plan, p, kind, out.settings); };
    message.contribution = payload(PayloadKind::kContribution);
    message.anchor = payload(PayloadKind::kAnchor);
    message.image = payload(PayloadKind::kImage);
    message.use_rda = rda_segments(out.layout, message.contribution, out.settings);
    message.work = aligned(message.contribution.bytes);
    message.bytes = message.work + aligned(sizeof(Work));
    out.messages.push_back(std::move(message));
  }
  return out;
}

std::string first_difference(const Layout& layout, const std::map<std::string, std::string>& settings, int rank,
                             const Layout& layout_of_0, const std::map<std::string, std::string>& settings_of_0) {
  const std::string name = "rank " + std::to_string(rank);
  std::string text = first_difference(layout, layout_of_0);
  if (!text.empty()) {
    replace_all(text, "this learner", name);
    replace_all(text, "the run", "rank 0");
    return text;
  }
  for (const auto& [setting, value] : settings_of_0) {
    const auto found = settings.find(setting);
    const std::string theirs = found == settings.end() ? "none" : found->second;
    if (theirs != value) return name + " has " + setting + " = " + theirs + ", rank 0 has " + value;
  }
  return {};
}

}  // namespace diloco
