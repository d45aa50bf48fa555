// The native program as a user runs it: a real process.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "child.h"
#include "diloco/base/errors.h"
#include "diloco/base/settings.h"
#include "diloco/syncer/status_query.h"

namespace diloco {
namespace {

using testing::Child;
using testing::ScratchDir;

std::vector<std::string> program(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), DILOCO_SYNCER_PROGRAM);
  return arguments;
}

std::string endpoint_of(Child& child) {
  EXPECT_TRUE(child.says("listening on ")) << child.err();
  const std::string out = child.out();
  const auto at = out.find("tcp://");
  return out.substr(at, out.find('\n', at) - at);
}

TEST(SyncerProgram, HelpExplainsEverySettingWithUnitAndDefault) {
  Child child(program({"--help"}));
  ASSERT_EQ(child.wait(), 0);
  std::string help = child.out();
  std::replace(help.begin(), help.end(), '\n', ' ');
  for (const SettingInfo& info : settings_table()) {
    std::string option = "--" + info.name;
    std::replace(option.begin(), option.end(), '_', '-');
    EXPECT_NE(help.find(option + " "), std::string::npos) << option;
    if (!info.unit.empty()) {
      EXPECT_NE(help.find(option + " " + info.unit), std::string::npos) << option;
    }
    EXPECT_NE(help.find("[default " + (info.default_value.empty() ? "none" : info.default_value)), std::string::npos)
        << option;
  }
  for (const char* option : {"--bind", "--insecure", "--event-log", "--endpoint-file", "--merge-threads", "--shutdown-s",
                             "--config", "--log-level", "--version"}) {
    EXPECT_NE(help.find(option), std::string::npos) << option;
  }
}

TEST(SyncerProgram, VersionNamesPackageProtocolAndLibrary) {
  Child child(program({"--version"}));
  ASSERT_EQ(child.wait(), 0);
  EXPECT_NE(child.out().find("diloco "), std::string::npos) << child.out();
  EXPECT_NE(child.out().find("protocol 1"), std::string::npos) << child.out();
  EXPECT_NE(child.out().find("libzmq 4."), std::string::npos) << child.out();
}

TEST(SyncerProgram, SigtermSaysSoAndExitsZero) {
  for (const int number : {SIGTERM, SIGINT}) {
    Child child(program({"--bind", "127.0.0.1:0"}));
    endpoint_of(child);
    child.signal(number);
    EXPECT_EQ(child.wait(), 0) << child.err();
    EXPECT_NE(child.err().find("stopped"), std::string::npos) << child.err();
  }
}

TEST(SyncerProgram, WritesItsEndpointAndAnswersStatus) {
  const ScratchDir dir;
  Child child(program({"--bind", "127.0.0.1:0", "--endpoint-file", dir.path() + "/endpoint", "--sync-every", "7"}));
  const std::string endpoint = endpoint_of(child);
  std::string line;
  std::ifstream file(dir.path() + "/endpoint");
  std::getline(file, line);
  EXPECT_EQ(line, endpoint);
  const auto status = nlohmann::json::parse(query_status(endpoint, 20.0));
  EXPECT_EQ(status["mode"], "decoupled");
  EXPECT_EQ(status["quorum"], 1);
  EXPECT_GT(status["memory"]["rss_bytes"].get<std::uint64_t>(), 0u);
  EXPECT_GT(status["bytes"]["in"].get<std::uint64_t>(), 0u);
}

TEST(SyncerProgram, ArgumentBeatsEnvironmentBeatsFile) {
  const ScratchDir dir;
  const std::string toml = dir.path() + "/run.toml", log = dir.path() + "/events";
  std::ofstream(toml) << "sync_every = 11\noverlap_steps = 3\nmin_quorum = 2\n";
  Child child(program({"--bind", "127.0.0.1:0", "--config", toml, "--sync-every", "13", "--event-log", log}),
              {"DILOCO_SYNC_EVERY=12", "DILOCO_OVERLAP_STEPS=4"});
  endpoint_of(child);
  child.signal(SIGTERM);
  ASSERT_EQ(child.wait(), 0) << child.err();
  std::string line;
  std::ifstream events(log);
  ASSERT_TRUE(std::getline(events, line));
  const auto start = nlohmann::json::parse(line);
  EXPECT_EQ(start["event"], "start");
  EXPECT_GT(start["time"].get<double>(), 1.7e9);
  EXPECT_EQ(start["settings"]["sync_every"], "13");
  EXPECT_EQ(start["settings"]["overlap_steps"], "4");
  EXPECT_EQ(start["settings"]["min_quorum"], "2");
}

struct BadCase {
  std::vector<std::string> arguments, environment;
  std::string toml;
  int status;
  std::vector<std::string> says;
};

TEST(SyncerProgram, BadInputIsRefusedWithWhatToDo) {
  const ScratchDir dir;
  const std::string toml = dir.path() + "/bad.toml";
  const std::vector<BadCase> cases = {
      {{"--sync-evry", "3"}, {}, "", 2, {"--sync-evry", "--sync-every"}},
      {{"--sync-every", "nine"}, {}, "", 2, {"sync_every", "nine"}},
      {{"--min-quorum", "0"}, {}, "", 2, {"min_quorum", "0"}},
      {{"--merge", "median"}, {}, "", 2, {"merge", "median", "rda"}},
      {{"--bind", "localhost"}, {}, "", 2, {"localhost", "HOST:PORT"}},
      {{"--bind", "0.0.0.0:0"}, {}, "", 2, {"0.0.0.0", "--insecure"}},
      {{"--log-level", "loud"}, {}, "", 2, {"loud"}},
      {{"--event-log", "/nonexistent/events"}, {}, "", 2, {"/nonexistent/events"}},
      {{"--config", "/nonexistent/run.toml"}, {}, "", 2, {"/nonexistent/run.toml"}},
      {{}, {"DILOCO_SYNC_EVRY=3"}, "", 2, {"DILOCO_SYNC_EVRY", "DILOCO_SYNC_EVERY"}},
      {{"--config", toml}, {}, "sync_every = 5\nmin_quorum = = 2\n", 2, {"bad.toml", "2"}},
      {{"--config", toml}, {}, "sync_every = 5\nsync_evry = 6\n", 2, {"bad.toml:2", "sync_every"}},
  };
  for (const BadCase& bad : cases) {
    std::ofstream(toml) << bad.toml;
    std::vector<std::string> arguments = bad.arguments;
    if (std::find(arguments.begin(), arguments.end(), "--bind") == arguments.end()) {
      arguments.insert(arguments.end(), {"--bind", "127.0.0.1:0"});
    }
    Child child(program(arguments), bad.environment);
    EXPECT_EQ(child.wait(), bad.status) << child.out() << child.err();
    for (const std::string& text : bad.says) EXPECT_NE(child.err().find(text), std::string::npos) << text << " in " << child.err();
    EXPECT_EQ(child.out(), "");
  }
}

TEST(SyncerProgram, PortInUseIsTroubleWithThePort) {
  Child first(program({"--bind", "127.0.0.1:0"}));
  const std::string endpoint = endpoint_of(first);
  const std::string port = endpoint.substr(endpoint.rfind(':') + 1);
  Child second(program({"--bind", "127.0.0.1:" + port}));
  EXPECT_EQ(second.wait(), 1);
  EXPECT_NE(second.err().find(port), std::string::npos) << second.err();
}

TEST(SyncerProgram, ManyAtOnceEachGetTheirOwnPort) {
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < 8; ++i) children.push_back(std::make_unique<Child>(program({"--bind", "127.0.0.1:0"})));
  std::vector<std::string> endpoints;
  for (auto& child : children) endpoints.push_back(endpoint_of(*child));
  std::sort(endpoints.begin(), endpoints.end());
  EXPECT_EQ(std::unique(endpoints.begin(), endpoints.end()), endpoints.end());
}

TEST(SyncerProgram, EndsWithItsParentWhenAsked) {
  const ScratchDir dir;
  const std::string endpoint_file = dir.path() + "/endpoint";
  const pid_t parent = ::fork();
  if (parent == 0) {
    if (::fork() == 0) {
      ::execl(DILOCO_SYNCER_PROGRAM, DILOCO_SYNCER_PROGRAM, "--bind", "127.0.0.1:0", "--endpoint-file",
              endpoint_file.c_str(), "--die-with-parent", static_cast<char*>(nullptr));
      ::_exit(127);
    }
    while (true) ::pause();
  }
  std::string endpoint;
  for (int i = 0; i < 15000 && endpoint.empty(); ++i) {
    std::ifstream(endpoint_file) >> endpoint;
    ::usleep(2000);
  }
  ASSERT_FALSE(endpoint.empty());
  EXPECT_NO_THROW(query_status(endpoint, 20.0));
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  bool gone = false;
  for (int i = 0; i < 1000 && !gone; ++i) {
    try {
      query_status(endpoint, 0.2);
    } catch (const TransportError&) {
      gone = true;
    }
  }
  EXPECT_TRUE(gone);
}

}  // namespace
}  // namespace diloco
