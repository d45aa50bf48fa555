// One line of the event log. Private to core/syncer_*.cpp: the only place that adds the time.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"

namespace diloco {

template <class J>
void SyncerCore::Impl::record(J&& line) {
  line["t"] = now - started;
  actions.push_back(Record{line.dump()});
}

inline nlohmann::json to_json(const Version& version) { return nlohmann::json::array({version.epoch, version.n}); }
inline std::string hex(Incarnation incarnation) { return fmt::format("{:016x}", incarnation); }

}  // namespace diloco
