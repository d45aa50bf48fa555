#include "diloco/fragment/part.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

constexpr std::uint64_t kAlignment = 64;

bool inside(const Box& box, const TensorSpec& tensor) {
  const std::size_t dims = tensor.shape.size();
  if (box.absent) return box.offset.empty() && box.shape.empty();
  if (box.offset.size() != dims || box.shape.size() != dims) return false;
  for (std::size_t d = 0; d < dims; ++d) {
    if (box.offset[d] < 0 || box.shape[d] < 0 || box.shape[d] > tensor.shape[d] ||
        box.offset[d] > tensor.shape[d] - box.shape[d]) {
      return false;
    }
  }
  return true;
}

bool share(const Box& a, const Box& b) {
  for (std::size_t d = 0; d < a.shape.size(); ++d) {
    if (a.offset[d] + a.shape[d] <= b.offset[d] || b.offset[d] + b.shape[d] <= a.offset[d]) return false;
  }
  return true;
}

std::string text(const Box& box) { return fmt::format("{} at {}", shape_text(box.shape), shape_text(box.offset)); }

// Boxes of one tensor: distinct ones share nothing and have all its elements.
std::string tensor_fault(const TensorSpec& tensor, std::size_t index, const std::vector<Part>& parts) {
  std::vector<std::pair<const Box*, std::size_t>> boxes;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const Box& box = parts[part][index];
    if (!inside(box, tensor)) {
      return fmt::format("part {} holds {} of parameter '{}', which is {}", part, text(box), tensor.name,
                         shape_text(tensor.shape));
    }
    if (box.numel() > 0) boxes.emplace_back(&box, part);
  }
  std::sort(boxes.begin(), boxes.end(), [](const auto& a, const auto& b) {
    return std::tie(a.first->offset, a.first->shape, a.second) < std::tie(b.first->offset, b.first->shape, b.second);
  });
  std::uint64_t covered = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Box& box = *boxes[i].first;
    if (i > 0 && *boxes[i - 1].first == box) continue;
    covered += box.numel();
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      const Box& other = *boxes[j].first;
      if (!box.shape.empty() && other.offset[0] >= box.offset[0] + box.shape[0]) break;
      if (other == box || !share(box, other)) continue;
      return fmt::format("parameter '{}': parts {} and {} hold {} and {}, which overlap without being equal", tensor.name,
                         boxes[i].second, boxes[j].second, text(box), text(other));
    }
  }
  if (covered == tensor.numel()) return {};
  return fmt::format("parameter '{}': the parts hold {} of its {} elements", tensor.name, covered, tensor.numel());
}

}  // namespace

std::uint64_t Box::numel() const {
  std::uint64_t n = absent ? 0 : 1;
  for (const std::int64_t size : shape) n *= static_cast<std::uint64_t>(size);
  return n;
}

Box whole_box(const TensorSpec& tensor) {
  return {std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape, false};
}

std::vector<std::uint32_t> indices_in(const Layout& run, const Layout& own) {
  std::unordered_map<std::string, std::uint32_t> by_name;
  for (std::uint32_t i = 0; i < run.tensors.size(); ++i) {
    by_name.emplace(run.tensors[i].name, i);
    for (const std::string& alias : run.tensors[i].aliases) by_name.emplace(alias, i);
  }
  std::vector<std::uint32_t> indices;
  for (const TensorSpec& tensor : own.tensors) {
    const auto found = by_name.find(tensor.name);
    if (found == by_name.end()) throw ConfigError(fmt::format("no parameter is named '{}'", tensor.name));
    indices.push_back(found->second);
  }
  return indices;
}

Part in_order_of(const Layout& run, const Layout& own, const Part& part) {
  if (part.empty()) return {};
  const auto indices = indices_in(run, own);
  Part ordered(run.tensors.size());
  for (std::size_t i = 0; i < part.size(); ++i) ordered[indices[i]] = part[i];
  return ordered;
}

Layout layout_of_part(const Layout& layout, const Part& part) {
  Layout result = layout;
  for (std::size_t i = 0; i < result.tensors.size(); ++i) {
    if (part.at(i).absent) result.tensors[i].shape = {0};
    else result.tensors[i].shape = part[i].shape;
  }
  return result;
}

std::string parts_fault(const Layout& layout, const std::vector<Part>& parts) {
  for (std::size_t part = 0; part < parts.size(); ++part) {
    if (parts[part].size() != layout.tensors.size()) {
      return fmt::format("part {} has {} tensors, the model {}", part, parts[part].size(), layout.tensors.size());
    }
  }
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    if (auto fault = tensor_fault(layout.tensors[i], i, parts); !fault.empty()) return fault;
  }
  return {};
}

std::vector<std::vector<bool>> owners(const std::vector<Part>& parts) {
  std::vector<std::vector<bool>> result;
  std::vector<std::map<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>, bool>> seen;
  for (const Part& part : parts) {
    seen.resize(part.size());
    std::vector<bool>& mine = result.emplace_back(part.size(), false);
    for (std::size_t i = 0; i < part.size(); ++i) {
      mine[i] = part[i].numel() > 0 && seen[i].try_emplace({part[i].offset, part[i].shape}, true).second;
    }
  }
  return result;
}

PartMap::PartMap(const Layout& layout, const PayloadLayout& payload, const Part& part, const std::vector<bool>& owned) {
  for (const Segment& segment : payload.segments) {
    const TensorSpec& tensor = layout.tensors.at(segment.tensor);
    const Box& box = part.at(segment.tensor);
    const std::uint64_t element = segment.codec == Codec::kBf16 ? 2 : 4;
    Piece piece;
    piece.begin = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    piece.bytes = box.numel() * element;
    bytes_ = piece.begin + piece.bytes;
    piece.whole = segment.byte_offset;
    piece.owned = owned.empty() || owned[segment.tensor];
    if (piece.bytes == 0) continue;
    // From the innermost dimension outwards: as long as a dimension is held whole, the next one's runs lie together.
    std::uint64_t stride = element;
    piece.run = element;
    bool together = true;
    for (std::size_t d = tensor.shape.size(); d-- > 0;) {
      const auto size = static_cast<std::uint64_t>(box.shape[d]);
      piece.whole += static_cast<std::uint64_t>(box.offset[d]) * stride;
      if (together) {
        piece.run *= size;
      } else {
        piece.counts.push_back(size);
        piece.strides.push_back(stride);
      }
      together = together && box.shape[d] == tensor.shape[d];
      stride *= static_cast<std::uint64_t>(tensor.shape[d]);
    }
    pieces_.push_back(std::move(piece));
  }
}

template <class F>
void PartMap::each(std::uint64_t offset, std::uint64_t size, bool owned_only, F&& copy) const {
  const std::uint64_t end = offset + size;
  for (const Piece& piece : pieces_) {
    if (piece.begin >= end || piece.begin + piece.bytes <= offset || (owned_only && !piece.owned)) continue;
    std::uint64_t at = std::max(offset, piece.begin) - piece.begin;  // in the segment
    const std::uint64_t stop = std::min(end, piece.begin + piece.bytes) - piece.begin;
    while (at < stop) {
      const std::uint64_t run = at / piece.run, within = at % piece.run;
      const std::uint64_t length = std::min(piece.run - within, stop - at);
      std::uint64_t whole = piece.whole + within;
      std::uint64_t rest = run;
      for (std::size_t d = 0; d < piece.counts.size(); ++d) {
        whole += rest % piece.counts[d] * piece.strides[d];
        rest /= piece.counts[d];
      }
      copy(piece.begin + at, whole, length);
      at += length;
    }
  }
}

void PartMap::scatter(std::uint64_t offset, std::span<const std::byte> in, std::byte* whole) const {
  each(offset, in.size(), true, [&](std::uint64_t part, std::uint64_t at, std::uint64_t length) {
    std::memcpy(whole + at, in.data() + (part - offset), length);
  });
}

void PartMap::gather(const std::byte* whole, std::uint64_t offset, std::span<std::byte> out) const {
  std::fill(out.begin(), out.end(), std::byte{0});
  each(offset, out.size(), false, [&](std::uint64_t part, std::uint64_t at, std::uint64_t length) {
    std::memcpy(out.data() + (part - offset), whole + at, length);
  });
}

}  // namespace diloco
