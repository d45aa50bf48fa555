// Ready clusters for the tests of the virtual cluster.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "diloco/sim/cluster.h"

namespace diloco::sim {

inline ClusterOptions cluster_of(const std::vector<Seconds>& step_times, std::uint32_t sync_every = 12,
                                 std::uint32_t fragments = 6) {
  ClusterOptions options;
  options.settings.sync_every = sync_every;
  options.settings.num_fragments = fragments;
  options.layout = small_layout();
  for (std::size_t i = 0; i < step_times.size(); ++i) {
    LearnerSpec spec;
    spec.id = "learner-" + std::to_string(i);
    spec.step_s = step_times[i];
    options.learners.push_back(spec);
  }
  return options;
}

inline void expect_sound(const Cluster& cluster) {
  for (const auto& violation : cluster.check()) ADD_FAILURE() << violation;
}

inline std::size_t merges_with(const Cluster& cluster, const std::string& learner, FragmentId fragment,
                               TimePoint since = 0.0) {
  std::size_t count = 0;
  for (const auto& merge : cluster.merges()) {
    if (merge.fragment != fragment || merge.at < since) continue;
    for (const auto& member : merge.members) count += member.learner == learner;
  }
  return count;
}

// What the syncer's status says now.
inline nlohmann::json status(Cluster& cluster) {
  return nlohmann::json::parse(cluster.syncer()->status_json(cluster.now()));
}

}  // namespace diloco::sim
