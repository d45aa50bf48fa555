// A TCP connection below ZeroMQ, to say what no well-behaved peer says.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "diloco/base/clock.h"

namespace diloco::transport_test {

// ZMTP 3.0 with the NULL mechanism, as a DEALER.
inline std::string zmtp_greeting() {
  std::string greeting = "\xff" + std::string(8, '\0') + "\x7f" + std::string("\x03\x00", 2) + "NULL";
  greeting.resize(64, '\0');
  return greeting;
}
inline std::string zmtp_ready() {
  const std::string body = std::string("\x05READY\x0bSocket-Type\x00\x00\x00\x06" "DEALER", 6 + 12 + 4 + 6);
  return std::string("\x04", 1) + static_cast<char>(body.size()) + body;
}
inline std::string zmtp_frame(const std::string& body, bool more = false) {
  std::string frame(1, static_cast<char>(2 | (more ? 1 : 0)));
  for (int shift = 56; shift >= 0; shift -= 8) frame += static_cast<char>(std::uint64_t{body.size()} >> shift & 0xff);
  return frame + body;
}

class RawTcp {
 public:
  explicit RawTcp(const std::string& endpoint) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(std::stoul(endpoint.substr(endpoint.rfind(':') + 1))));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address);
    pollfd wait{fd_, POLLOUT, 0};
    ::poll(&wait, 1, 10000);
  }
  ~RawTcp() { close(); }
  RawTcp(const RawTcp&) = delete;
  RawTcp& operator=(const RawTcp&) = delete;

  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  // False once the other side has hung up.
  bool send(const std::string& bytes) {
    std::size_t sent = 0;
    while (sent < bytes.size()) {
      const auto n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n > 0) {
        sent += static_cast<std::size_t>(n);
        continue;
      }
      if (errno != EAGAIN) return false;
      pollfd wait{fd_, POLLOUT | POLLRDHUP, 0};
      if (::poll(&wait, 1, 5000) != 1 || (wait.revents & (POLLRDHUP | POLLHUP | POLLERR))) return false;
    }
    return true;
  }
  // True if the other side has closed the connection by now.
  bool closed() {
    char buffer[4096];
    for (;;) {
      const auto n = ::recv(fd_, buffer, sizeof buffer, 0);
      if (n > 0) {
        received_.append(buffer, static_cast<std::size_t>(n));
        continue;
      }
      return n == 0 || errno != EAGAIN;
    }
  }
  void wait_closed() {
    pollfd wait{fd_, POLLIN, 0};
    while (!closed()) ::poll(&wait, 1, 10000);
  }
  // Greets as a DEALER and waits for the answer: a frame sent earlier would be an error in itself.
  bool handshake(const std::string& ready = zmtp_ready()) {
    if (!send(zmtp_greeting() + ready)) return false;
    while (received_.find("READY") == std::string::npos) {
      pollfd wait{fd_, POLLIN, 0};
      if (::poll(&wait, 1, 10000) != 1 || closed()) return false;
    }
    return true;
  }

 private:
  int fd_;
  std::string received_;
};

}  // namespace diloco::transport_test
