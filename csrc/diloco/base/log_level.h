// How much a log line matters, and its name in the one line format.
#pragma once

#include <cstdint>

namespace diloco {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError };

inline const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "DEBUG";
    case LogLevel::kInfo: return "INFO";
    case LogLevel::kWarning: return "WARNING";
    case LogLevel::kError: return "ERROR";
  }
  return "ERROR";
}

}  // namespace diloco
