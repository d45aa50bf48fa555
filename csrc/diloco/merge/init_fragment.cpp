#include "diloco/merge/init_fragment.h"

#include <algorithm>

#include "diloco/codec/codec.h"

namespace diloco {

InitResult run_init(const InitJob& job) {
  BufferPool pool;
  return run_init(job, pool);
}

InitResult run_init(const InitJob& job, BufferPool& pool) {
  InitResult result;
  result.finite = screen(job.in, job.payload->data()).finite;
  if (!result.finite) return result;

  auto state = std::make_shared<FragmentState>();
  state->version = job.version;
  state->theta = pool.make(job.in.numel * sizeof(float));
  decode_payload(job.in, job.payload->data(), state->theta->f32());
  if (const auto floats = outer_state_floats(job.outer); floats > 0) {
    state->outer_state = pool.make(floats * job.in.numel * sizeof(float));
    std::fill_n(state->outer_state->data(), state->outer_state->size(), std::byte{0});
  }
  const BufferPtr bytes = pool.make(job.out.bytes);
  encode_payload(job.out, state->theta->f32(), bytes->data());
  // A large f32 can round to Inf in bf16.
  result.finite = screen(job.out, bytes->data()).finite;
  if (!result.finite) return result;
  result.image = make_image(bytes, job.chunk_bytes);
  result.state = std::move(state);
  return result;
}

}  // namespace diloco
