#include "diloco/core/reassembly.h"

#include <cstring>

#include <fmt/format.h>

namespace diloco {

Reassembly::Outcome Reassembly::begin(const Header& header, const Begin& begin, std::uint64_t expected_bytes,
                                      bool keep, Sink sink) {
  if (open_) {
    return {fmt::format("BEGIN of transfer {} while transfer {} is at byte {} of {}", header.transfer, transfer_, at_,
                        total_), {}, {}};
  }
  if (header.transfer <= last_transfer_) {
    return {fmt::format("BEGIN repeats transfer {}; the last one was {}", header.transfer, last_transfer_), {}, {}};
  }
  if (header.total != expected_bytes) {
    return {fmt::format("BEGIN announces {} bytes for fragment {}; the plan says {}", header.total, begin.fragment,
                        expected_bytes), {}, {}};
  }
  transfer_ = last_transfer_ = header.transfer;
  total_ = header.total;
  at_ = 0;
  open_ = begin;
  sink_ = keep ? std::move(sink) : Sink();
  bytes_ = keep && !sink_ ? Buffer::make(total_) : nullptr;
  return total_ == 0 ? finish() : Outcome{};
}

Reassembly::Outcome Reassembly::chunk(const Header& header, std::span<const std::byte> payload) {
  if (!open_) return {"CHUNK without BEGIN", {}, {}};
  if (header.transfer != transfer_) {
    return {fmt::format("CHUNK of transfer {} inside transfer {}", header.transfer, transfer_), {}, {}};
  }
  if (header.offset != at_) return {fmt::format("CHUNK at byte {}; expected {}", header.offset, at_), {}, {}};
  if (header.total != total_) return {fmt::format("CHUNK changes the total from {} to {}", total_, header.total), {}, {}};
  if (payload.empty()) return {"empty CHUNK", {}, {}};
  if (payload.size() > total_ - at_) {
    return {fmt::format("CHUNK of {} bytes runs over the end: {} of {} are in", payload.size(), at_, total_), {}, {}};
  }
  if (sink_) sink_(at_, payload);
  if (bytes_) std::memcpy(bytes_->data() + at_, payload.data(), payload.size());
  at_ += payload.size();
  return at_ == total_ ? finish() : Outcome{};
}

Reassembly::Outcome Reassembly::finish() {
  Outcome outcome{{}, std::move(open_), std::move(bytes_)};
  open_.reset();
  bytes_.reset();
  sink_ = {};
  return outcome;
}

void Reassembly::reset() {
  open_.reset();
  bytes_.reset();
  sink_ = {};
  last_transfer_ = 0;
}

}  // namespace diloco
