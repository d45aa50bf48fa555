// One line format for everything this project logs: "HH:MM:SS diloco LEVEL [who] text". Any thread; never throws and
// never waits: a line that a full stderr pipe cannot take is dropped, or an unread pipe would stop the I/O thread.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <string>

namespace diloco {

// `level`: "DEBUG", "INFO", "WARNING", "ERROR". Ends with a newline; newlines inside `text` become spaces.
inline std::string log_line(const std::string& level, const std::string& who, const std::string& text) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char stamp[16];
  std::strftime(stamp, sizeof(stamp), "%H:%M:%S", &local);
  std::string line = std::string(stamp) + " diloco " + level + " [" + who + "] " + text;
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  line.push_back('\n');
  return line;
}

// One write(2) per line, so that lines of several threads and processes do not mix.
inline void write_stderr(const std::string& line) {
  pollfd fd{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&fd, 1, 0) == 1 && (fd.revents & POLLOUT) != 0) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  }
}

}  // namespace diloco
