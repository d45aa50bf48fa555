#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "diloco/base/errors.h"
#include "diloco/codec/codec.h"
#include "diloco/learner/mover.h"
#include "diloco/merge/init_fragment.h"
#include "diloco/merge/merge.h"
#include "diloco/torch/collective_numbers.h"

namespace diloco {
namespace {

constexpr std::uint64_t kEpoch = 1;  // versions of a run without a syncer: nobody is ever restarted alone

// A tensor over the first bytes of a buffer, which it keeps alive.
template <class AnyBuffer>
at::Tensor tensor_over(const std::shared_ptr<AnyBuffer>& buffer, std::uint64_t bytes, at::ScalarType dtype) {
  const auto size = static_cast<std::int64_t>(bytes / c10::elementSize(dtype));
  return at::from_blob(const_cast<std::byte*>(buffer->data()), {size}, [buffer](void*) {},
                       at::TensorOptions().dtype(dtype));
}

BufferPtr copy_of(const at::Tensor& tensor) {
  auto out = Buffer::make(tensor.nbytes());
  if (tensor.nbytes() > 0) std::memcpy(out->data(), tensor.data_ptr(), tensor.nbytes());
  return out;
}

class HostNumbers final : public CollectiveNumbers {
 public:
  HostNumbers(const CollectivePlan& plan, std::vector<NamedParameter> parameters)
      : plan_(plan), mover_(std::make_shared<TorchParameterStore>(std::move(parameters))), fragments_(plan.size()) {
    for (FragmentId p = 0; p < plan_.size(); ++p) {
      mover_.append_pieces(plan_.layout, message(p).contribution, &fragments_[p].contribution);
      mover_.append_pieces(plan_.layout, message(p).image, &fragments_[p].image_pieces);
    }
  }

  at::Tensor weights(FragmentId p) override {
    auto buffer = Buffer::make(message(p).anchor.bytes);
    mover_.read_anchor(plan_.layout, message(p).anchor, 0, {buffer->data(), buffer->size()});
    fragments_[p].first = buffer;
    return tensor_over(buffer, buffer->size(), at::kByte);
  }

  void begin(FragmentId p, const at::Tensor&) override {
    InitJob job{message(p).anchor, message(p).image, outer_options(plan_.settings),
                std::exchange(fragments_[p].first, nullptr), {kEpoch, 0}, plan_.settings.chunk_bytes};
    InitResult result = run_init(job, buffers_);
    if (!result.finite) throw ConfigError("the weights of rank 0 are not finite; start from finite ones");
    take(p, std::move(result.state), result.image.bytes);
  }

  std::vector<at::Tensor> stage(FragmentId p, const Work& work) override {
    take_rows(p);
    std::byte* mine = fragments_[p].rows[static_cast<std::size_t>(plan_.rank)]->data();
    mover_.stage(fragments_[p].contribution, mine);
    std::memcpy(mine + message(p).work, &work, sizeof(work));
    return row_tensors(p);
  }

  std::vector<at::Tensor> stage_again(FragmentId p, const at::Tensor& saved) override {
    take_rows(p);
    std::memcpy(fragments_[p].rows[static_cast<std::size_t>(plan_.rank)]->data(), saved.data_ptr(), saved.nbytes());
    return row_tensors(p);
  }

  Merged merge(FragmentId p) override {
    Merged merged;
    MergeJob job = job_of(p, &merged);
    buffers_.keep_at_least(state_bytes(job));
    MergeResult result = run_merge(job, buffers_, serially);
    while (!result.ok) {  // the next weights would not be finite: without the largest contribution
      merged.refused.push_back(static_cast<int>(result.largest_member));
      job.members[result.largest_member].weight = 0.0;
      result = run_merge(job, buffers_, serially);
    }
    fragments_[p].state = result.next;
    fragments_[p].image = result.image.bytes;
    return merged;
  }

  void adopt(FragmentId p, AdoptFormula formula, bool keep_sent) override {
    Fragment& fragment = fragments_[p];
    AdoptFragment action;
    action.fragment = p;
    action.version = fragment.state->version;
    action.formula = formula;
    action.blend_alpha = static_cast<float>(plan_.settings.blend_alpha);
    action.image = fragment.image;
    if (keep_sent) action.sent = fragment.rows.at(static_cast<std::size_t>(plan_.rank));
    mover_.adopt(action, fragment.image_pieces, fragment.contribution);
    give_rows(p);
    fragment.image = nullptr;  // the anchor has it now
  }

  void restore(FragmentId p) override {
    AdoptFragment action;  // without an image: the anchor
    action.fragment = p;
    action.formula = AdoptFormula::kOverwrite;
    mover_.adopt(action, fragments_[p].image_pieces, {});
  }

  Version version(FragmentId p) const override { return fragments_[p].state->version; }

  SavedFragment save(FragmentId p) const override {
    const FragmentState& state = *fragments_[p].state;
    SavedFragment saved{tensor_over(state.theta, state.theta->size(), at::kFloat), {}, state.version.n, state.outer_steps};
    if (state.outer_state) saved.outer = tensor_over(state.outer_state, state.outer_state->size(), at::kFloat);
    return saved;
  }

  void load(FragmentId p, const SavedFragment& saved) override {
    auto state = std::make_shared<FragmentState>();
    state->version = {kEpoch, saved.n};
    state->theta = copy_of(saved.theta);
    if (saved.outer.defined()) state->outer_state = copy_of(saved.outer);
    state->outer_steps = saved.outer_steps;
    auto image = Buffer::make(message(p).image.bytes);
    encode_payload(message(p).image, state->theta->f32(), image->data());
    take(p, std::move(state), std::move(image));
  }

  void read_anchor(std::uint32_t tensor, float* out) override { mover_.copy_anchor(tensor, out); }
  const char* place() const override { return "in host memory"; }

 private:
  struct Fragment {
    std::vector<Piece> contribution, image_pieces;
    std::shared_ptr<const FragmentState> state;
    ConstBufferPtr image;         // of `state`, until it is adopted
    BufferPtr first;              // between weights() and begin()
    std::vector<BufferPtr> rows;  // messages of all ranks, between stage() and adopt()
  };

  const FragmentMessage& message(FragmentId p) const { return plan_.messages[p]; }

  // Rows are used again: touching fresh memory costs as much as receiving into it. There are as many as were ever under
  // way at once, each for the largest message.
  void take_rows(FragmentId p) {
    give_rows(p);
    std::uint64_t largest = 0;
    for (const auto& one : plan_.messages) largest = std::max(largest, one.bytes);
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      if (idle_.empty()) idle_.push_back(Buffer::make(largest));
      fragments_[p].rows.push_back(std::move(idle_.back()));
      idle_.pop_back();
    }
  }

  void give_rows(FragmentId p) {
    for (BufferPtr& row : fragments_[p].rows) idle_.push_back(std::move(row));
    fragments_[p].rows.clear();
  }

  std::vector<at::Tensor> row_tensors(FragmentId p) const {
    std::vector<at::Tensor> tensors;
    for (const BufferPtr& row : fragments_[p].rows) tensors.push_back(tensor_over(row, message(p).bytes, at::kByte));
    return tensors;
  }

  void take(FragmentId p, std::shared_ptr<const FragmentState> state, ConstBufferPtr image) {
    fragments_[p].state = std::move(state);
    fragments_[p].image = std::move(image);
    adopt(p, AdoptFormula::kOverwrite, false);
  }

  MergeJob job_of(FragmentId p, Merged* merged) const {
    const Fragment& fragment = fragments_[p];
    MergeJob job;
    job.in = message(p).contribution;
    job.out = message(p).image;
    job.use_rda = message(p).use_rda;
    job.outer = outer_options(plan_.settings);
    job.previous = fragment.state;
    job.next_version = {kEpoch, fragment.state->version.n + 1};
    job.chunk_bytes = plan_.settings.chunk_bytes;
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      const BufferPtr& row = fragment.rows.at(static_cast<std::size_t>(rank));
      Work work;
      std::memcpy(&work, row->data() + message(p).work, sizeof(work));
      merged->works.push_back(work);
      ScreenResult screened = screen(job.in, row->data());
      if (!screened.finite) merged->refused.push_back(rank);
      const double weight = screened.finite ? work.weight : 0.0;
      const bool moved = std::any_of(screened.norms.begin(), screened.norms.end(), [](double norm) { return norm > 0.0; });
      if (moved && rank > 0 && screened.norms == job.members.back().norms) merged->twin = rank;
      job.members.push_back({"rank " + std::to_string(rank), row, weight, std::move(screened.norms), nullptr});
    }
    return job;
  }

  const CollectivePlan plan_;
  Mover mover_;
  std::vector<Fragment> fragments_;
  std::vector<BufferPtr> idle_;
  BufferPool buffers_;  // of the states that merges make
};

}  // namespace

std::unique_ptr<CollectiveNumbers> host_numbers(const CollectivePlan& plan, std::vector<NamedParameter> parameters) {
  return std::make_unique<HostNumbers>(plan, std::move(parameters));
}

}  // namespace diloco
