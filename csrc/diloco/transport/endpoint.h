// Endpoint texts taken apart, and names turned into IPv4 addresses. Private to the transports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace diloco {

struct Endpoint {
  std::string host;  // name, IPv4 address or "*"
  std::uint16_t port = 0;
  std::string canonical() const { return "tcp://" + host + ":" + std::to_string(port); }
};

// Throws ConfigError as parse_endpoint().
Endpoint split_endpoint(const std::string& text);
// The same for somewhere to connect to: a real host and a port.
Endpoint split_remote_endpoint(const std::string& text);
// Dotted IPv4 addresses of a host, resolver errors in `why`. May ask the network; empty if there are none.
std::vector<std::string> resolve_ipv4(const std::string& host, std::string* why);
// Throws TransportError if the name has no IPv4 address.
std::vector<std::string> require_ipv4(const std::string& host);

}  // namespace diloco
