// What the kernel knows of a TCP connection that libzmq reads. Private to the ZeroMQ transport.
#pragma once

#include <cstdint>
#include <optional>

namespace diloco::zmq_detail {

// Bytes taken from this socket by its reader since the connection began; nullopt if the kernel does not tell. Never
// more than the truth.
std::optional<std::uint64_t> tcp_bytes_read(int fd);

}  // namespace diloco::zmq_detail
