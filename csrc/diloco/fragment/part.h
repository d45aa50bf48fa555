// Parts: which elements of every tensor one rank of an island holds. A local shard is a box of the unsharded tensor, so
// islands of different world size and sharding meet in the unsharded layout, on the wire and at the syncer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "diloco/fragment/layout.h"
#include "diloco/fragment/plan.h"

namespace diloco {

// Elements offset[d] <= i_d < offset[d] + shape[d] of a tensor. Both as long as the tensor's shape; an empty shard has a
// zero in `shape`. A 0-d tensor: both (), or `absent` if this rank does not hold it.
struct Box {
  std::vector<std::int64_t> offset, shape;
  bool absent = false;
  std::uint64_t numel() const;  // 0 if absent
  bool operator==(const Box&) const = default;
};
Box whole_box(const TensorSpec& tensor);

// By tensor of a layout.
using Part = std::vector<Box>;

// By tensor of `own`: where `run`, which may list them in another order, has the tensor of that name or alias. Throws
// ConfigError if it has none.
std::vector<std::uint32_t> indices_in(const Layout& run, const Layout& own);
// `part` of `own` in the order of `run`; an empty one (everything is held) stays empty.
Part in_order_of(const Layout& run, const Layout& own, const Part& part);

// The tensors as one rank holds them: the same names in the same order, with the shapes of the boxes.
Layout layout_of_part(const Layout& layout, const Part& part);

// "" if every element of every tensor is in a part, and boxes of two parts are equal or share nothing. Else the first fault,
// naming the tensor and the parts.
std::string parts_fault(const Layout& layout, const std::vector<Part>& parts);
// Per part and tensor: its box is counted from this part, the lowest of those that hold it.
std::vector<std::vector<bool>> owners(const std::vector<Part>& parts);

// Where the bytes of a part's payload lie in the payload of the whole fragment. The part's payload has a segment per tensor
// of the fragment, in the same order, of the box's elements in row-major order, each at a multiple of 64.
class PartMap {
 public:
  // `payload`: of the whole fragment. `owned` by tensor of the layout: what scatter() takes; empty = all.
  PartMap(const Layout& layout, const PayloadLayout& payload, const Part& part, const std::vector<bool>& owned = {});

  std::uint64_t bytes() const { return bytes_; }  // of the part's payload
  // Copies bytes [offset, offset + in.size()) of the part's payload to their places in the whole one.
  void scatter(std::uint64_t offset, std::span<const std::byte> in, std::byte* whole) const;
  // out <- bytes [offset, offset + out.size()) of the part's payload; zeros between segments.
  void gather(const std::byte* whole, std::uint64_t offset, std::span<std::byte> out) const;

 private:
  struct Piece {
    std::uint64_t begin = 0, bytes = 0;  // in the part's payload
    std::uint64_t whole = 0;             // first byte of the tensor's segment in the whole payload
    std::uint64_t run = 0;               // bytes that lie together in both
    std::vector<std::uint64_t> counts;   // runs along each outer dimension
    std::vector<std::uint64_t> strides;  // bytes between them in the whole payload
    bool owned = true;
  };
  // Calls copy(byte of the part's payload, byte of the whole one, length) for every run in [offset, offset + size).
  template <class F>
  void each(std::uint64_t offset, std::uint64_t size, bool owned_only, F&& copy) const;

  std::vector<Piece> pieces_;
  std::uint64_t bytes_ = 0;
};

}  // namespace diloco
