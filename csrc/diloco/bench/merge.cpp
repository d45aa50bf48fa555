#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>

#include <fmt/format.h>

#include "diloco/bench/workload.h"
#include "diloco/codec/codec.h"
#include "diloco/merge/merge.h"

namespace diloco::bench {
namespace {

Layout layout_of(const MergeShape& shape) {
  Layout layout;
  for (std::uint64_t at = 0; at < shape.elements; at += shape.tensor) {
    const auto numel = static_cast<std::int64_t>(std::min(shape.tensor, shape.elements - at));
    layout.tensors.push_back({fmt::format("w{:09}", layout.tensors.size()), {1, numel}, Dtype::kF32, {}});
  }
  return layout;
}

// One job after the other on the state that the one before has made.
struct Chain {
  MergeJob job;
  BufferPool pool;

  void run(const Parallel& parallel) {
    MergeResult result = run_merge(job, pool, parallel);
    if (!result.ok) throw std::logic_error("the merge of the benchmark is not finite");
    job.previous = std::move(result.next);
  }
  void screen_all(const Parallel& parallel) {
    parallel(job.members.size(), [this](std::size_t m) { job.members[m].norms = screen(job.in, job.members[m].payload->data()).norms; });
  }
};

MergeJob job_of(const MergeShape& shape, const Parallel& parallel) {
  Settings settings;
  settings.num_fragments = 1;
  settings.wire_dtype = settings.downlink_dtype = shape.bf16 ? WireDtype::kBf16 : WireDtype::kF32;
  const Layout layout = layout_of(shape);
  const Plan plan = make_plan(layout, settings.fragmenter, 1);
  MergeJob job;
  job.in = payload_layout(layout, plan, 0, PayloadKind::kContribution, settings);
  job.out = payload_layout(layout, plan, 0, PayloadKind::kImage, settings);
  job.outer = {OuterKind::kNesterov, 0.7f, 0.9f};
  job.next_version = {1, 2};
  job.members.resize(shape.members);
  // The values do not matter, but that they are no zeros and no denormals.
  std::vector<float> values(1 << 20);
  std::minstd_rand random(1);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-6f;
  std::vector<BufferPtr> payloads;
  for (unsigned m = 0; m < shape.members; ++m) payloads.push_back(Buffer::make(job.in.bytes));
  parallel(shape.members, [&](std::size_t m) {
    const BufferPtr& payload = payloads[m];
    for (const Segment& segment : job.in.segments) {
      for (std::uint64_t at = 0; at < segment.numel; at += values.size() - m) {
        const std::uint64_t count = std::min<std::uint64_t>(values.size() - m, segment.numel - at);
        encode(segment.codec, values.data() + m, count, payload->data() + segment.byte_offset + codec_bytes(segment.codec, at));
      }
    }
    job.members[m] = {fmt::format("learner-{}", m), payload, 1.0, screen(job.in, payload->data()).norms, nullptr};
  });
  return job;
}

std::shared_ptr<Chain> chain_of(const MergeJob& job, bool rda) {
  auto chain = std::make_shared<Chain>();
  chain->job = job;
  chain->job.use_rda.assign(job.in.segments.size(), rda);
  chain->pool.keep_at_least(state_bytes(chain->job));
  auto state = std::make_shared<FragmentState>();
  state->version = {1, 1};
  for (BufferPtr* values : {&state->theta, &state->outer_state}) {
    *values = chain->pool.make(job.in.numel * sizeof(float));
    std::fill_n((*values)->f32(), job.in.numel, 0.0f);
  }
  chain->job.previous = std::move(state);
  return chain;
}

}  // namespace

std::vector<Workload> merge_workloads(const MergeShape& shape, const Parallel& parallel) {
  const MergeJob job = job_of(shape, parallel);
  const std::uint64_t element = shape.bf16 ? 2 : 4, payloads = shape.elements * shape.members * element;
  const std::uint64_t once = payloads + shape.elements * (16 + element);
  const auto mean = chain_of(job, false), rda = chain_of(job, true), from_memory = chain_of(job, true);
  return {{"mean", once, [=] { mean->run(parallel); }},
          {"rda", once, [=] { rda->run(parallel); }},
          {"rda from memory", once + payloads, [=] {
             from_memory->screen_all(parallel);
             from_memory->run(parallel);
           }}};
}

}  // namespace diloco::bench
