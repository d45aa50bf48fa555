#include "diloco/learner/ledger_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "diloco/base/errors.h"
#include "scratch_dir.h"

namespace diloco {
namespace {

using testing::ScratchDir;

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::uint64_t u64(const std::string& bytes, std::size_t at) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + at, 8);
  return value;
}

TEST(LedgerFile, HasTheDocumentedFormat) {
  const ScratchDir dir;
  const auto ledger = LedgerFile::create(dir.path(), "left", 0x1234, 77);
  EXPECT_EQ(ledger->path(), dir.path() + "/left.0000000000001234.ledger");
  ledger->set_fragments(3);
  ledger->progress(500);
  ledger->discard(2, 100, 250, DiscardReason::kCarryLimit);
  const std::string running = contents(ledger->path());
  EXPECT_EQ(running.substr(0, 8), "DLCOLED1");
  EXPECT_EQ(u64(running, 8), 0x1234u);
  EXPECT_EQ(u64(running, 16), 500u);
  EXPECT_EQ(u64(running, 24), 3u);
  EXPECT_EQ(u64(running, 32), 1u);
  EXPECT_EQ(u64(running, 40), 0u);
  EXPECT_EQ(u64(running, 48), 77u);
  EXPECT_EQ(running.substr(64, 5), std::string("left\0", 5));
  EXPECT_EQ(u64(running, 128), 2u);
  EXPECT_EQ(u64(running, 136), 100u);
  EXPECT_EQ(u64(running, 144), 250u);
  EXPECT_EQ(u64(running, 152), static_cast<std::uint64_t>(DiscardReason::kCarryLimit));
  ledger->close();
  EXPECT_EQ(u64(contents(ledger->path()), 40), 1u);
}

TEST(LedgerFile, GrowsWithoutLosingEntries) {
  const ScratchDir dir;
  const auto ledger = LedgerFile::create(dir.path(), "l", 1, 1);
  constexpr std::uint64_t kEntries = 20000;  // several growth steps
  for (std::uint64_t i = 0; i < kEntries; ++i) ledger->discard(i % 5, i, i + 1, DiscardReason::kBlended);
  const std::string bytes = contents(ledger->path());
  ASSERT_EQ(u64(bytes, 32), kEntries);
  for (std::uint64_t i = 0; i < kEntries; ++i) {
    ASSERT_EQ(u64(bytes, 128 + 32 * i), i % 5);
    ASSERT_EQ(u64(bytes, 128 + 32 * i + 8), i);
  }
}

TEST(LedgerFile, SurvivesSigkill) {
  const ScratchDir dir;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto ledger = LedgerFile::create(dir.path(), "victim", 9, 9);
    ledger->set_fragments(1);
    for (std::uint64_t x = 1; x <= 1000; ++x) ledger->progress(x);
    ledger->discard(0, 10, 20, DiscardReason::kOverwritten);
    ::kill(::getpid(), SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const std::string bytes = contents(dir.path() + "/victim.0000000000000009.ledger");
  EXPECT_EQ(u64(bytes, 16), 1000u);
  EXPECT_EQ(u64(bytes, 32), 1u);
  EXPECT_EQ(u64(bytes, 136), 10u);
  EXPECT_EQ(u64(bytes, 40), 0u) << "killed, not closed";
}

TEST(LedgerFile, UnwritableDirectoryIsNamed) {
  try {
    LedgerFile::create("/proc/nowhere", "l", 1, 1);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("/proc/nowhere"), std::string::npos) << error.what();
  }
}

TEST(LedgerFile, LearnerIdCannotLeaveTheDirectory) {
  const ScratchDir dir;
  const auto ledger = LedgerFile::create(dir.path(), "../rack1/host", 1, 1);
  EXPECT_EQ(std::filesystem::path(ledger->path()).parent_path(), dir.path());
  EXPECT_EQ(contents(ledger->path()).substr(64, 13), "../rack1/host");
}

}  // namespace
}  // namespace diloco
