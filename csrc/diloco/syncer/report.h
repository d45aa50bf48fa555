// What only the shell of the syncer knows about the machine, and the texts it writes for others.
#pragma once

#include <cstdint>
#include <string>

#include "diloco/transport/transport.h"

namespace diloco {

std::uint64_t machine_memory_bytes();
std::uint64_t resident_bytes();  // of this process
// Adds what the core cannot know: bytes {in, out}, cut, memory.rss_bytes, and time, seconds since 1970. Text that is no
// JSON object comes back as it is.
std::string complete_status(const std::string& json, const TransportCounters& counters);
// Adds time, seconds since 1970, to the first line of an event log: the core has no clock of its own.
std::string with_wall_time(const std::string& json);
// Written under another name and renamed, so that a reader sees all of it or nothing. Throws ConfigError.
void write_endpoint_file(const std::string& path, const std::string& endpoint);

}  // namespace diloco
