// What `diloco doctor` asks a running syncer before a learner joins. Blocking; any thread.
//
// All throw ConfigError for a malformed endpoint, TransportError if the name does not resolve, nobody listens, the
// connection ends, or no answer comes within `timeout`.
#pragma once

#include <optional>
#include <string>

#include "diloco/base/types.h"
#include "diloco/wire/messages.h"

namespace diloco {

struct LinkProbe {
  Seconds round_trip_s = 0.0;      // median of several messages without bytes
  double up_bytes_per_s = 0.0;     // to the syncer, by the distance of the answers: no round trip is in it
  double down_bytes_per_s = 0.0;
  std::uint64_t up_bytes = 0, down_bytes = 0;  // moved for it
  Seconds waited_s = 0.0;          // because the syncer said not now
};

// Measures the way to the syncer and back over a connection like a learner's. Both rates are what one connection really
// moved, so at least so much can be had. At most 14 MiB each way, at most a second or so each.
LinkProbe probe_link(const std::string& endpoint, Seconds timeout);

// Layout, plan, settings and versions of the run; nullopt if no learner has joined yet. Nothing is joined.
std::optional<Welcome> ask_run(const std::string& endpoint, Seconds timeout);

struct ProtocolAnswer {
  std::uint16_t protocol = 0;  // of the syncer
  Reject reject;               // what it says to a peer of ours
};
// Asks in the one way that every protocol version understands, a HELLO, of the reserved role monitor: it is refused. For
// when nothing else is answered; the refusal is in the syncer's log.
ProtocolAnswer ask_protocol(const std::string& endpoint, Seconds timeout);

}  // namespace diloco
