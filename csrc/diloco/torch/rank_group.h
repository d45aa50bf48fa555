// How the ranks of an island agree, over process groups of torch: the exchange of a boundary and the broadcast to replicas
// run on a thread each, so that the training thread only hands over and takes.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "diloco/learner/rank_group.h"

namespace c10d {
class ProcessGroup;
}

namespace diloco {

// `plan`: all ranks of the island, on the CPU, used by nobody else. `replicas`: the ranks that hold the same part, the one
// with the connection first; on the CPU, used by nobody else; null if this part has no replicas. `any_replicas`: a part of
// the island has some.
std::shared_ptr<RankGroup> make_rank_group(const c10::intrusive_ptr<c10d::ProcessGroup>& plan,
                                           const c10::intrusive_ptr<c10d::ProcessGroup>& replicas, bool any_replicas);

}  // namespace diloco
