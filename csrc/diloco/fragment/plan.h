// Which tensor is in which fragment, which shard owns a fragment, and where each element lies in memory and on the wire.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "diloco/base/settings.h"
#include "diloco/base/types.h"
#include "diloco/fragment/layout.h"

namespace diloco {

struct Fragment {
  std::vector<std::uint32_t> tensors;  // indices into layout.tensors, sorted by name: order on the wire
  std::uint64_t numel = 0;
  std::uint32_t shard = 0;  // syncer shard that owns the fragment
  bool operator==(const Fragment&) const = default;
};

struct Plan {
  std::vector<Fragment> fragments;
  std::uint32_t began_with = 0;  // fragments of the layout the run began with; 0: all of them
  std::uint32_t size() const { return static_cast<std::uint32_t>(fragments.size()); }
  // Fragments that share sync_every steps (fragment/schedule.h). What is added later follows the schedule of the others.
  std::uint32_t cycle() const { return began_with > 0 ? began_with : size(); }
  bool operator==(const Plan&) const = default;
};

// Deterministic for equal layouts whatever the order of registration. A tensor is never split. At most
// min(num_fragments, number of tensors) fragments; strided: of layers.
//   balanced: longest first into the currently lightest bin (LPT; paper App. D; peak <= 4/3 - 1/(3P) of the best).
//   layer: consecutive tensors in natural name order ("h.2" < "h.10"), cut into P runs of near equal size.
//   strided: layers in natural order, dealt out in turn: layer i into fragment i mod P (Streaming DiLoCo, section 3.2). A
//     layer is the tensors whose names agree up to and with the first number ("h.2."); other tensors are one each.
//   tensor: tensors in natural order, dealt out in turn.
// Fragments go to the syncer's shards by LPT as well: longest first (ties: lower index) to the shard with the fewest
// elements (ties: the fewest fragments, then the lower index). Every shard gets one, or ConfigError.
Plan make_plan(const Layout& layout, Fragmenter fragmenter, std::uint32_t num_fragments, std::uint32_t shards = 1);
// The plan of a layout that has grown: `plan` is that of its first tensors, and stays as it is; the others get fragments
// behind it, which are no larger than its largest as far as tensors allow. One shard. Deterministic.
Plan grow_plan(const Plan& plan, const Layout& grown, Fragmenter fragmenter);
// How many of the first fragments have none but the layout's first `tensors`.
std::uint32_t fragments_within(const Plan& plan, std::size_t tensors);
// The first `fragments` of a plan, whose tensors are the first ones of its layout.
Plan first_of(const Plan& plan, std::uint32_t fragments);
// Throws ConfigError unless every tensor of the layout is in exactly one fragment, numel adds up, and every fragment has
// one of `shards` shards, every shard a fragment.
void check_plan(const Plan& plan, const Layout& layout, std::uint32_t shards = 1);
// "" if both plans put tensors of the same names into the same fragments of the same shards (the layouts may list them in
// another order). Else the first difference, as what is so in `a` "and" in `b`: "6 fragments and 4".
std::string first_difference(const Plan& a, const Layout& layout_of_a, const Plan& b, const Layout& layout_of_b);

// Element type of one tensor segment inside a payload.
enum class Codec : std::uint8_t { kF32 = 0, kBf16 = 1 };

// Bytes of one fragment on the wire: the tensors' segments in order, each starting at a multiple of 64.
struct Segment {
  std::uint32_t tensor = 0;          // index into layout.tensors
  Codec codec = Codec::kF32;
  std::uint64_t numel = 0;
  std::uint64_t element_offset = 0;  // first element in the fragment's dense f32 array
  std::uint64_t byte_offset = 0;     // first byte in the payload
};
struct PayloadLayout {
  std::vector<Segment> segments;
  std::uint64_t numel = 0;
  std::uint64_t bytes = 0;
};

enum class PayloadKind : std::uint8_t { kContribution = 0, kAnchor = 1, kImage = 2 };
// contribution: settings.wire_dtype, 1-D and 0-d tensors always f32. anchor: all f32. image: settings.downlink_dtype
// (param: bf16 parameters travel as bf16, everything else as f32).
PayloadLayout payload_layout(const Layout& layout, const Plan& plan, FragmentId fragment, PayloadKind kind,
                             const Settings& settings);
// All of them: [fragment][PayloadKind].
using PayloadLayouts = std::vector<std::array<PayloadLayout, 3>>;
PayloadLayouts payload_layouts(const Layout& layout, const Plan& plan, const Settings& settings);

}  // namespace diloco
