// What the ranks of an island tell each other at a boundary, and the plan that comes of it. All ranks stage and adopt the
// same at the same step: the leader (rank 0) has the learner's core and orders, every rank reports which versions are
// complete, and one exchange (element-wise minimum, sum of tokens, a blob of the leader's) gives the same plan to all. Pure
// values; the exchange itself is learner/rank_group.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diloco/base/types.h"

namespace diloco {

enum class AdoptFormula : std::uint8_t { kOverwrite, kBlend, kRebase };

constexpr std::size_t kCopiesKept = 4;  // sent copies of a fragment that may still be merged

struct FragmentOrder {
  bool stage = false;
  // Adopt, if every rank has reported this version; none: nothing, unless `back`.
  Version adopt;
  bool back = false;             // back to the anchor, whatever anybody has
  AdoptFormula formula = AdoptFormula::kRebase;
  std::uint64_t sent_step = 0;   // copy (by the step it was staged after) that the version contains; 0 = none
  bool dropped = false;          // the local work is given up: counting of its steps begins anew
  bool reset_inner_state = false;
  std::array<std::uint64_t, kCopiesKept> kept{};  // steps of copies to keep; 0 = none
};

struct IslandOrders {
  Incarnation incarnation = 0;    // of the island: the leader's
  SessionId session = 0;          // 0: not connected
  std::uint64_t lane_token = 0;
  bool more = false;              // another exchange follows at this boundary (joining, lockstep)
  bool failed = false;            // the leader cannot go on (refused, gave up); the exchange's blob says why
  std::vector<FragmentOrder> fragments;  // empty until every rank knows the plan
};

// Of one rank, per fragment.
struct IslandReport {
  std::vector<Version> ready;     // complete at this rank and not adopted; none if not
  // Complete at a rank that has a connection, for its replicas to be given; replicas report nothing.
  std::vector<std::optional<Version>> arrived;
  std::uint64_t tokens = 0;       // of this rank's last step
};

struct IslandPlan {
  IslandOrders orders;
  // Per fragment: what all ranks (all with a connection) have; none if they have different ones.
  std::vector<Version> ready, arrived;
  std::uint64_t tokens = 0;             // of all ranks
  // The order of fragment p to adopt holds: every rank can.
  bool go(std::size_t p) const {
    const FragmentOrder& order = orders.fragments[p];
    return order.back || (!order.adopt.none() && ready[p] == order.adopt);
  }
};

// Numbers for an element-wise minimum. `orders`: of the leader, null elsewhere. Every rank passes the same number of
// fragments. Versions up to epoch 2^20 and 2^42 outer steps.
std::vector<std::int64_t> encode_exchange(const IslandReport& report, const IslandOrders* orders);
IslandPlan decode_exchange(const std::vector<std::int64_t>& minimum, std::uint64_t tokens);
std::size_t exchange_length(std::size_t fragments);

}  // namespace diloco
