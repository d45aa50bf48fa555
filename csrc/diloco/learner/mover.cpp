#include "diloco/learner/mover.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "diloco/codec/codec.h"

namespace diloco {
namespace {

constexpr std::uint64_t kAlignFloats = 16;  // 64 bytes

}  // namespace

Mover::Mover(std::shared_ptr<ParameterStore> store) : store_(std::move(store)) { grow(); }

std::size_t Mover::grow() {
  const Layout& layout = store_->layout();
  check_layout(layout);
  const auto known = static_cast<std::uint32_t>(anchor_of_.size());
  std::vector<std::uint64_t> offsets;
  std::uint64_t next = 0;
  for (std::uint32_t i = known; i < layout.tensors.size(); ++i) {
    const TensorSpec& spec = layout.tensors[i];
    const std::uint64_t n = spec.numel();
    offsets.push_back(next);
    next += (n + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    largest_ = std::max(largest_, n);
    index_.emplace(spec.name, i);
  }
  for (std::uint32_t i = known; i < layout.tensors.size(); ++i) {
    for (const std::string& alias : layout.tensors[i].aliases) index_.emplace(alias, i);
  }
  next_scratch_.reset();  // the largest tensor may be another
  sent_scratch_.reset();
  float* first = anchors_.emplace_back(Buffer::make(next * sizeof(float)))->f32();
  const std::lock_guard lock(anchor_mutex_);
  for (std::uint32_t i = known; i < layout.tensors.size(); ++i) {
    anchor_of_.push_back({first + offsets[i - known], layout.tensors[i].numel()});
    store_->read(i, anchor(i));
  }
  return known;
}

std::uint64_t Mover::anchor_bytes() const {
  std::uint64_t bytes = 0;
  for (const BufferPtr& anchors : anchors_) bytes += anchors->size();
  return bytes;
}

void Mover::append_pieces(const Layout& run, const PayloadLayout& payload, std::vector<Piece>* out) const {
  for (const Segment& segment : payload.segments) {
    const std::string& name = run.tensors.at(segment.tensor).name;
    const auto found = index_.find(name);
    if (found == index_.end()) {
      throw std::logic_error(fmt::format("the run's parameter '{}' is not in this learner's model", name));
    }
    out->push_back({found->second, segment.codec, segment.numel, segment.byte_offset});
  }
}

void Mover::read_anchor(const Layout& run, const PayloadLayout& payload, std::uint64_t offset,
                        std::span<std::byte> out) {
  std::fill(out.begin(), out.end(), std::byte{0});  // the gaps between segments
  const std::uint64_t end = offset + out.size();
  for (const Segment& segment : payload.segments) {
    const std::uint64_t first = std::max(offset, segment.byte_offset);
    const std::uint64_t last = std::min(end, segment.byte_offset + segment.numel * sizeof(float));
    if (first >= last) continue;
    const auto found = index_.find(run.tensors.at(segment.tensor).name);
    if (found == index_.end()) continue;
    const std::lock_guard lock(anchor_mutex_);
    const auto* bytes = reinterpret_cast<const std::byte*>(anchor(found->second));
    std::memcpy(out.data() + (first - offset), bytes + (first - segment.byte_offset), last - first);
  }
}

void Mover::copy_anchor(std::uint32_t tensor, float* out) {
  const std::lock_guard lock(anchor_mutex_);
  const Anchor& anchor = anchor_of_.at(tensor);
  std::copy_n(anchor.values, anchor.numel, out);
}

void Mover::stage(Pieces pieces, std::byte* out) {
  for (const Piece& piece : pieces) {
    store_->diff(piece.tensor, anchor(piece.tensor), piece.codec, out + piece.byte_offset);
  }
}

// A payload's segment as f32: in place if it is f32 already (segments are aligned), else decoded into the scratch.
const float* Mover::values(const ConstBufferPtr& payload, const Piece& piece, BufferPtr* scratch) {
  const std::size_t bytes = codec_bytes(piece.codec, piece.numel);
  if (piece.byte_offset + bytes > payload->size()) {
    throw std::logic_error(fmt::format("payload of {} bytes is too short for a segment at {} of {} bytes",
                                       payload->size(), piece.byte_offset, bytes));
  }
  const std::byte* at = payload->data() + piece.byte_offset;
  if (piece.codec == Codec::kF32) return reinterpret_cast<const float*>(at);
  if (!*scratch) *scratch = Buffer::make(largest_ * sizeof(float));
  decode(piece.codec, at, piece.numel, (*scratch)->f32());
  return (*scratch)->f32();
}

void Mover::adopt(const AdoptFragment& action, Pieces image, Pieces sent) {
  for (std::size_t i = 0; i < image.size(); ++i) {
    const Piece& piece = image[i];
    const float* next = nullptr;
    if (action.image) {
      next = values(action.image, piece, &next_scratch_);
    } else {
      // Re-adoption: back to the anchor. Copied, because adopting writes the anchor it would read.
      if (!next_scratch_) next_scratch_ = Buffer::make(largest_ * sizeof(float));
      if (piece.numel > 0) std::memcpy(next_scratch_->data(), anchor(piece.tensor), piece.numel * sizeof(float));
      next = next_scratch_->f32();
    }
    const float* given = nullptr;
    if (action.sent && i < sent.size()) given = values(action.sent, sent[i], &sent_scratch_);
    const std::lock_guard lock(anchor_mutex_);
    switch (action.formula) {
      case AdoptFormula::kOverwrite:
        store_->adopt_overwrite(piece.tensor, next, anchor(piece.tensor));
        break;
      case AdoptFormula::kBlend:
        store_->adopt_blend(piece.tensor, next, action.blend_alpha, anchor(piece.tensor));
        break;
      case AdoptFormula::kRebase:
        store_->adopt_rebase(piece.tensor, next, given, anchor(piece.tensor));
        break;
    }
  }
}

}  // namespace diloco
