// Asks a running syncer for its status, as `diloco status` does. Blocking; any thread.
#pragma once

#include <string>

#include "diloco/base/types.h"

namespace diloco {

// JSON text. Throws ConfigError for a malformed endpoint, TransportError if the name does not resolve, nobody listens,
// or no answer comes within `timeout`.
std::string query_status(const std::string& endpoint, Seconds timeout);

}  // namespace diloco
