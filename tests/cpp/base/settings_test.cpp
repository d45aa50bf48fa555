#include "diloco/base/settings.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "diloco/base/errors.h"
#include "diloco/base/presets.h"

namespace diloco {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

std::string refusal(const Pairs& pairs) {
  Settings settings;
  try {
    for (const auto& [name, value] : pairs) settings.set(name, value);
    settings.validate();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Settings, DefaultsAreValid) { EXPECT_EQ(refusal({}), ""); }

TEST(Settings, TableDescribesEverySetting) {
  const auto map = Settings{}.to_map();
  std::set<std::string> names;
  for (const auto& info : settings_table()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name << " twice";
    EXPECT_FALSE(info.help.empty()) << info.name;
    EXPECT_EQ(info.help.back(), '.') << info.name;
    EXPECT_EQ(info.choices.empty(), info.type != "choice") << info.name;
    EXPECT_EQ(map.at(info.name), info.default_value) << info.name;
    const bool number = info.type == "integer" || info.type == "number";
    EXPECT_EQ(info.range.empty(), !number) << info.name;
    EXPECT_EQ(info.unit == "s", info.name.ends_with("_s")) << info.name;
    EXPECT_EQ(info.unit == "bytes", info.name.ends_with("_bytes")) << info.name;
  }
  EXPECT_EQ(names.size(), map.size());
}

TEST(Settings, TextFormIsCanonical) {
  Settings first;
  for (const auto& info : settings_table()) {
    if (!info.choices.empty()) first.set(info.name, info.choices.back());
  }
  first.set("outer_lr", "0.70");
  first.set("grace_gamma", "8e-1");
  first.set("run_id", "été = \"x\"");
  Settings second;
  for (const auto& [name, value] : first.to_map()) second.set(name, value);
  EXPECT_EQ(second.to_map(), first.to_map());
  EXPECT_EQ(second.get("outer_lr"), "0.7");
  EXPECT_EQ(second.get("grace_gamma"), "0.8");
  EXPECT_EQ(second.get("adopt"), "blend");
}

TEST(Settings, EveryChoiceIsAccepted) {
  for (const auto& info : settings_table()) {
    for (const auto& choice : info.choices) {
      Settings settings;
      settings.set(info.name, choice);
      EXPECT_EQ(settings.get(info.name), choice);
    }
  }
}

TEST(Settings, UnknownNameGetsASuggestion) {
  EXPECT_EQ(refusal({{"sync_evry", "3"}}), "unknown setting \"sync_evry\"; did you mean sync_every?");
  EXPECT_EQ(refusal({{"zebra", "3"}}), "unknown setting \"zebra\"; docs/settings.md lists them all");
  EXPECT_THROW(Settings{}.get("zebra"), ConfigError);
}

TEST(Settings, BadTextSaysWhatIsAllowed) {
  EXPECT_EQ(refusal({{"sync_every", "x"}}), "sync_every must be a whole number up to 4294967295, got \"x\"");
  EXPECT_EQ(refusal({{"outer_lr", "fast"}}), "outer_lr must be a number, got \"fast\"");
  EXPECT_EQ(refusal({{"adopt", "rebas"}}),
            "adopt must be one of rebase, overwrite, blend, got \"rebas\"; did you mean rebase?");
  for (const char* bad : {"", "-1", "+1", " 1", "1 ", "1.0", "1e3", "0x10", "4294967296"}) {
    EXPECT_NE(refusal({{"sync_every", bad}}), "") << '"' << bad << '"';
  }
  for (const char* bad : {"", " 1", "1,5", "1.0x", "nan", "inf", "-inf"}) {
    EXPECT_NE(refusal({{"outer_lr", bad}}), "") << '"' << bad << '"';
  }
}

TEST(Settings, BadTextLeavesTheOldValue) {
  Settings settings;
  EXPECT_THROW(settings.set("sync_every", "12x"), ConfigError);
  EXPECT_EQ(settings.sync_every, 24U);
}

struct Refused {
  Pairs pairs;
  std::string message;
};

TEST(Settings, ValuesOutOfRangeNameTheRange) {
  const std::vector<Refused> cases = {
      {{{"sync_every", "0"}}, "sync_every must be at least 1, got 0"},
      {{{"num_fragments", "0"}}, "num_fragments must be at least 1 and at most 65536, got 0"},
      {{{"min_quorum", "0"}}, "min_quorum must be at least 1, got 0"},
      {{{"grace_gamma", "1"}}, "grace_gamma must be above 0 and below 1, got 1"},
      {{{"blend_alpha", "1.01"}}, "blend_alpha must be at least 0 and at most 1, got 1.01"},
      {{{"blend_alpha", "-0.5"}}, "blend_alpha must be at least 0 and at most 1, got -0.5"},
      {{{"outer_lr", "-1"}}, "outer_lr must be above 0 and at most 1000, got -1"},
      {{{"outer_beta2", "1"}}, "outer_beta2 must be above 0 and below 1, got 1"},
      {{{"outer_epsilon", "0"}}, "outer_epsilon must be above 0 and at most 1000, got 0"},
      {{{"outer_delay", "0"}}, "outer_delay must be at least 1 and at most 65536, got 0"},
      {{{"grace_gamma", "0"}}, "grace_gamma must be above 0 and below 1, got 0"},
      {{{"grace_s", "-1"}}, "grace_s must be at least 0 and at most 86400, got -1"},
      {{{"outer_lr", "0"}}, "outer_lr must be above 0 and at most 1000, got 0"},
      {{{"outer_lr", "nan"}}, "outer_lr must be above 0 and at most 1000, got nan"},
      {{{"chunk_bytes", "0"}}, "chunk_bytes must be at least 64 and at most 67108864, got 0"},
      {{{"heartbeat_timeout_s", "inf"}}, "heartbeat_timeout_s must be above 0 and at most 86400, got inf"},
  };
  for (const auto& c : cases) EXPECT_EQ(refusal(c.pairs), c.message);
}

TEST(Settings, CombinationsWithoutSenseNameBothSides) {
  const std::vector<Refused> cases = {
      {{{"sync_every", "2"}}, "overlap_steps must be below sync_every, got overlap_steps 2 with sync_every 2"},
      {{{"offsets", "streaming"}}, "offsets = streaming needs mode = lockstep"},
      {{{"max_carry_steps", "5"}}, "max_carry_steps must be 0 or at least sync_every (24), got 5"},
      {{{"min_quorum", "300"}}, "min_quorum must be at most max_learners (256), got 300"},
      {{{"grace", "fixed"}}, "grace = fixed needs grace_s above 0, got 0"},
      {{{"grace_s", "2"}}, "grace_s is used only with grace = fixed, got grace_s 2"},
      {{{"grace", "none"}, {"grace_cap_s", "2"}}, "grace_cap_s is used only with grace = adaptive"},
      {{{"merge_overrides", "(=mean"}}, "merge_overrides must have a regular expression (ECMAScript) before \"=mean\", got \"(\""},
      {{{"merge_overrides", "w=rda;embed"}}, "merge_overrides must be rules REGEX=mean or REGEX=rda, separated by semicolons, got \"embed\""},
      {{{"merge_overrides", "=mean"}}, "merge_overrides must be rules REGEX=mean"},
      {{{"outer_momentum", "0.9"}}, "outer_momentum is used only with outer_optimizer = nesterov, delayed_nesterov or adam, got 0.9"},
      {{{"outer_optimizer", "delayed_nesterov"}}, "outer_optimizer = delayed_nesterov needs outer_momentum above 0, got 0"},
      {{{"outer_delay_c", "0.1"}}, "outer_delay_c is used only with outer_optimizer = delayed_nesterov, got 0.1 with sgd"},
      {{{"outer_optimizer", "delayed_nesterov"}, {"outer_momentum", "0.9"}, {"outer_delay_c", "0.3"}},
       "outer_delay_c must be at most 1 / outer_delay (0.25), got 0.3"},
      {{{"trigger", "arrival"}}, "trigger = arrival needs grace = none"},
      {{{"trigger", "arrival"}, {"grace", "none"}, {"min_quorum", "2"}}, "trigger = arrival needs min_quorum = 1, got 2"},
      {{{"trigger", "arrival"}, {"mode", "lockstep"}}, "trigger = arrival needs mode = decoupled"},
      {{{"step_counts", "dylu"}}, "step_counts = dylu needs trigger = arrival"},
      {{{"outer_delay", "8"}}, "outer_delay is used only with outer_optimizer = delayed_nesterov, got outer_delay = 8 without it"},
      {{{"outer_beta2", "0.9"}}, "outer_beta2 is used only with outer_optimizer = adam"},
      {{{"outer_epsilon", "0.2"}}, "outer_epsilon is used only with outer_optimizer = adam"},
      {{{"blend_alpha", "0.9"}}, "blend_alpha is used only with adopt = blend"},
      {{{"adopt", "overwrite"}, {"max_carry_steps", "48"}}, "max_carry_steps is used only with adopt = rebase"},
      {{{"grace", "none"}, {"grace_gamma", "0.5"}}, "grace_gamma is used only with grace = adaptive"},
      {{{"mode", "lockstep"}, {"max_inflight", "2"}}, "max_inflight is used only with mode = decoupled"},
      {{{"outer_optimizer", "nesterov"}}, "outer_optimizer = nesterov needs outer_momentum above 0, got 0"},
      {{{"credit_window_bytes", "100"}}, "credit_window_bytes must be at least chunk_bytes (1048576), got 100"},
      {{{"heartbeat_interval_s", "3"}}, "heartbeat_timeout_s must be at least twice heartbeat_interval_s (3), got 5"},
      {{{"run_id", std::string(65, 'x')}}, "run_id must be at most 64 bytes without control characters, got 65"},
      {{{"run_id", "a\nb"}}, "run_id must be at most 64 bytes without control characters"},
  };
  for (const auto& c : cases) EXPECT_EQ(refusal(c.pairs).substr(0, c.message.size()), c.message);
}

// The rule of docs/operations.md, Timeouts: whatever the order of the others, a heartbeat may be late once.
TEST(Settings, TimeoutsInEveryOrderAreTakenOrRefusedByTheRule) {
  const std::vector<double> values = {0.05, 0.1, 0.25, 1, 2, 5, 7.5, 60, 3600};
  int taken = 0, refused = 0;
  for (const double interval : values) {
    for (const double timeout : values) {
      for (const double grace : values) {
        for (const char* kind : {"fixed", "adaptive"}) {
          const Pairs pairs = {
              {"heartbeat_interval_s", fmt::format("{}", interval)},
              {"heartbeat_timeout_s", fmt::format("{}", timeout)},
              {"grace", kind},
              {std::string(kind) == "fixed" ? "grace_s" : "grace_cap_s", fmt::format("{}", grace)}};
          const std::string why = refusal(pairs);
          if (timeout >= 2 * interval) {
            EXPECT_EQ(why, "");
            ++taken;
          } else {
            EXPECT_EQ(why, fmt::format("heartbeat_timeout_s must be at least twice heartbeat_interval_s ({}), got {}; one late "
                                       "heartbeat would end a session", interval, timeout));
            ++refused;
          }
        }
      }
    }
  }
  EXPECT_GT(taken, 100);
  EXPECT_GT(refused, 100);
  EXPECT_EQ(refusal({{"heartbeat_timeout_s", "86401"}}), "heartbeat_timeout_s must be above 0 and at most 86400, got 86401");
}

TEST(Presets, SetEverythingThatIsNotGivenInAnyOrder) {
  for (const bool preset_first : {true, false}) {
    Settings settings;
    if (preset_first) settings.set("preset", "diloco");
    settings.set("sync_every", "30");
    settings.set("preset", "streaming");
    EXPECT_EQ(settings.sync_every, 30u);  // given
    EXPECT_EQ(settings.get("fragmenter"), "strided");
    EXPECT_EQ(settings.get("wire_dtype"), "bf16");  // of no preset any more: the default
    settings.validate();
  }
}

TEST(Presets, AreValidAndSayWhatTheyAre) {
  EXPECT_EQ(presets().size(), 5u);
  for (const auto& preset : presets()) {
    Settings settings;
    settings.set("preset", preset.name);
    settings.validate();
    EXPECT_FALSE(preset.reason.empty());
    for (const auto& [name, value] : preset.values) EXPECT_EQ(settings.get(name), value) << preset.name << " " << name;
    // As a WELCOME carries them: every setting, in alphabetical order.
    Settings received;
    for (const auto& [name, value] : settings.to_map()) received.set(name, value);
    EXPECT_EQ(received.to_map(), settings.to_map());
  }
}

TEST(Presets, AreNamedWhereTheirValuesDoNotFit) {
  EXPECT_NE(refusal({{"preset", "decoupled"}, {"outer_optimizer", "sgd"}}).find("got 0.9 with sgd"), std::string::npos);
  EXPECT_NE(refusal({{"preset", "decoupled"}, {"outer_optimizer", "sgd"}}).find("(preset = decoupled gives"), std::string::npos);
}

TEST(Settings, StalenessLimit) {
  Settings settings;
  EXPECT_EQ(settings.staleness_limit(), 0u);
  settings.anchor = Anchor::kSyncer;
  EXPECT_EQ(settings.staleness_limit(), 8u);
  settings.max_staleness = 3;
  EXPECT_EQ(settings.staleness_limit(), 3u);
}

TEST(Settings, EnumOutsideItsChoicesIsRefused) {
  Settings settings;
  settings.wire_dtype = WireDtype::kParam;  // downlink only
  EXPECT_THROW(settings.validate(), ConfigError);
}

TEST(Settings, CarryLimitFollowsSyncEvery) {
  Settings settings;
  EXPECT_EQ(settings.carry_limit_steps(), 96U);
  settings.max_carry_steps = 30;
  EXPECT_EQ(settings.carry_limit_steps(), 30U);
}

}  // namespace
}  // namespace diloco
