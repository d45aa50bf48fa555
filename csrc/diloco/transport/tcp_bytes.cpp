#include "diloco/transport/tcp_bytes.h"

// Not <netinet/tcp.h>: its tcp_info ends before the byte counts.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>

namespace diloco::zmq_detail {

std::optional<std::uint64_t> tcp_bytes_read(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  if (size < offsetof(tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received) return std::nullopt;
  int unread = 0;  // asked second: what comes in between makes the answer smaller
  if (::ioctl(fd, FIONREAD, &unread) != 0) return std::nullopt;
  const std::uint64_t received = info.tcpi_bytes_received;
  return received - std::min<std::uint64_t>(received, static_cast<std::uint64_t>(std::max(unread, 0)));
}

}  // namespace diloco::zmq_detail
