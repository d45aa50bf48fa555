#include "diloco/core/island.h"

#include <limits>

namespace diloco {
namespace {

constexpr std::int64_t kNothing = std::numeric_limits<std::int64_t>::max();  // leaves the minimum to the others
constexpr unsigned kStepBits = 42;
constexpr std::size_t kHead = 8, kEach = 10 + kCopiesKept;

std::int64_t number(const Version& version) {
  return static_cast<std::int64_t>(version.epoch << kStepBits | version.n);
}
Version version_of(std::int64_t number) {
  if (number == kNothing) return {};
  const auto bits = static_cast<std::uint64_t>(number);
  return {bits >> kStepBits, bits & ((std::uint64_t{1} << kStepBits) - 1)};
}

// Oldest and newest: the minimum of the number and of its negative.
void put_version(std::vector<std::int64_t>* out, const std::optional<Version>& version) {
  out->push_back(version ? number(*version) : kNothing);
  out->push_back(version ? -number(*version) : kNothing);
}
Version common_version(const std::int64_t* at) { return at[0] == -at[1] ? version_of(at[0]) : Version{}; }

// A random 64-bit number in two halves, so that the smallest is the leader's whatever its sign.
void put_wide(std::vector<std::int64_t>* out, std::uint64_t value, bool mine) {
  out->push_back(mine ? static_cast<std::int64_t>(value >> 32) : kNothing);
  out->push_back(mine ? static_cast<std::int64_t>(value & 0xffffffff) : kNothing);
}
std::uint64_t wide(const std::int64_t* at) {
  return static_cast<std::uint64_t>(at[0]) << 32 | static_cast<std::uint64_t>(at[1]);
}

}  // namespace

std::size_t exchange_length(std::size_t fragments) { return kHead + kEach * fragments; }

std::vector<std::int64_t> encode_exchange(const IslandReport& report, const IslandOrders* orders) {
  const std::size_t fragments = report.ready.size();
  std::vector<std::int64_t> out;
  out.reserve(exchange_length(fragments));
  const bool mine = orders != nullptr;
  put_wide(&out, mine ? orders->incarnation : 0, mine);
  put_wide(&out, mine ? orders->session : 0, mine);
  put_wide(&out, mine ? orders->lane_token : 0, mine);
  out.push_back(mine ? orders->more + 2 * orders->failed : kNothing);
  out.push_back(mine ? static_cast<std::int64_t>(orders->fragments.size()) : kNothing);
  for (std::size_t p = 0; p < fragments; ++p) {
    put_version(&out, report.ready[p]);
    put_version(&out, report.arrived[p]);
    const FragmentOrder* order = mine && p < orders->fragments.size() ? &orders->fragments[p] : nullptr;
    const auto put = [&](std::int64_t value) { out.push_back(order ? value : mine ? 0 : kNothing); };
    put(order ? order->stage : 0);
    put(order ? number(order->adopt) : 0);
    put(order ? static_cast<std::int64_t>(order->formula) : 0);
    put(order ? static_cast<std::int64_t>(order->sent_step) : 0);
    put(order ? order->back + 2 * order->dropped : 0);
    put(order ? order->reset_inner_state : 0);
    for (std::size_t i = 0; i < kCopiesKept; ++i) put(order ? static_cast<std::int64_t>(order->kept[i]) : 0);
  }
  return out;
}

IslandPlan decode_exchange(const std::vector<std::int64_t>& minimum, std::uint64_t tokens) {
  IslandPlan plan;
  const std::int64_t* at = minimum.data();
  plan.tokens = tokens;
  plan.orders.incarnation = wide(at);
  plan.orders.session = wide(at + 2);
  plan.orders.lane_token = wide(at + 4);
  plan.orders.more = (at[6] & 1) != 0;
  plan.orders.failed = (at[6] & 2) != 0;
  plan.orders.fragments.resize(static_cast<std::size_t>(at[7]));
  at += kHead;
  for (FragmentOrder& order : plan.orders.fragments) {
    plan.ready.push_back(common_version(at));
    plan.arrived.push_back(common_version(at + 2));
    order.stage = at[4] != 0;
    order.adopt = version_of(at[5]);
    order.formula = static_cast<AdoptFormula>(at[6]);
    order.sent_step = static_cast<std::uint64_t>(at[7]);
    order.back = (at[8] & 1) != 0;
    order.dropped = (at[8] & 2) != 0;
    order.reset_inner_state = at[9] != 0;
    for (std::size_t i = 0; i < kCopiesKept; ++i) order.kept[i] = static_cast<std::uint64_t>(at[10 + i]);
    at += kEach;
  }
  return plan;
}

}  // namespace diloco
