#include "diloco/fragment/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>
#include <string_view>
#include <tuple>

#include "diloco/base/errors.h"
#include "diloco/fragment/natural_order.h"

namespace diloco {
namespace {

using Order = std::vector<std::uint32_t>;  // indices into layout.tensors
__extension__ typedef unsigned __int128 Uint128;

template <typename Less>
Order sorted_tensors(const Layout& layout, Less less) {
  Order order(layout.tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return less(layout.tensors[a], layout.tensors[b]); });
  return order;
}

Order natural_order(const Layout& layout) {
  return sorted_tensors(layout, [](const TensorSpec& a, const TensorSpec& b) { return natural_less(a.name, b.name); });
}

// A bin in the queue of LPT, lightest first. Among bins of weight 0 one that holds nothing comes first: empty tensors
// have weight 0 too, and no fragment shall be without a tensor.
using Bin = std::tuple<std::uint64_t, bool, std::uint32_t>;  // numel, holds a tensor, index

Plan balanced_plan(const Layout& layout, std::uint32_t bins) {
  const Order order = sorted_tensors(layout, [](const TensorSpec& a, const TensorSpec& b) {
    const std::uint64_t left = a.numel();
    const std::uint64_t right = b.numel();
    return left != right ? left > right : a.name < b.name;
  });
  Plan plan;
  plan.fragments.resize(bins);
  std::priority_queue<Bin, std::vector<Bin>, std::greater<>> lightest;
  for (std::uint32_t i = 0; i < bins; ++i) lightest.emplace(0, false, i);
  for (const std::uint32_t tensor : order) {
    const std::uint32_t index = std::get<2>(lightest.top());
    lightest.pop();
    Fragment& fragment = plan.fragments[index];
    fragment.tensors.push_back(tensor);
    fragment.numel += layout.tensors[tensor].numel();
    lightest.emplace(fragment.numel, true, index);
  }
  return plan;
}

// Cut k lies where the running size is nearest to k/runs of the total, moved where a run would get no tensor. So a run is
// at most total/runs plus the largest tensor.
std::size_t cut_position(const std::vector<std::uint64_t>& prefix, std::uint32_t k, std::uint32_t runs) {
  const Uint128 wanted = Uint128{prefix.back()} * k;
  const auto at = std::lower_bound(prefix.begin(), prefix.end(), wanted,
                                   [&](std::uint64_t size, Uint128 want) { return Uint128{size} * runs < want; });
  std::size_t position = static_cast<std::size_t>(at - prefix.begin());
  if (position > 0) {
    const Uint128 above = Uint128{prefix[position]} * runs - wanted;
    const Uint128 below = wanted - Uint128{prefix[position - 1]} * runs;
    if (below < above) --position;
  }
  return position;
}

Plan layer_plan(const Layout& layout, std::uint32_t runs) {
  const Order order = natural_order(layout);
  std::vector<std::uint64_t> prefix{0};
  for (const std::uint32_t tensor : order) prefix.push_back(prefix.back() + layout.tensors[tensor].numel());
  Plan plan;
  std::size_t begin = 0;
  for (std::uint32_t k = 1; k <= runs; ++k) {
    const std::size_t last_allowed = order.size() - (runs - k);
    const std::size_t end =
        k == runs ? order.size() : std::clamp(cut_position(prefix, k, runs), begin + 1, last_allowed);
    Fragment fragment;
    fragment.tensors.assign(order.begin() + static_cast<std::ptrdiff_t>(begin),
                            order.begin() + static_cast<std::ptrdiff_t>(end));
    fragment.numel = prefix[end] - prefix[begin];
    plan.fragments.push_back(std::move(fragment));
    begin = end;
  }
  return plan;
}

// "transformer.h.12.attn.weight" is of layer "transformer.h.12"; without a number a tensor is a layer by itself.
std::string_view layer_of(std::string_view name) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (!part.empty() && std::all_of(part.begin(), part.end(), digit)) return name.substr(0, end);
    begin = end + 1;
  }
  return name;
}

std::string_view tensor_itself(std::string_view name) { return name; }

// Hands out what `group_of` makes of the names, in turn: tensors of one group go into one fragment.
Plan dealt_plan(const Layout& layout, std::uint32_t wanted, std::string_view (*group_of)(std::string_view)) {
  const Order order = natural_order(layout);
  std::map<std::string_view, std::size_t> turns;
  for (const std::uint32_t tensor : order) turns.try_emplace(group_of(layout.tensors[tensor].name), turns.size());
  Plan plan;
  plan.fragments.resize(std::min<std::size_t>(wanted, turns.size()));
  for (const std::uint32_t tensor : order) {
    Fragment& fragment = plan.fragments[turns.at(group_of(layout.tensors[tensor].name)) % plan.size()];
    fragment.tensors.push_back(tensor);
    fragment.numel += layout.tensors[tensor].numel();
  }
  return plan;
}

Plan plan_of(const Layout& layout, Fragmenter fragmenter, std::uint32_t count) {
  switch (fragmenter) {
    case Fragmenter::kLayer: return layer_plan(layout, count);
    case Fragmenter::kStrided: return dealt_plan(layout, count, layer_of);
    case Fragmenter::kTensor: return dealt_plan(layout, count, tensor_itself);
    case Fragmenter::kBalanced: break;
  }
  return balanced_plan(layout, count);
}

void assign_shards(Plan& plan, std::uint32_t shards) {
  if (shards == 0 || shards > plan.size()) {
    throw ConfigError(fmt::format("shards: expected 1 to {}, the number of fragments (num_fragments, but no more than "
                                  "there are tensors to put into them), got {}", plan.size(), shards));
  }
  std::vector<std::uint32_t> order(plan.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return plan.fragments[a].numel > plan.fragments[b].numel;
  });
  using Load = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>;  // numel, fragments, index
  std::priority_queue<Load, std::vector<Load>, std::greater<>> lightest;
  for (std::uint32_t shard = 0; shard < shards; ++shard) lightest.emplace(0, 0, shard);
  for (const std::uint32_t index : order) {
    const auto [numel, fragments, shard] = lightest.top();
    lightest.pop();
    plan.fragments[index].shard = shard;
    lightest.emplace(numel + plan.fragments[index].numel, fragments + 1, shard);
  }
}

void check_shards(const Plan& plan, std::uint32_t shards) {
  std::vector<bool> owns(shards, false);
  for (std::uint32_t index = 0; index < plan.size(); ++index) {
    const std::uint32_t shard = plan.fragments[index].shard;
    if (shard >= shards) {
      throw ConfigError(fmt::format("plan: fragment {} is of syncer shard {}; {} shard(s) are known here, numbered from 0",
                                    index, shard, shards));
    }
    owns[shard] = true;
  }
  const auto idle = std::find(owns.begin(), owns.end(), false);
  if (idle != owns.end()) {
    throw ConfigError(fmt::format("plan: syncer shard {} of the {} known here has no fragment", idle - owns.begin(),
                                  shards));
  }
}

}  // namespace

Plan make_plan(const Layout& layout, Fragmenter fragmenter, std::uint32_t num_fragments, std::uint32_t shards) {
  check_layout(layout);
  if (num_fragments == 0) throw ConfigError("num_fragments: expected at least 1, got 0");
  const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(num_fragments, layout.tensors.size()));
  Plan plan = plan_of(layout, fragmenter, count);
  for (Fragment& fragment : plan.fragments) {
    std::sort(fragment.tensors.begin(), fragment.tensors.end(), [&](std::uint32_t a, std::uint32_t b) {
      return layout.tensors[a].name < layout.tensors[b].name;
    });
  }
  assign_shards(plan, shards);
  return plan;
}

Plan grow_plan(const Plan& plan, const Layout& grown, Fragmenter fragmenter) {
  std::size_t known = 0;
  std::uint64_t largest = 1;
  for (const Fragment& fragment : plan.fragments) {
    known += fragment.tensors.size();
    largest = std::max(largest, fragment.numel);
  }
  const Layout added{{grown.tensors.begin() + static_cast<std::ptrdiff_t>(known), grown.tensors.end()}};
  const std::uint64_t wanted = std::clamp<std::uint64_t>(added.numel() / largest + (added.numel() % largest != 0), 1,
                                                         added.tensors.size());
  Plan out = plan;
  out.began_with = plan.cycle();
  for (Fragment& fragment : make_plan(added, fragmenter, static_cast<std::uint32_t>(wanted)).fragments) {
    for (std::uint32_t& tensor : fragment.tensors) tensor += static_cast<std::uint32_t>(known);
    out.fragments.push_back(std::move(fragment));
  }
  return out;
}

std::uint32_t fragments_within(const Plan& plan, std::size_t tensors) {
  const auto beyond = std::find_if(plan.fragments.begin(), plan.fragments.end(), [&](const Fragment& fragment) {
    return std::any_of(fragment.tensors.begin(), fragment.tensors.end(), [&](std::uint32_t i) { return i >= tensors; });
  });
  return static_cast<std::uint32_t>(beyond - plan.fragments.begin());
}

Plan first_of(const Plan& plan, std::uint32_t fragments) {
  Plan out = plan;
  out.fragments.resize(std::min<std::size_t>(fragments, plan.fragments.size()));
  if (out.size() <= plan.cycle()) out.began_with = 0;
  return out;
}

void check_plan(const Plan& plan, const Layout& layout, std::uint32_t shards) {
  std::vector<bool> seen(layout.tensors.size(), false);
  for (std::uint32_t index = 0; index < plan.size(); ++index) {
    const Fragment& fragment = plan.fragments[index];
    std::uint64_t numel = 0;
    for (const std::uint32_t tensor : fragment.tensors) {
      if (tensor >= layout.tensors.size()) {
        throw ConfigError(fmt::format("plan: fragment {} names tensor {}, the layout has {} tensors", index, tensor,
                                      layout.tensors.size()));
      }
      if (seen[tensor]) {
        throw ConfigError(fmt::format("plan: tensor '{}' is in more than one place, again in fragment {}",
                                      layout.tensors[tensor].name, index));
      }
      seen[tensor] = true;
      numel += layout.tensors[tensor].numel();
    }
    if (numel != fragment.numel) {
      throw ConfigError(fmt::format("plan: fragment {} says it has {} elements, its tensors have {}", index,
                                    fragment.numel, numel));
    }
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing != seen.end()) {
    throw ConfigError(fmt::format("plan: tensor '{}' is in no fragment",
                                  layout.tensors[static_cast<std::size_t>(missing - seen.begin())].name));
  }
  check_shards(plan, shards);
}

std::string first_difference(const Plan& a, const Layout& layout_of_a, const Plan& b, const Layout& layout_of_b) {
  if (a.size() != b.size()) return fmt::format("{} fragments and {}", a.size(), b.size());
  for (std::uint32_t index = 0; index < a.size(); ++index) {
    const Fragment& left = a.fragments[index];
    const Fragment& right = b.fragments[index];
    if (left.shard != right.shard) {
      return fmt::format("fragment {} of shard {} and of shard {}", index, left.shard, right.shard);
    }
    if (left.tensors.size() != right.tensors.size()) {
      return fmt::format("{} tensors in fragment {} and {}", left.tensors.size(), index, right.tensors.size());
    }
    for (std::size_t i = 0; i < left.tensors.size(); ++i) {  // both sorted by name
      const std::string& name = layout_of_a.tensors.at(left.tensors[i]).name;
      const std::string& other = layout_of_b.tensors.at(right.tensors[i]).name;
      if (name != other) return fmt::format("'{}' in fragment {} and '{}'", name, index, other);
    }
  }
  return {};
}

}  // namespace diloco
