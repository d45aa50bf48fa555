#include "diloco/torch/parameter_store.h"

#include <algorithm>

#include "diloco/base/errors.h"

namespace diloco {

TorchParameterStore::TorchParameterStore(std::vector<NamedParameter> parameters) { append(std::move(parameters)); }

void TorchParameterStore::append(std::vector<NamedParameter> parameters) {
  Layout layout = layout_;
  for (auto& parameter : parameters) {
    const auto sizes = parameter.tensor.sizes();
    layout.tensors.push_back({parameter.name, {sizes.begin(), sizes.end()},
                              dtype_of(parameter.tensor, parameter.name), std::move(parameter.aliases)});
  }
  check_layout(layout);
  layout_ = std::move(layout);
  for (auto& parameter : parameters) tensors_.push_back(std::move(parameter.tensor));
}

const at::Tensor& TorchParameterStore::checked(std::uint32_t tensor) const {
  const at::Tensor& found = tensors_.at(tensor);
  const TensorSpec& spec = layout_.tensors[tensor];
  if (!std::equal(spec.shape.begin(), spec.shape.end(), found.sizes().begin(), found.sizes().end()) ||
      dtype_of(found, spec.name) != spec.dtype) {
    throw ConfigError("parameter '" + spec.name + "' was " + dtype_name(spec.dtype) + " " + shape_text(spec.shape) +
                      " when it was handed over and is " + dtype_name(dtype_of(found, spec.name)) + " " +
                      shape_text(found.sizes().vec()) + " now. Convert the model first, then wrap the optimizer.");
  }
  return found;
}

void TorchParameterStore::read(std::uint32_t tensor, float* out) { read_tensor(checked(tensor), out); }

void TorchParameterStore::diff(std::uint32_t tensor, const float* anchor, Codec codec, std::byte* out) {
  diff_tensor(checked(tensor), anchor, codec, out, &scratch_);
}

void TorchParameterStore::adopt_overwrite(std::uint32_t tensor, const float* next, float* anchor) {
  adopt_overwrite_tensor(checked(tensor), next, anchor, &scratch_);
}

void TorchParameterStore::adopt_blend(std::uint32_t tensor, const float* next, float alpha, float* anchor) {
  adopt_blend_tensor(checked(tensor), next, alpha, anchor, &scratch_);
}

void TorchParameterStore::adopt_rebase(std::uint32_t tensor, const float* next, const float* sent, float* anchor) {
  adopt_rebase_tensor(checked(tensor), next, sent, anchor, &scratch_);
}

}  // namespace diloco
