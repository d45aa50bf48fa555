#include "diloco/syncer/event_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "diloco/base/errors.h"

namespace diloco {

std::uint64_t highest_epoch(const std::string& path) {
  std::uint64_t highest = 0;
  std::error_code none;
  if (!std::filesystem::is_regular_file(path, none)) return 0;  // a pipe would be waited on for ever
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.find("\"event\":\"epoch\"") == std::string::npos) continue;
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded()) continue;
    const auto epoch = json.find("epoch");
    if (epoch != json.end() && epoch->is_number_unsigned()) highest = std::max(highest, epoch->get<std::uint64_t>());
  }
  return highest;
}

EventLog::EventLog(const std::string& path) {
  if (path.empty()) return;
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    throw ConfigError("event log: cannot open '" + path + "' for appending: " + std::strerror(errno) +
                      "; name a file in a directory that exists and can be written");
  }
  // A predecessor killed in mid-write leaves a torn line; ours must not be glued to it.
  const off_t end = ::lseek(fd_, 0, SEEK_END);
  char last = '\n';
  torn_ = end > 0 && ::pread(fd_, &last, 1, end - 1) == 1 && last != '\n';
}

EventLog::~EventLog() {
  if (fd_ >= 0) ::close(fd_);
}

EventLog::EventLog(EventLog&& other) noexcept { *this = std::move(other); }

EventLog& EventLog::operator=(EventLog&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(torn_, other.torn_);
  std::swap(failures_, other.failures_);
  std::swap(last_error_, other.last_error_);
  return *this;
}

bool EventLog::append(const std::string& line) {
  if (fd_ < 0) return true;
  const std::string text = (torn_ ? "\n" : "") + line + "\n";
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      last_error_ = n < 0 ? std::strerror(errno) : "nothing could be written";
      torn_ = torn_ || done > 0;
      ++failures_;
      return false;
    }
    done += static_cast<std::size_t>(n);
  }
  torn_ = false;
  return true;
}

}  // namespace diloco
