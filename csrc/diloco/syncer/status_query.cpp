#include "diloco/syncer/status_query.h"

#include <fmt/format.h>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/syncer/monitor_line.h"

namespace diloco {

std::string query_status(const std::string& endpoint, Seconds timeout) {
  const TimePoint deadline = monotonic_now() + timeout;
  MonitorLine line(endpoint, deadline);
  OutFrame ask;
  ask.header.type = MessageType::kStatus;
  line.send(std::move(ask));
  if (const auto reply = line.next({MessageType::kStatusReply}, deadline)) {
    return {reinterpret_cast<const char*>(reply->payload.data()), reply->payload.size()};
  }
  throw TransportError(fmt::format("no answer within {:g} s from {}; is a diloco syncer listening there?", timeout,
                                   line.endpoint()));
}

}  // namespace diloco
