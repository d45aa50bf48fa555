#include "diloco/syncer/report.h"

#include <gtest/gtest.h>

#include <fstream>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>

#include "diloco/base/errors.h"
#include "diloco/base/log_line.h"
#include "scratch_dir.h"

namespace diloco {
namespace {

TEST(Report, StatusGetsBytesAndResidentMemory) {
  TransportCounters counters;
  counters.bytes_in = 7;
  counters.bytes_out = 9;
  const auto status = nlohmann::json::parse(complete_status(R"({"epoch":3,"memory":{"payload_bytes":5}})", counters));
  EXPECT_EQ(status["epoch"], 3);
  EXPECT_EQ(status["bytes"]["in"], 7);
  EXPECT_EQ(status["bytes"]["out"], 9);
  EXPECT_NEAR(status["time"].get<double>(), static_cast<double>(std::time(nullptr)), 60.0);
  EXPECT_EQ(status["memory"]["payload_bytes"], 5);
  EXPECT_GT(status["memory"]["rss_bytes"].get<std::uint64_t>(), 1u << 20);
}

TEST(Report, TextThatIsNoObjectComesBack) { EXPECT_EQ(complete_status("oops", {}), "oops"); }

TEST(Report, EndpointFileIsWholeAndLeavesNoDraft) {
  const testing::ScratchDir dir;
  write_endpoint_file(dir.path() + "/endpoint", "tcp://127.0.0.1:4711");
  std::ifstream in(dir.path() + "/endpoint");
  std::string line;
  std::getline(in, line);
  EXPECT_EQ(line, "tcp://127.0.0.1:4711");
  const std::filesystem::directory_iterator files(dir.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
  EXPECT_THROW(write_endpoint_file(dir.path() + "/no/such/dir", "x"), ConfigError);
}

TEST(LogLine, HasOneFormatAndOneLine) {
  const std::string line = log_line("WARNING", "syncer", "two\nlines");
  EXPECT_EQ(line.substr(8), " diloco WARNING [syncer] two lines\n");
  EXPECT_EQ(line[2], ':');
  EXPECT_EQ(line[5], ':');
}

}  // namespace
}  // namespace diloco
