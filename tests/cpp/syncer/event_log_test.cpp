#include "diloco/syncer/event_log.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "diloco/base/errors.h"
#include "scratch_dir.h"

namespace diloco {
namespace {

std::string contents(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(EventLog, LinesAreThereBeforeItIsClosed) {
  const testing::ScratchDir dir;
  EventLog log(dir.path() + "/events.jsonl");
  EXPECT_TRUE(log.append(R"({"event":"one"})"));
  EXPECT_TRUE(log.append(R"({"event":"two"})"));
  EXPECT_EQ(contents(dir.path() + "/events.jsonl"), "{\"event\":\"one\"}\n{\"event\":\"two\"}\n");
}

TEST(EventLog, AppendsAndNeverGluesALineToATornOne) {
  const testing::ScratchDir dir;
  const std::string path = dir.path() + "/events.jsonl";
  std::ofstream(path) << "{\"event\":\"old\"}\n{\"event\":\"to";
  EventLog log(path);
  EXPECT_TRUE(log.append("{}"));
  EXPECT_TRUE(log.append("{}"));
  EXPECT_EQ(contents(path), "{\"event\":\"old\"}\n{\"event\":\"to\n{}\n{}\n");
}

TEST(EventLog, TellsTheHighestEpochOfEarlierLives) {
  const testing::ScratchDir dir;
  const std::string path = dir.path() + "/events.jsonl";
  EXPECT_EQ(highest_epoch(path), 0u);
  std::ofstream(path) << "{\"epoch\":3,\"event\":\"epoch\",\"t\":0.5}\n"
                      << "{\"epoch\":9,\"event\":\"start\"}\n"
                      << "{\"epoch\":7,\"event\":\"epo";
  EXPECT_EQ(highest_epoch(path), 3u);
}

TEST(EventLog, NoneWritesNothing) {
  EventLog log;
  EXPECT_TRUE(log.append("x"));
  EXPECT_EQ(log.failures(), 0u);
}

TEST(EventLog, FileThatCannotBeOpenedIsNamed) {
  try {
    EventLog log("/nonexistent/dir/events.jsonl");
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent/dir/events.jsonl"), std::string::npos) << error.what();
  }
}

TEST(EventLog, FullDiskIsCountedNotThrown) {
  if (!std::ifstream("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  EventLog log("/dev/full");
  EXPECT_FALSE(log.append("x"));
  EXPECT_FALSE(log.append("y"));
  EXPECT_EQ(log.failures(), 2u);
  EXPECT_FALSE(log.last_error().empty());
}

}  // namespace
}  // namespace diloco
