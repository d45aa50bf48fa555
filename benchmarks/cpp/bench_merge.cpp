// run_merge() of one fragment of a single matrix: bytes per second are those of all payloads together.
#include <benchmark/benchmark.h>

#include "diloco/merge/merge.h"

namespace diloco {
namespace {

MergeJob make_job(std::size_t members, bool rda) {
  constexpr std::int64_t kSide = 1024;
  Layout layout{{{"weight", {kSide, kSide}, Dtype::kF32, {}}}};
  const Settings settings;
  const Plan plan = make_plan(layout, settings.fragmenter, settings.num_fragments);
  MergeJob job;
  job.in = payload_layout(layout, plan, 0, PayloadKind::kContribution, settings);
  job.out = payload_layout(layout, plan, 0, PayloadKind::kImage, settings);
  job.use_rda = {rda};
  auto previous = std::make_shared<FragmentState>();
  previous->version = {1, 1};
  previous->theta = Buffer::make(kSide * kSide * sizeof(float));
  job.previous = previous;
  job.next_version = {1, 2};
  for (std::size_t m = 0; m < members; ++m) {
    auto payload = Buffer::make(job.in.bytes);
    for (std::size_t i = 0; i < payload->size(); ++i) payload->data()[i] = std::byte(i % 61 + m);
    job.members.push_back({std::to_string(m), payload, 1.0, screen(job.in, payload->data()).norms});
  }
  return job;
}

void merge_matrix(benchmark::State& state, bool rda) {
  const MergeJob job = make_job(static_cast<std::size_t>(state.range(0)), rda);
  for (auto _ : state) {
    if (!run_merge(job).ok) state.SkipWithError("the next state was not finite");
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * job.in.bytes * job.members.size()));
}
BENCHMARK_CAPTURE(merge_matrix, mean, false)->Arg(1)->Arg(4)->Arg(8);
BENCHMARK_CAPTURE(merge_matrix, rda, true)->Arg(1)->Arg(4)->Arg(8);

}  // namespace
}  // namespace diloco
