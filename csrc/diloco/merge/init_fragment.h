// The first state of a fragment, from an uploaded anchor. Called on worker threads.
#pragma once

#include <memory>

#include "diloco/merge/merge.h"

namespace diloco {

struct InitJob {
  PayloadLayout in;   // of the anchor (all f32)
  PayloadLayout out;  // of the image
  OuterOptions outer;
  ConstBufferPtr payload;
  Version version;
  std::uint64_t chunk_bytes = 1 << 20;
};

struct InitResult {
  bool finite = false;                         // of the anchor and of its image
  std::shared_ptr<const FragmentState> state;  // outer state zero; valid if finite
  Image image;                                 // valid if finite
};

// State and image come from the pool.
InitResult run_init(const InitJob& job, BufferPool& pool);
InitResult run_init(const InitJob& job);  // without a pool

}  // namespace diloco
