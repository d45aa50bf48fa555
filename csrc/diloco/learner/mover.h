// Moves the numbers: parameters, anchors and payloads. Knows the store's tensor order; plans and payloads use the
// run's, which may be another, so tensors meet by name.
//
// The anchors are written by adopt() on the training thread and read by read_anchor() on whichever thread feeds the
// core; a mutex held for one tensor at a time keeps them apart.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/learner/parameter_store.h"

namespace diloco {

// One tensor's segment of a payload, in the store's terms.
struct Piece {
  std::uint32_t tensor = 0;  // index in the store's layout
  Codec codec = Codec::kF32;
  std::uint64_t numel = 0;
  std::uint64_t byte_offset = 0;
};
using Pieces = std::span<const Piece>;

class Mover {
 public:
  // Copies the parameters into the anchors. Throws ConfigError if the layout is not usable.
  explicit Mover(std::shared_ptr<ParameterStore> store);

  const ParameterStore& store() const { return *store_; }
  std::uint64_t anchor_bytes() const;

  // The store has further tensors: copies them into anchors of their own. Throws ConfigError if the layout is not usable.
  // Returns how many there were before. Training thread, while no other one uses the mover.
  std::size_t grow();

  // Appends the payload's segments. Throws std::logic_error for a tensor the store does not have.
  void append_pieces(const Layout& run, const PayloadLayout& payload, std::vector<Piece>* out) const;
  // Copies bytes [offset, offset + out.size()) of the anchor payload.
  void read_anchor(const Layout& run, const PayloadLayout& payload, std::uint64_t offset, std::span<std::byte> out);

  // One tensor's anchor, dense. Any thread.
  void copy_anchor(std::uint32_t tensor, float* out);

  // Training thread. `out`: at least as long as the payload.
  void stage(Pieces pieces, std::byte* out);
  // `image` pieces describe the image payload (or, for a re-adoption without one, any payload of the fragment); `sent`
  // those of the contribution, same tensors in the same order, or none.
  void adopt(const AdoptFragment& action, Pieces image, Pieces sent);

 private:
  struct Anchor {
    float* values = nullptr;
    std::uint64_t numel = 0;
  };
  float* anchor(std::uint32_t tensor) { return anchor_of_[tensor].values; }
  const float* values(const ConstBufferPtr& payload, const Piece& piece, BufferPtr* scratch);

  std::shared_ptr<ParameterStore> store_;
  std::unordered_map<std::string, std::uint32_t> index_;  // by name and by alias
  std::vector<Anchor> anchor_of_;                         // per store tensor, in anchors_
  std::uint64_t largest_ = 0;
  std::vector<BufferPtr> anchors_;                        // one, and one for each growth
  std::mutex anchor_mutex_;
  BufferPtr next_scratch_, sent_scratch_;  // largest tensor; made when first needed, which f32 payloads never do
};

}  // namespace diloco
