#include "diloco/syncer/monitor_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <variant>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

std::unique_ptr<ClientTransport> client(const std::string& endpoint) {
  TransportLimits limits;
  limits.linger_s = 0.0;
  return make_zmq_client(endpoint, limits);
}

}  // namespace

MonitorLine::MonitorLine(const std::string& endpoint, TimePoint deadline)
    : endpoint_(parse_endpoint(endpoint)), transport_(client(endpoint_)) {
  transport_->connect(Channel::kControl);
  const TimePoint start = monotonic_now();
  while (monotonic_now() < deadline) {
    wait(deadline);
    for (; at_ < events_.size(); ++at_) {
      if (std::holds_alternative<Connected>(events_[at_])) return;
      if (const auto* down = std::get_if<Disconnected>(&events_[at_])) {
        throw TransportError(fmt::format("no syncer answers at {}: {}; is diloco-syncer running there?", endpoint_,
                                         down->why.empty() ? "connection lost" : down->why));
      }
    }
  }
  throw TransportError(fmt::format("no answer within {:.3g} s from {}; is a diloco syncer listening there?",
                                   std::max(0.0, deadline - start), endpoint_));
}

MonitorLine::~MonitorLine() { transport_->close(); }

void MonitorLine::send(OutFrame frame) { static_cast<void>(transport_->send(Channel::kControl, std::move(frame))); }

// Leaves events_ with what is new.
void MonitorLine::wait(TimePoint deadline) {
  events_.clear();
  at_ = 0;
  transport_->poll(std::max(0.0, deadline - monotonic_now()), &events_);
}

std::optional<InFrame> MonitorLine::next(std::initializer_list<MessageType> types, TimePoint deadline) {
  for (;;) {
    while (at_ < events_.size()) {
      TransportEvent& event = events_[at_++];
      if (auto* frame = std::get_if<InFrame>(&event)) {
        if (std::find(types.begin(), types.end(), frame->header.type) != types.end()) return std::move(*frame);
      } else if (const auto* down = std::get_if<Disconnected>(&event)) {
        throw TransportError(fmt::format("no syncer answers at {}: {}; is diloco-syncer running there?", endpoint_,
                                         down->why.empty() ? "connection lost" : down->why));
      }
    }
    if (monotonic_now() >= deadline) return std::nullopt;
    wait(deadline);
  }
}

}  // namespace diloco
