// What one peer still has to be sent, bounded whatever the peer does: per fragment at most the transfer being sent and
// the newest waiting one. The transfer being sent is finished, then the oldest waiting one follows. Chunks leave as the
// receiver's credit allows.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "diloco/core/credit.h"
#include "diloco/merge/merge.h"
#include "diloco/wire/frame.h"
#include "diloco/wire/messages.h"

namespace diloco {

struct Transfer {
  FragmentId fragment = 0;
  PayloadKind kind = PayloadKind::kImage;
  Version version;
  std::shared_ptr<const std::string> begin;  // encoded Begin
  Image image;                               // bytes, or
  std::uint64_t total = 0;                   // without bytes: `read` makes them chunk by chunk
  std::function<void(std::uint64_t offset, std::span<std::byte> out)> read;
  std::uint64_t tag = 0;                     // the owner's
};

class Outbox {
 public:
  void reset(std::uint64_t granted, std::uint64_t window = std::numeric_limits<std::uint64_t>::max());
  // Queues a transfer; replaces a waiting one of the same fragment and kind in its place in the queue. Returns the tag
  // of the replaced one.
  std::optional<std::uint64_t> push(Transfer transfer);
  // Forgets what waits of this fragment; the transfer that has begun goes on.
  void drop(FragmentId fragment);
  void grant(std::uint64_t total, std::uint64_t received = 0) { credit_.grant(total, received); }

  struct Finished {
    std::uint64_t tag = 0;
    std::uint64_t end = 0;  // bytes_sent() at its end
  };
  struct Batch {
    std::vector<OutFrame> frames;
    std::vector<Finished> finished;
  };
  // Frames that the credit lets out now: BEGIN, then CHUNKs. `header` is the template (session, epoch, incarnation).
  Batch take(const Header& header, std::uint64_t chunk_bytes);

  bool idle() const { return !sending_ && waiting_.empty(); }
  std::size_t waiting() const { return waiting_.size(); }
  std::uint64_t bytes_sent() const { return credit_.sent(); }
  const Transfer* sending() const { return sending_ ? &*sending_ : nullptr; }

 private:
  std::deque<Transfer> waiting_;
  std::optional<Transfer> sending_;
  std::uint64_t offset_ = 0;
  std::uint64_t next_id_ = 1;
  SenderCredit credit_;
};

}  // namespace diloco
