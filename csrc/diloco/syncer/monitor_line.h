// One connection to a running syncer, of somebody who only asks: no HELLO, no session. Blocking; one thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diloco/base/clock.h"
#include "diloco/transport/transport.h"

namespace diloco {

class MonitorLine {
 public:
  // Connects. Throws ConfigError for a malformed endpoint, TransportError if the name does not resolve, nobody listens,
  // or the connection does not stand before `deadline`.
  MonitorLine(const std::string& endpoint, TimePoint deadline);
  ~MonitorLine();
  MonitorLine(const MonitorLine&) = delete;

  void send(OutFrame frame);
  // The next frame of one of these types, others are left out; nullopt once `deadline` has passed. TransportError if the
  // connection ends.
  std::optional<InFrame> next(std::initializer_list<MessageType> types, TimePoint deadline);
  const std::string& endpoint() const { return endpoint_; }  // canonical

 private:
  void wait(TimePoint deadline);

  const std::string endpoint_;
  std::unique_ptr<ClientTransport> transport_;
  std::vector<TransportEvent> events_;
  std::size_t at_ = 0;  // of the next event
};

}  // namespace diloco
