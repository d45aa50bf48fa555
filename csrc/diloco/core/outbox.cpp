#include "diloco/core/outbox.h"

#include <algorithm>

namespace diloco {

void Outbox::reset(std::uint64_t granted, std::uint64_t window) {
  waiting_.clear();
  sending_.reset();
  offset_ = 0;
  next_id_ = 1;
  credit_.reset(granted, window);
}

std::optional<std::uint64_t> Outbox::push(Transfer transfer) {
  for (auto& waiting : waiting_) {
    if (waiting.fragment == transfer.fragment && waiting.kind == transfer.kind) {
      const std::uint64_t replaced = waiting.tag;
      waiting = std::move(transfer);
      return replaced;
    }
  }
  waiting_.push_back(std::move(transfer));
  return std::nullopt;
}

void Outbox::drop(FragmentId fragment) {
  std::erase_if(waiting_, [&](const Transfer& waiting) { return waiting.fragment == fragment; });
}

Outbox::Batch Outbox::take(const Header& header, std::uint64_t chunk_bytes) {
  Batch batch;
  while (true) {
    if (!sending_) {
      if (waiting_.empty()) return batch;
      sending_ = std::move(waiting_.front());
      waiting_.pop_front();
      offset_ = 0;
      OutFrame begin;
      begin.header = header;
      begin.header.type = MessageType::kBegin;
      begin.header.fragment = sending_->fragment;
      begin.header.version = sending_->version;
      begin.header.transfer = next_id_;
      begin.header.total = sending_->total;
      begin.body = *sending_->begin;
      batch.frames.push_back(std::move(begin));
    }
    while (offset_ < sending_->total) {
      const std::uint64_t size = std::min(chunk_bytes, sending_->total - offset_);
      if (!credit_.allows(size)) return batch;
      OutFrame chunk;
      chunk.header = header;
      chunk.header.type = MessageType::kChunk;
      chunk.header.fragment = sending_->fragment;
      chunk.header.version = sending_->version;
      chunk.header.transfer = next_id_;
      chunk.header.offset = offset_;
      chunk.header.total = sending_->total;
      if (sending_->image.bytes) {
        chunk.slice = {sending_->image.bytes, offset_, size};
        if (sending_->image.chunk_bytes == chunk_bytes) {
          chunk.header.checksum = sending_->image.checksums.at(offset_ / chunk_bytes);
          chunk.checksum_known = true;
        }
      } else {
        auto copy = Buffer::make(size);
        sending_->read(offset_, {copy->data(), size});
        chunk.slice = {std::move(copy), 0, size};
      }
      credit_.spend(size);
      offset_ += size;
      batch.frames.push_back(std::move(chunk));
    }
    batch.finished.push_back({sending_->tag, credit_.sent()});
    sending_.reset();
    ++next_id_;
  }
}

}  // namespace diloco
