// The learner's own account, exact to the token and surviving SIGKILL: a memory-mapped file
// <dir>/<learner_id>.<incarnation as 16 hex digits>.ledger. Training thread only.
//
// Format (little-endian), readable without this package (tools: diloco/audit.py, docs/operations.md):
//   0   8  magic "DLCOLED1"          8  8  incarnation         16  8  tokens x (updated in place)
//   24  8  fragments P (0 unknown)   32  8  journal entries n   40  8  state: 0 running, 1 closed
//   48  8  pid                       56  8  reserved            64 64  learner id, zero-padded
//   128 ..  n entries of 32 bytes: u64 fragment, u64 from, u64 to, u64 reason (DiscardReason)
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "diloco/base/types.h"
#include "diloco/wire/messages.h"

namespace diloco {

class LedgerFile {
 public:
  // Throws ConfigError if the directory cannot be written.
  static std::unique_ptr<LedgerFile> create(const std::string& dir, const std::string& learner_id,
                                            Incarnation incarnation, std::uint64_t pid);
  virtual ~LedgerFile() = default;
  virtual void set_fragments(std::uint64_t fragments) = 0;
  virtual void progress(std::uint64_t tokens) = 0;
  virtual void discard(FragmentId fragment, std::uint64_t from, std::uint64_t to, DiscardReason reason) = 0;
  virtual void close() = 0;
  virtual std::string path() const = 0;
};

}  // namespace diloco
