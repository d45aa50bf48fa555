#include "diloco/torch/checks.h"
#include "diloco/torch/ops.h"
#include "diloco/torch/tensor_access.h"

namespace diloco::ops {

void fragment_diff(at::TensorList params, at::TensorList anchors, at::Tensor& out, at::IntArrayRef byte_offsets,
                   const c10::List<bool>& bf16) {
  const char* op = "fragment_diff";
  check_same_length(op, "params", params.size(), "anchors", anchors.size());
  check_same_length(op, "params", params.size(), "byte_offsets", byte_offsets.size());
  check_same_length(op, "params", params.size(), "bf16", bf16.size());
  TORCH_CHECK_VALUE(out.scalar_type() == at::kByte && out.dim() == 1 && out.is_contiguous() && out.is_cpu(), op,
                    ": expected out to be a contiguous 1-D uint8 tensor on the CPU, got ", out.toString(), " ",
                    out.sizes());
  Scratch scratch;
  auto* bytes = static_cast<std::byte*>(out.data_ptr());
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Codec codec = bf16.get(i) ? Codec::kBf16 : Codec::kF32;
    const std::int64_t size = params[i].numel() * (codec == Codec::kBf16 ? 2 : 4);
    check_dense_f32(op, "anchors", anchors[i], params[i].numel());
    TORCH_CHECK_VALUE(byte_offsets[i] >= 0 && byte_offsets[i] <= out.numel() - size, op, ": tensor ", i, " needs bytes [",
                      byte_offsets[i], ", ", byte_offsets[i], " + ", size, ") of out, which has ", out.numel());
    if (params[i].numel() == 0) continue;
    diff_tensor(params[i], static_cast<const float*>(anchors[i].data_ptr()), codec, bytes + byte_offsets[i], &scratch);
  }
}

void fragment_adopt(at::TensorList params, at::TensorList anchors, at::TensorList next,
                    std::optional<at::TensorList> sent, std::string_view formula, double alpha) {
  const char* op = "fragment_adopt";
  check_same_length(op, "params", params.size(), "anchors", anchors.size());
  check_same_length(op, "params", params.size(), "next", next.size());
  if (sent) check_same_length(op, "params", params.size(), "sent", sent->size());
  TORCH_CHECK_VALUE(formula == "overwrite" || formula == "blend" || formula == "rebase", op,
                    ": expected formula overwrite, blend or rebase, got '", formula, "'");
  Scratch scratch;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    check_dense_f32(op, "anchors", anchors[i], param.numel());
    check_dense_f32(op, "next", next[i], param.numel());
    if (sent) check_dense_f32(op, "sent", (*sent)[i], param.numel());
    if (param.numel() == 0) continue;
    auto* anchor = static_cast<float*>(anchors[i].data_ptr());
    const auto* global = static_cast<const float*>(next[i].data_ptr());
    if (formula == "overwrite") {
      adopt_overwrite_tensor(param, global, anchor, &scratch);
    } else if (formula == "blend") {
      adopt_blend_tensor(param, global, static_cast<float>(alpha), anchor, &scratch);
    } else {
      const auto* merged = sent ? static_cast<const float*>((*sent)[i].data_ptr()) : nullptr;
      adopt_rebase_tensor(param, global, merged, anchor, &scratch);
    }
  }
}

}  // namespace diloco::ops
