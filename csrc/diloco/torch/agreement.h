// What all ranks of a group must agree on before they start, and again when they load a state. Over a group whose
// tensors are on the CPU; every rank calls at the same time and comes to the same result.
#pragma once

#include <string>
#include <vector>

#include "diloco/torch/collective_plan.h"
#include "diloco/torch/process_group.h"

namespace diloco {

// The texts of all ranks, by rank. Throws TransportError.
std::vector<std::string> exchange_texts(const Collectives& group, const std::string& mine);

// Throws the same ConfigError on every rank if one of them has a `problem` (its own refusal, "" if none), or another
// model, other settings, another version of this package or another place for the numbers than rank 0.
void agree(const Collectives& group, const Layout& layout, const Settings& settings, bool on_device,
           const std::string& problem);

}  // namespace diloco
