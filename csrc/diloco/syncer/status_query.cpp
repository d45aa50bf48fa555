#include "diloco/syncer/status_query.h"

#include <fmt/format.h>

#include <memory>
#include <variant>
#include <vector>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/transport/transport.h"

namespace diloco {

std::string query_status(const std::string& endpoint, Seconds timeout) {
  const std::string canonical = parse_endpoint(endpoint);
  TransportLimits limits;
  limits.linger_s = 0.0;
  const auto transport = make_zmq_client(canonical, limits);
  transport->connect(Channel::kControl);
  const TimePoint deadline = monotonic_now() + timeout;
  std::vector<TransportEvent> events;
  for (TimePoint now = monotonic_now(); now < deadline; now = monotonic_now()) {
    events.clear();
    transport->poll(deadline - now, &events);
    for (const TransportEvent& event : events) {
      if (std::holds_alternative<Connected>(event)) {
        OutFrame ask;
        ask.header.type = MessageType::kStatus;
        transport->send(Channel::kControl, std::move(ask));
      } else if (const auto* down = std::get_if<Disconnected>(&event)) {
        transport->close();
        throw TransportError(fmt::format("no syncer answers at {}: {}; is diloco-syncer running there?", canonical,
                                         down->why.empty() ? "connection lost" : down->why));
      } else if (const auto* frame = std::get_if<InFrame>(&event)) {
        if (frame->header.type != MessageType::kStatusReply) continue;
        std::string text(reinterpret_cast<const char*>(frame->payload.data()), frame->payload.size());
        transport->close();
        return text;
      }
    }
  }
  transport->close();
  throw TransportError(fmt::format("no answer within {:g} s from {}; is a diloco syncer listening there?", timeout,
                                   canonical));
}

}  // namespace diloco
