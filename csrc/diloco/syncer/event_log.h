// Append-only file of JSON lines: everything the syncer decided. One owner (the I/O thread). A line reaches the kernel
// before append() returns, so it survives the process; it does not wait for the disk.
#pragma once

#include <cstdint>
#include <string>

namespace diloco {

// The highest epoch any earlier life of the syncer recorded in this log; 0 if there is none. Torn and foreign lines are
// skipped. Epochs that only the log remembers must not be used again, or two lives' versions could not be told apart.
std::uint64_t highest_epoch(const std::string& path);

class EventLog {
 public:
  EventLog() = default;                       // writes nothing
  explicit EventLog(const std::string& path);  // throws ConfigError if the file cannot be opened for appending
  ~EventLog();
  EventLog(EventLog&& other) noexcept;
  EventLog& operator=(EventLog&& other) noexcept;

  // Adds a newline. False if the line could not be written whole; the reason is in last_error().
  bool append(const std::string& line);
  std::uint64_t failures() const { return failures_; }
  const std::string& last_error() const { return last_error_; }

 private:
  int fd_ = -1;
  bool torn_ = false;  // the file ends in part of a line
  std::uint64_t failures_ = 0;
  std::string last_error_;
};

}  // namespace diloco
