// The error taxonomy (csrc/README.md has the table).
//
// ConfigError: a wrong argument or setting; the message says what was expected, what came, and what to do.
// TransportError: the transport cannot do what was asked (port in use, name does not resolve).
// Everything recoverable is a value, never an exception.
#pragma once

#include <stdexcept>

namespace diloco {

struct ConfigError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct TransportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace diloco
