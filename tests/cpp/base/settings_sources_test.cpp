#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "diloco/base/errors.h"
#include "diloco/base/settings.h"

namespace diloco {
namespace {

// ctest runs every test in a process of its own, so the process id makes the name unique.
class TomlFile : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  void write(const std::string& content) { std::ofstream(path_) << content; }
  std::string refusal() {
    Settings settings;
    try {
      apply_toml_file(settings, path_);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }

  std::string path_ = testing::TempDir() + "diloco_settings_" + std::to_string(getpid()) + ".toml";
};

TEST_F(TomlFile, SetsWhatItNamesAndNothingElse) {
  write(
      "# a run\n"
      "sync_every = 12\n"
      "outer_lr = 0.7  # and a comment\n"
      "grace_s = 2\n"
      "adopt = \"blend\"\n"
      "run_id = 'spring'\n");
  Settings settings;
  settings.num_fragments = 7;
  apply_toml_file(settings, path_);
  EXPECT_EQ(settings.sync_every, 12U);
  EXPECT_EQ(settings.outer_lr, 0.7);
  EXPECT_EQ(settings.grace_s, 2.0);
  EXPECT_EQ(settings.adopt, Adopt::kBlend);
  EXPECT_EQ(settings.run_id, "spring");
  EXPECT_EQ(settings.num_fragments, 7U);
}

TEST_F(TomlFile, EmptyFileChangesNothing) {
  write("");
  Settings settings;
  apply_toml_file(settings, path_);
  EXPECT_EQ(settings.to_map(), Settings{}.to_map());
}

TEST_F(TomlFile, SyntaxErrorNamesFileAndLine) {
  write("sync_every = 12\nouter_lr = = 3\n");
  EXPECT_EQ(refusal().substr(0, path_.size() + 4), path_ + ":2: ");
  write("sync_every = 12\nsync_every = 13\n");
  EXPECT_EQ(refusal().substr(0, path_.size() + 4), path_ + ":2: ");
}

TEST_F(TomlFile, UnknownSettingNamesFileAndLineAndSuggests) {
  write("\n\nsync_evry = 12\n");
  EXPECT_EQ(refusal(), path_ + ":3: unknown setting \"sync_evry\"; did you mean sync_every?");
}

TEST_F(TomlFile, FirstWrongLineIsReported) {
  write("zzz = 1\naaa = 1\n");
  EXPECT_EQ(refusal().substr(0, path_.size() + 3), path_ + ":1:");
}

TEST_F(TomlFile, BadValueNamesFileAndLine) {
  write("run_id = 'x'\nsync_every = 1.5\n");
  EXPECT_EQ(refusal(), path_ + ":2: sync_every must be a whole number up to 4294967295, got \"1.5\"");
  write("sync_every = true\n");
  EXPECT_EQ(refusal(), path_ + ":1: sync_every must be a whole number up to 4294967295, got \"true\"");
}

TEST_F(TomlFile, SectionsAndListsAreRefused) {
  write("[settings]\nsync_every = 1\n");
  EXPECT_NE(refusal().find(":1: expected `name = value`"), std::string::npos) << refusal();
  write("run_id = 'x'\nsync_every = [1]\n");
  EXPECT_NE(refusal().find(":2: expected `name = value`"), std::string::npos) << refusal();
}

TEST_F(TomlFile, MissingFileAndDirectoryAreRefused) {
  EXPECT_EQ(refusal(), "cannot read the settings file " + path_ + "; check the path and its permissions");
  std::filesystem::create_directory(path_);
  EXPECT_EQ(refusal(), "cannot read the settings file " + path_ + "; check the path and its permissions");
}

std::string refusal(const std::map<std::string, std::string>& environment) {
  Settings settings;
  try {
    apply_environment(settings, environment, {"DILOCO_LOG_LEVEL"});
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Environment, SetsSettingsAndLeavesOthersAlone) {
  Settings settings;
  apply_environment(settings,
                    {{"PATH", "/bin"},
                     {"DILOCOX", "1"},
                     {"DILOCO_SYNC_EVERY", "12"},
                     {"DILOCO_OUTER_LR", "0.5"},
                     {"DILOCO_LOG_LEVEL", "debug"},
                     {"DILOCO_BUILD_DIR", "/tmp/x"}},
                    {"DILOCO_LOG_LEVEL"});
  EXPECT_EQ(settings.sync_every, 12U);
  EXPECT_EQ(settings.outer_lr, 0.5);
}

TEST(Environment, UnknownNameGetsASuggestion) {
  EXPECT_EQ(refusal({{"DILOCO_SYNC_EVRY", "1"}}),
            "environment variable DILOCO_SYNC_EVRY is not a setting; did you mean DILOCO_SYNC_EVERY?");
  EXPECT_EQ(refusal({{"DILOCO_LOGLEVEL", "1"}}),
            "environment variable DILOCO_LOGLEVEL is not a setting; did you mean DILOCO_LOG_LEVEL?");
  EXPECT_EQ(refusal({{"DILOCO_ZEBRA", "1"}}), "environment variable DILOCO_ZEBRA is not a setting; unset it");
  EXPECT_EQ(refusal({{"DILOCO_", "1"}}), "environment variable DILOCO_ is not a setting; unset it");
}

TEST(Environment, BadValueNamesTheVariable) {
  EXPECT_EQ(refusal({{"DILOCO_SYNC_EVERY", "often"}}),
            "environment variable DILOCO_SYNC_EVERY: sync_every must be a whole number up to 4294967295, got "
            "\"often\"");
  EXPECT_NE(refusal({{"DILOCO_SYNC_EVERY", ""}}), "");
}

}  // namespace
}  // namespace diloco
