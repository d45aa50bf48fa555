// In-process network with scripted faults. One InprocNetwork joins servers and clients of one process; every method is
// thread-safe. Time is real (monotonic) so that the same suite runs over both transports.
#pragma once

#include <memory>
#include <string>

#include "diloco/transport/transport.h"

namespace diloco {

class InprocNetwork : public std::enable_shared_from_this<InprocNetwork> {
 public:
  static std::shared_ptr<InprocNetwork> make();
  virtual ~InprocNetwork() = default;

  virtual std::unique_ptr<ServerTransport> server(const TransportLimits& limits) = 0;
  virtual std::unique_ptr<ClientTransport> client(const std::string& endpoint, const TransportLimits& limits) = 0;

  // Script. `client_name` is the name given to name_next_client(), or every client if "".
  virtual void name_next_client(const std::string& name) = 0;
  virtual void set_delay(const std::string& client_name, Seconds one_way) = 0;
  virtual void set_bandwidth(const std::string& client_name, double bytes_per_s) = 0;  // 0 = unlimited
  virtual void partition(const std::string& client_name, bool cut_off) = 0;  // frames held, nobody told
  virtual void reset(const std::string& client_name) = 0;                    // connection reset, both sides told
  // Raw bytes from a stranger: what a server sees when the frame does not decode.
  virtual void inject_raw(const std::string& endpoint, std::string bytes) = 0;
};

}  // namespace diloco
