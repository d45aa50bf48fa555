#include "diloco/transport/endpoint.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "diloco/base/errors.h"
#include "diloco/transport/transport.h"

namespace diloco {
namespace {

constexpr const char* kForm = "expected HOST:PORT, for example 127.0.0.1:29400";

bool is_host_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
}

[[noreturn]] void refuse(std::string text, const std::string& problem) {
  std::replace(text.begin(), text.end(), '\0', '?');
  throw ConfigError(std::string(kForm) + "; got '" + text + "': " + problem);
}

std::uint16_t parse_port(const std::string& text, const std::string& port) {
  const bool digits = !port.empty() && port.size() <= 5 &&
                      std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoul(port) > 65535) refuse(text, "the port must be a number from 0 to 65535");
  return static_cast<std::uint16_t>(std::stoul(port));
}

}  // namespace

Endpoint split_endpoint(const std::string& text) {
  std::string rest = text;
  if (const auto scheme = rest.find("://"); scheme != std::string::npos) {
    if (rest.substr(0, scheme) != "tcp") refuse(text, "only tcp:// is supported");
    rest = rest.substr(scheme + 3);
  }
  if (rest.find('[') != std::string::npos || std::count(rest.begin(), rest.end(), ':') > 1) {
    refuse(text, "IPv6 addresses are not supported; use an IPv4 address or a host name");
  }
  const auto colon = rest.find(':');
  if (colon == std::string::npos) refuse(text, "the port is missing");
  Endpoint endpoint;
  endpoint.host = rest.substr(0, colon);
  if (endpoint.host.empty()) refuse(text, "the host is missing");
  if (endpoint.host.size() > 253 ||
      (endpoint.host != "*" && !std::all_of(endpoint.host.begin(), endpoint.host.end(), is_host_character))) {
    refuse(text, "the host has characters that no name or address has");
  }
  endpoint.port = parse_port(text, rest.substr(colon + 1));
  return endpoint;
}

Endpoint split_remote_endpoint(const std::string& text) {
  Endpoint endpoint = split_endpoint(text);
  if (endpoint.host == "*" || endpoint.host == "0.0.0.0") {
    refuse(text, "'" + endpoint.host + "' is an address to bind, not one to connect to");
  }
  if (endpoint.port == 0) refuse(text, "port 0 is for bind; give the port the syncer printed");
  return endpoint;
}

std::vector<std::string> resolve_ipv4(const std::string& host, std::string* why) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (rc != 0) {
    if (why) *why = ::gai_strerror(rc);
    return {};
  }
  std::vector<std::string> addresses;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    char text[INET_ADDRSTRLEN] = {};
    const auto* in = reinterpret_cast<const sockaddr_in*>(a->ai_addr);
    if (::inet_ntop(AF_INET, &in->sin_addr, text, sizeof text)) addresses.emplace_back(text);
  }
  ::freeaddrinfo(found);
  return addresses;
}

std::vector<std::string> require_ipv4(const std::string& host) {
  std::string why = "no IPv4 address";
  std::vector<std::string> addresses = resolve_ipv4(host, &why);
  if (addresses.empty()) {
    throw TransportError("cannot resolve host name '" + host + "' (" + why +
                         "); check the spelling, or give its IPv4 address");
  }
  return addresses;
}

std::string parse_endpoint(const std::string& text) { return split_endpoint(text).canonical(); }

bool is_loopback_endpoint(const std::string& canonical) {
  const Endpoint endpoint = split_endpoint(canonical);
  if (endpoint.host == "*") return false;
  const std::vector<std::string> addresses = resolve_ipv4(endpoint.host, nullptr);
  return !addresses.empty() && std::all_of(addresses.begin(), addresses.end(), [](const std::string& address) {
    return address.rfind("127.", 0) == 0;
  });
}

}  // namespace diloco
