#include "diloco/torch/ops.h"

#include <torch/library.h>

TORCH_LIBRARY(diloco, m) {
  m.def("fragment_diff(Tensor[] params, Tensor[] anchors, Tensor(a!) out, int[] byte_offsets, bool[] bf16) -> ()");
  m.def("fragment_adopt(Tensor(a!)[] params, Tensor(b!)[] anchors, Tensor[] next, Tensor[]? sent, str formula, "
        "float alpha) -> ()");
  m.def("mean_merge(Tensor[] deltas, Tensor weights) -> Tensor");
  m.def("rda_merge(Tensor[] deltas, Tensor weights) -> Tensor");
  m.def("outer_step(Tensor gradient, Tensor(a!) theta, Tensor(b!)? state, str settings, int step) -> ()");
}

TORCH_LIBRARY_IMPL(diloco, CPU, m) {
  m.impl("fragment_diff", TORCH_FN(diloco::ops::fragment_diff));
  m.impl("fragment_adopt", TORCH_FN(diloco::ops::fragment_adopt));
  m.impl("mean_merge", TORCH_FN(diloco::ops::mean_merge));
  m.impl("rda_merge", TORCH_FN(diloco::ops::rda_merge));
  m.impl("outer_step", TORCH_FN(diloco::ops::outer_step));
}
