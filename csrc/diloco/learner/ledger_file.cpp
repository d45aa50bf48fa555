#include "diloco/learner/ledger_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

constexpr std::size_t kHeader = 128;
constexpr std::size_t kEntry = 32;
constexpr std::size_t kGrowth = 64 * 1024;
// Address space, not memory: the mapping never moves, and pages exist only once the file has grown over them.
constexpr std::size_t kReserved = std::size_t{1} << 32;

enum Field : std::size_t { kMagic = 0, kIncarnation = 8, kTokens = 16, kFragments = 24, kEntries = 32, kState = 40, kPid = 48 };

// A learner id is any text; a file name is not.
std::string safe_name(const std::string& learner_id) {
  std::string name = learner_id;
  std::replace(name.begin(), name.end(), '/', '_');
  std::replace(name.begin(), name.end(), '\0', '_');
  return name;
}

class MappedLedger final : public LedgerFile {
 public:
  MappedLedger(std::string path, const std::string& learner_id, Incarnation incarnation, std::uint64_t pid)
      : path_(std::move(path)) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd_ < 0 || !grow_to(kGrowth)) fail("create");
    void* mapped = ::mmap(nullptr, kReserved, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (mapped == MAP_FAILED) fail("map");
    base_ = static_cast<std::byte*>(mapped);
    store(kIncarnation, incarnation);
    store(kPid, pid);
    std::memcpy(base_ + 64, learner_id.data(), std::min<std::size_t>(learner_id.size(), 64));
    store(kMagic, magic());  // last: a file with the magic has a whole header
  }

  ~MappedLedger() override {
    if (base_ != nullptr) ::munmap(base_, kReserved);
    if (fd_ >= 0) ::close(fd_);
  }

  void set_fragments(std::uint64_t fragments) override { store(kFragments, fragments); }
  void progress(std::uint64_t tokens) override { store(kTokens, tokens); }

  void discard(FragmentId fragment, std::uint64_t from, std::uint64_t to, DiscardReason reason) override {
    const std::size_t at = kHeader + entries_ * kEntry;
    // Beyond what was allocated a store would raise SIGBUS on a full disk. The entry is then missing, which the audit
    // reports as a gap.
    if (at + kEntry > size_ && !grow_to(size_ + kGrowth)) return;
    const std::uint64_t entry[4] = {fragment, from, to, static_cast<std::uint64_t>(reason)};
    std::memcpy(base_ + at, entry, kEntry);
    store(kEntries, ++entries_);  // after the entry: a reader never counts half of one
  }

  void close() override { store(kState, 1); }
  std::string path() const override { return path_; }

 private:
  static std::uint64_t magic() {
    std::uint64_t value;
    std::memcpy(&value, "DLCOLED1", 8);
    return value;
  }

  void store(std::size_t offset, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(base_ + offset))
        .store(value, std::memory_order_release);
  }

  bool grow_to(std::size_t bytes) {
    if (bytes > kReserved) return false;
    const int error = ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
    if (error != 0) {
      errno = error;
      return false;
    }
    size_ = bytes;
    return true;
  }

  [[noreturn]] void fail(const char* what) {
    const int error = errno;
    if (fd_ >= 0) {
      ::close(fd_);
      ::unlink(path_.c_str());
    }
    throw ConfigError(fmt::format("ledger_dir: cannot {} '{}': {}; name a directory that exists and can be written",
                                  what, path_, std::strerror(error)));
  }

  const std::string path_;
  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t entries_ = 0;
};

}  // namespace

std::unique_ptr<LedgerFile> LedgerFile::create(const std::string& dir, const std::string& learner_id,
                                               Incarnation incarnation, std::uint64_t pid) {
  return std::make_unique<MappedLedger>(fmt::format("{}/{}.{:016x}.ledger", dir, safe_name(learner_id), incarnation),
                                        learner_id, incarnation, pid);
}

}  // namespace diloco
