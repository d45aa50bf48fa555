// The text of a scenario. Keys are the names of the fields; a fault has only what its kind uses.
#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/base/errors.h"
#include "diloco/sim/scenario.h"

namespace diloco::sim {

namespace {

using nlohmann::json;

constexpr const char* kSchema = "diloco.scenario.1";

constexpr std::array<const char*, kFaultKinds> kFaultNames = {
    "kill_learner", "freeze_learner", "partition", "mute", "deaf", "slow_reader", "loss", "duplicate",
    "reorder", "cut", "nan", "huge", "learner_clock", "kill_syncer", "freeze_syncer", "syncer_clock"};
constexpr std::array<const char*, 4> kPlantNames = {"none", "forged_merge", "changed_payload", "lying_learner"};

template <std::size_t N>
std::size_t index_of(const std::array<const char*, N>& names, const std::string& name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) {
    throw ConfigError(fmt::format("scenario: '{}' is none of {}", name, fmt::join(names, ", ")));
  }
  return static_cast<std::size_t>(at - names.begin());
}

// Without the library's own number of the error.
std::string plain(const json::exception& error) {
  const std::string text = error.what();
  const auto end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

json learner_json(const LearnerSpec& spec) {
  json out = {{"id", spec.id}, {"step_s", spec.step_s}, {"start_s", spec.start_s}, {"tokens_per_step", spec.tokens_per_step},
              {"target", spec.target}, {"jitter", spec.jitter}, {"token_jitter", spec.token_jitter}};
  const Link link = spec.link.value_or(Link{});
  out["link"] = {{"delay_s", link.delay_s}, {"jitter_s", link.jitter_s}, {"up_bytes_per_s", link.up_bytes_per_s},
                 {"down_bytes_per_s", link.down_bytes_per_s}};
  return out;
}

LearnerSpec learner_from(const json& value) {
  LearnerSpec spec;
  spec.id = value.at("id");
  spec.step_s = value.at("step_s");
  spec.start_s = value.at("start_s");
  spec.tokens_per_step = value.at("tokens_per_step");
  spec.target = value.at("target");
  spec.jitter = value.at("jitter");
  spec.token_jitter = value.at("token_jitter");
  const json& link = value.at("link");
  spec.link = Link{link.at("delay_s"), link.at("jitter_s"), link.at("up_bytes_per_s"), link.at("down_bytes_per_s")};
  return spec;
}

}  // namespace

const char* fault_name(FaultKind kind) { return kFaultNames.at(static_cast<std::size_t>(kind)); }

std::string to_json(const Scenario& s) {
  json out = {{"schema", kSchema}, {"seed", s.seed}, {"values", s.values}, {"settings", s.settings},
              {"matrices", s.matrices}, {"rows", s.rows}, {"cols", s.cols}, {"shards", s.shards}, {"merge_s", s.merge_s},
              {"persist_s", s.persist_s}, {"payload_memory_bytes", s.payload_memory_bytes}, {"script_s", s.script_s},
              {"heal_s", s.heal_s}, {"plant", kPlantNames.at(static_cast<std::size_t>(s.plant))}};
  out["learners"] = json::array();
  for (const auto& spec : s.learners) out["learners"].push_back(learner_json(spec));
  out["faults"] = json::array();
  for (const auto& fault : s.faults) {
    out["faults"].push_back({{"kind", fault_name(fault.kind)}, {"at_s", fault.at_s}, {"learner", fault.learner},
                             {"lasts_s", fault.lasts_s}, {"amount", fault.amount}, {"shard", fault.shard}});
  }
  return out.dump(1);
}

Scenario scenario_from_json(const std::string& text) {
  try {
    const json in = json::parse(text);
    if (in.at("schema") != kSchema) throw ConfigError(fmt::format("scenario: the schema must be {}", kSchema));
    Scenario s;
    s.seed = in.at("seed");
    s.values = in.at("values");
    s.settings = in.at("settings").get<std::map<std::string, std::string>>();
    s.matrices = in.at("matrices");
    s.rows = in.at("rows");
    s.cols = in.at("cols");
    s.shards = in.value("shards", 1u);  // older texts do not say
    s.merge_s = in.at("merge_s");
    s.persist_s = in.at("persist_s");
    s.payload_memory_bytes = in.at("payload_memory_bytes");
    s.script_s = in.at("script_s");
    s.heal_s = in.at("heal_s");
    s.plant = static_cast<Plant>(index_of(kPlantNames, in.at("plant").get<std::string>()));
    for (const auto& spec : in.at("learners")) s.learners.push_back(learner_from(spec));
    for (const auto& fault : in.at("faults")) {
      s.faults.push_back({static_cast<FaultKind>(index_of(kFaultNames, fault.at("kind").get<std::string>())), fault.at("at_s"),
                          fault.at("learner"), fault.at("lasts_s"), fault.at("amount"), fault.value("shard", 0u)});
      if (s.faults.back().learner >= s.learners.size()) throw ConfigError("scenario: a fault names a learner that is not there");
      if (s.faults.back().shard >= s.shards) throw ConfigError("scenario: a fault names a shard that is not there");
    }
    return s;
  } catch (const json::parse_error& error) {
    throw ConfigError(fmt::format("scenario: this is no JSON; it goes wrong at byte {}", error.byte));
  } catch (const json::out_of_range& error) {
    throw ConfigError("scenario: " + plain(error) + "; `diloco simulate cluster --shrink` prints a whole one");
  } catch (const json::exception& error) {
    throw ConfigError("scenario: a value is not of its type: " + plain(error));
  }
}

}  // namespace diloco::sim
