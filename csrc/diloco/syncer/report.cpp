#include "diloco/syncer/report.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>

#include <nlohmann/json.hpp>

#include "diloco/base/errors.h"

namespace diloco {

std::uint64_t machine_memory_bytes() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::uint64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t total = 0, resident = 0;
  if (!(statm >> total >> resident)) return 0;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

namespace {

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string complete_status(const std::string& json, const TransportCounters& counters) {
  nlohmann::json status = nlohmann::json::parse(json, nullptr, false);
  if (!status.is_object()) return json;
  status["bytes"] = {{"in", counters.bytes_in}, {"out", counters.bytes_out}};
  status["cut"] = {{"malformed", counters.malformed}, {"endless", counters.endless}, {"unread", counters.unread}};
  if (!status["memory"].is_object()) status["memory"] = nlohmann::json::object();
  status["memory"]["rss_bytes"] = resident_bytes();
  status["time"] = wall_time();
  return status.dump();
}

std::string with_wall_time(const std::string& json) {
  nlohmann::json line = nlohmann::json::parse(json, nullptr, false);
  if (!line.is_object()) return json;
  line["time"] = wall_time();
  return line.dump();
}

void write_endpoint_file(const std::string& path, const std::string& endpoint) {
  const std::string draft = path + ".tmp." + std::to_string(::getpid());
  const std::string text = endpoint + "\n";
  const int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const bool written = fd >= 0 && ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  int error = errno;
  if (fd >= 0) ::close(fd);
  if (written && std::rename(draft.c_str(), path.c_str()) == 0) return;
  if (written) error = errno;
  ::unlink(draft.c_str());
  throw ConfigError("endpoint file: cannot write '" + path + "': " + std::strerror(error) +
                    "; name a file in a directory that exists and can be written");
}

}  // namespace diloco
