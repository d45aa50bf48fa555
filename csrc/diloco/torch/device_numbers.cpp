// The body for a group that moves device tensors (NCCL). Everything is queued on the current stream; what depends on
// values (is it finite, does anybody have work) is decided on the device, so the host reads nothing back.
//
// What the host therefore does not learn: that a contribution was not finite. It weighs nothing, and the rank's weights
// of the fragment become the global ones again, but its inner optimizer state stays and nobody is told. And where the
// next weights would not be finite, the round is void: nothing is replaced, nobody's contribution is left out for another
// try. `outer_steps` counts such rounds too.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "diloco/base/errors.h"
#include "diloco/outer/outer.h"
#include "diloco/torch/collective_numbers.h"
#include "diloco/torch/ops.h"

namespace diloco {
namespace {

constexpr std::uint64_t kEpoch = 1;
constexpr const char* kOperators[] = {"fragment_diff", "fragment_adopt", "mean_merge", "rda_merge", "outer_step"};

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("diloco::") + name).c_str(), "");
}

// The operator whose body on the CPU is `body`. The dispatcher picks the body for the device of the arguments.
template <auto& body>
const auto& operator_of(const char* name) {
  using Function = std::remove_reference_t<decltype(body)>;
  static const c10::TypedOperatorHandle<Function> handle = operator_named(name).typed<Function>();
  return handle;
}

void check_kernels(const at::Device& device) {
  const c10::DispatchKey key = c10::computeDispatchKey(at::kFloat, at::kStrided, device);
  for (const char* name : kOperators) {
    if (operator_named(name).hasKernelForDispatchKey(key)) continue;
    throw ConfigError("the parameters are on " + device.str() + " and this build of diloco has no kernel of diloco::" +
                      name + " for it; use a gloo group, which merges in host memory, or a build with those kernels");
  }
}

std::string outer_settings(const Settings& settings) {
  std::string text;
  for (const auto& [name, value] : settings.to_map()) {
    if (name.starts_with("outer_")) text += name + "=" + value + " ";
  }
  return text;
}

at::ScalarType dtype_of(Codec codec) { return codec == Codec::kBf16 ? at::kBFloat16 : at::kFloat; }

std::int64_t bytes_of(const Segment& segment) {
  return static_cast<std::int64_t>(segment.numel * (segment.codec == Codec::kBf16 ? 2 : 4));
}

// One tensor's part of a message or payload, in its element type; a view.
at::Tensor part(const at::Tensor& bytes, const Segment& segment) {
  return bytes.narrow(0, static_cast<std::int64_t>(segment.byte_offset), bytes_of(segment)).view(dtype_of(segment.codec));
}

class DeviceNumbers final : public CollectiveNumbers {
 public:
  DeviceNumbers(const CollectivePlan& plan, std::vector<NamedParameter> parameters)
      : plan_(plan), device_(parameters.at(0).tensor.device()), outer_settings_(outer_settings(plan.settings)) {
    const at::NoGradGuard no_grad;
    check_kernels(device_);
    for (auto& parameter : parameters) {
      if (parameter.tensor.device() != device_) {
        throw ConfigError("parameter '" + parameter.name + "' is on " + parameter.tensor.device().str() +
                          ", others are on " + device_.str() + "; expected all on one device");
      }
      anchors_.push_back(parameter.tensor.detach().to(at::kFloat).reshape({-1}).clone());
      parameters_.push_back(std::move(parameter.tensor));
    }
    for (FragmentId p = 0; p < plan_.size(); ++p) fragments_.push_back(fragment_of(p));
  }

  at::Tensor weights(FragmentId p) override {
    const Scope scope(device_);
    const PayloadLayout& layout = plan_.messages[p].anchor;
    at::Tensor bytes = zeros(layout.bytes);
    for (const Segment& segment : layout.segments) part(bytes, segment).copy_(anchors_[segment.tensor]);
    return bytes;
  }

  void begin(FragmentId p, const at::Tensor& weights) override {
    const Scope scope(device_);
    Fragment& fragment = fragments_[p];
    const PayloadLayout& layout = plan_.messages[p].anchor;
    for (std::size_t i = 0; i < layout.segments.size(); ++i) {
      fragment.theta[i] = part(weights, layout.segments[i]).clone();
      if (!at::isfinite(fragment.theta[i]).all().item<bool>()) {  // once, at the start, the host may wait
        throw ConfigError("the weights of rank 0 are not finite; start from finite ones");
      }
    }
    adopt(p, AdoptFormula::kOverwrite, false);
  }

  std::vector<at::Tensor> stage(FragmentId p, const Work& work) override {
    const Scope scope(device_);
    Fragment& fragment = fragments_[p];
    const FragmentMessage& message = plan_.messages[p];
    const std::vector<at::Tensor>& rows = take_rows(p);
    at::Tensor out = rows[static_cast<std::size_t>(plan_.rank)];
    operator_of<ops::fragment_diff>("fragment_diff").call(parameters_of(p), anchors_of(p), out, fragment.offsets, fragment.bf16);
    std::vector<at::Tensor> finite;
    for (const Segment& segment : message.contribution.segments) finite.push_back(at::isfinite(part(out, segment)).all());
    fragment.finite = at::stack(finite).all();
    const at::Tensor tail = out.narrow(0, static_cast<std::int64_t>(message.work), sizeof(Work));
    const at::Tensor counts = tail.view(at::kLong);
    counts.select(0, 0).fill_(static_cast<std::int64_t>(work.tokens));
    counts.select(0, 1).fill_(static_cast<std::int64_t>(work.steps));
    const at::Tensor reals = tail.view(at::kDouble);
    reals.select(0, 2).fill_(work.weight);
    reals.select(0, 3).fill_(work.lr);
    out.mul_(fragment.finite.to(at::kByte));  // bytes times 0 or 1: poison travels as nothing, with no weight
    return rows;
  }

  std::vector<at::Tensor> stage_again(FragmentId p, const at::Tensor& message) override {
    const Scope scope(device_);
    const std::vector<at::Tensor>& rows = take_rows(p);
    rows[static_cast<std::size_t>(plan_.rank)].copy_(message);
    return rows;
  }

  Merged merge(FragmentId p) override {
    const Scope scope(device_);
    Fragment& fragment = fragments_[p];
    const FragmentMessage& message = plan_.messages[p];
    std::vector<at::Tensor> raw;
    for (const at::Tensor& row : fragment.rows) {
      raw.push_back(row.narrow(0, static_cast<std::int64_t>(message.work), sizeof(Work)).view(at::kDouble).select(0, 2));
    }
    at::Tensor weights = at::stack(raw);
    at::Tensor good = weights.sum().gt(0.0);
    weights = at::where(good, weights, at::ones_like(weights));  // the operators divide by the sum

    std::vector<at::Tensor> theta, outer;
    for (std::size_t i = 0; i < message.contribution.segments.size(); ++i) {
      const at::Tensor gradient = merged_part(fragment, message, i, weights);
      theta.push_back(fragment.theta[i].clone());
      outer.push_back(fragment.outer[i].defined() ? fragment.outer[i].clone() : at::Tensor());
      const auto state = outer[i].defined() ? std::optional<at::Tensor>(outer[i]) : std::nullopt;
      operator_of<ops::outer_step>("outer_step")
          .call(gradient, theta[i], state, outer_settings_, static_cast<std::int64_t>(fragment.outer_steps));
      good = good.logical_and(at::isfinite(as_image(theta[i], message.image.segments[i])).all());
      if (outer[i].defined()) good = good.logical_and(at::isfinite(outer[i]).all());
    }
    for (std::size_t i = 0; i < theta.size(); ++i) {
      fragment.theta[i] = at::where(good, theta[i], fragment.theta[i]);
      if (outer[i].defined()) fragment.outer[i] = at::where(good, outer[i], fragment.outer[i]);
    }
    ++fragment.n;
    ++fragment.outer_steps;
    return {};
  }

  void adopt(FragmentId p, AdoptFormula formula, bool keep_sent) override {
    const Scope scope(device_);
    Fragment& fragment = fragments_[p];
    const FragmentMessage& message = plan_.messages[p];
    const std::vector<at::Tensor> parameters = parameters_of(p), anchors = anchors_of(p);
    std::vector<at::Tensor> next, sent;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      next.push_back(as_image(fragment.theta[i], message.image.segments[i]));
      if (formula == AdoptFormula::kOverwrite) continue;
      if (keep_sent) {
        const at::Tensor& mine = fragment.rows.at(static_cast<std::size_t>(plan_.rank));
        sent.push_back(part(mine, message.contribution.segments[i]).to(at::kFloat));
      }
      const at::Tensor clean = next[i].reshape(parameters[i].sizes()).to(parameters[i].scalar_type());
      if (fragment.finite.defined()) parameters[i].copy_(at::where(fragment.finite, parameters[i], clean));
    }
    const char* names[] = {"overwrite", "blend", "rebase"};
    const auto merged = sent.empty() ? std::nullopt : std::optional<at::TensorList>(sent);
    operator_of<ops::fragment_adopt>("fragment_adopt")
        .call(parameters, anchors, next, merged, names[static_cast<std::size_t>(formula)], plan_.settings.blend_alpha);
    fragment.rows.clear();
  }

  void restore(FragmentId p) override {
    const Scope scope(device_);
    const std::vector<at::Tensor> anchors = anchors_of(p), parameters = parameters_of(p);
    for (std::size_t i = 0; i < anchors.size(); ++i) parameters[i].copy_(anchors[i].reshape(parameters[i].sizes()));
  }

  Version version(FragmentId p) const override { return {kEpoch, fragments_[p].n}; }

  SavedFragment save(FragmentId p) const override {
    const Scope scope(device_);
    const Fragment& fragment = fragments_[p];
    SavedFragment saved{at::cat(fragment.theta).cpu(), {}, fragment.n, fragment.outer_steps};
    // Tensor by tensor here, array by array there.
    const auto arrays = static_cast<std::int64_t>(outer_state_floats(outer_options(plan_.settings)));
    std::vector<at::Tensor> parts;
    for (std::int64_t array = 0; array < arrays; ++array) {
      for (const at::Tensor& outer : fragment.outer) parts.push_back(outer.reshape({arrays, -1}).select(0, array));
    }
    if (!parts.empty()) saved.outer = at::cat(parts).cpu();
    return saved;
  }

  void load(FragmentId p, const SavedFragment& saved) override {
    const Scope scope(device_);
    Fragment& fragment = fragments_[p];
    const PayloadLayout& layout = plan_.messages[p].contribution;
    const auto arrays = static_cast<std::int64_t>(outer_state_floats(outer_options(plan_.settings)));
    for (std::size_t i = 0; i < layout.segments.size(); ++i) {
      const auto at = static_cast<std::int64_t>(layout.segments[i].element_offset);
      const auto numel = static_cast<std::int64_t>(layout.segments[i].numel);
      fragment.theta[i] = saved.theta.narrow(0, at, numel).clone().to(device_);
      if (arrays == 0) continue;
      fragment.outer[i] = saved.outer.reshape({arrays, -1}).narrow(1, at, numel).reshape({-1}).clone().to(device_);
    }
    fragment.n = saved.n;
    fragment.outer_steps = saved.outer_steps;
    fragment.finite = at::Tensor();
    adopt(p, AdoptFormula::kOverwrite, false);
  }

  void read_anchor(std::uint32_t tensor, float* out) override {
    const at::Tensor values = anchors_.at(tensor).cpu();
    if (values.numel() > 0) std::memcpy(out, values.data_ptr(), values.nbytes());
  }

  const char* place() const override { return "on the device"; }

 private:
  struct Fragment {
    std::vector<std::int64_t> offsets;
    c10::List<bool> bf16;
    std::vector<at::Tensor> theta, outer;  // per segment, 1-D f32; outer undefined if there is none
    at::Tensor finite;                     // whether what was staged last was
    std::vector<at::Tensor> rows;
    std::uint64_t n = 0, outer_steps = 0;
  };

  struct Scope {
    explicit Scope(const at::Device& device) : guard(device) {}
    const at::NoGradGuard no_grad;
    const c10::DeviceGuard guard;
  };

  at::TensorOptions options() const { return at::TensorOptions().dtype(at::kByte).device(device_); }
  at::Tensor zeros(std::uint64_t bytes) const { return at::zeros({static_cast<std::int64_t>(bytes)}, options()); }

  const std::vector<at::Tensor>& take_rows(FragmentId p) {
    fragments_[p].rows = at::zeros({plan_.ranks, static_cast<std::int64_t>(plan_.messages[p].bytes)}, options()).unbind();
    return fragments_[p].rows;
  }

  Fragment fragment_of(FragmentId p) const {
    Fragment fragment;
    const auto arrays = static_cast<std::int64_t>(outer_state_floats(outer_options(plan_.settings)));
    for (const Segment& segment : plan_.messages[p].contribution.segments) {
      fragment.offsets.push_back(static_cast<std::int64_t>(segment.byte_offset));
      fragment.bf16.push_back(segment.codec == Codec::kBf16);
      fragment.theta.push_back(anchors_[segment.tensor]);
      const auto numel = static_cast<std::int64_t>(segment.numel);
      fragment.outer.push_back(arrays > 0 ? at::zeros({arrays * numel}, options().dtype(at::kFloat)) : at::Tensor());
    }
    return fragment;
  }

  // Fetched anew: `p.data = ...` is followed. Detached: the operators record no gradient.
  std::vector<at::Tensor> parameters_of(FragmentId p) const {
    std::vector<at::Tensor> out;
    for (const Segment& segment : plan_.messages[p].contribution.segments) {
      out.push_back(parameters_[segment.tensor].detach());
    }
    return out;
  }

  std::vector<at::Tensor> anchors_of(FragmentId p) const {
    std::vector<at::Tensor> out;
    for (const Segment& segment : plan_.messages[p].contribution.segments) out.push_back(anchors_[segment.tensor]);
    return out;
  }

  at::Tensor merged_part(const Fragment& fragment, const FragmentMessage& message, std::size_t i,
                         const at::Tensor& weights) const {
    std::vector<at::Tensor> deltas;
    for (const at::Tensor& row : fragment.rows) {
      deltas.push_back(part(row, message.contribution.segments[i]).to(at::kFloat));
    }
    if (message.use_rda[i]) return operator_of<ops::rda_merge>("rda_merge").call(deltas, weights);
    return operator_of<ops::mean_merge>("mean_merge").call(deltas, weights);
  }

  // What the image of theta says, as f32 again: rounded to bf16 where it travels so.
  static at::Tensor as_image(const at::Tensor& theta, const Segment& segment) {
    return segment.codec == Codec::kBf16 ? theta.to(at::kBFloat16).to(at::kFloat) : theta;
  }

  const CollectivePlan plan_;
  const at::Device device_;
  const std::string outer_settings_;
  std::vector<at::Tensor> parameters_, anchors_;  // in the layout's order; anchors 1-D f32
  std::vector<Fragment> fragments_;
};

}  // namespace

std::unique_ptr<CollectiveNumbers> device_numbers(const CollectivePlan& plan, std::vector<NamedParameter> parameters) {
  return std::make_unique<DeviceNumbers>(plan, std::move(parameters));
}

}  // namespace diloco
