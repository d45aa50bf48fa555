#include "diloco/learner/mover.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "diloco/base/errors.h"
#include "diloco/codec/codec.h"
#include "learner/array_store.h"

namespace diloco {
namespace {

using testing::ArrayStore;

// The run registered the same tensors in another order.
struct MoverTest : ::testing::Test {
  void SetUp() override {
    for (auto& tensor : store->values) {
      for (float& v : tensor) v = next++;
    }
    settings.num_fragments = 1;
    mover = std::make_unique<Mover>(store);
    run.tensors = {store->layout().tensors[2], store->layout().tensors[0], store->layout().tensors[1]};
    plan = make_plan(run, Fragmenter::kBalanced, 1);
  }
  PayloadLayout payload(PayloadKind kind) const { return payload_layout(run, plan, 0, kind, settings); }
  std::vector<Piece> pieces(PayloadKind kind) const {
    std::vector<Piece> result;
    mover->append_pieces(run, payload(kind), &result);
    return result;
  }

  float next = 1.0f;
  std::shared_ptr<ArrayStore> store =
      std::make_shared<ArrayStore>(std::vector<testing::NamedShape>{{"z", {5, 3}}, {"empty", {0, 4}}, {"a", {7}}});
  Settings settings;
  std::unique_ptr<Mover> mover;
  Layout run;
  Plan plan;
};

TEST_F(MoverTest, AnchorPayloadIsTheSameReadWholeOrInAnyPieces) {
  const PayloadLayout layout = payload(PayloadKind::kAnchor);
  std::vector<std::byte> whole(layout.bytes);
  mover->read_anchor(run, layout, 0, whole);
  std::vector<float> dense(layout.numel);
  decode_payload(layout, whole.data(), dense.data());
  EXPECT_EQ(dense.front(), store->values[2][0]) << "'a' comes first by name";
  for (const std::size_t size : {1u, 3u, 64u, 65u}) {
    std::vector<std::byte> parts(layout.bytes);
    for (std::size_t at = 0; at < parts.size(); at += size) {
      mover->read_anchor(run, layout, at, std::span(parts).subspan(at, std::min(size, parts.size() - at)));
    }
    EXPECT_EQ(parts, whole) << size;
  }
}

TEST_F(MoverTest, StagesAnchorMinusLocal) {
  for (float& v : store->values[0]) v -= 0.5f;
  const PayloadLayout layout = payload(PayloadKind::kContribution);
  std::vector<std::byte> out(layout.bytes);
  mover->stage(pieces(PayloadKind::kContribution), out.data());
  std::vector<float> dense(layout.numel);
  decode_payload(layout, out.data(), dense.data());
  for (std::size_t i = 0; i < dense.size(); ++i) EXPECT_EQ(dense[i], i < 7 ? 0.0f : 0.5f) << i;
}

TEST_F(MoverTest, RebaseAddsWhatWasSentOnce) {
  const auto before = store->values;
  for (float& v : store->values[0]) v -= 2.0f;  // displacement 2, of which 1.5 was sent
  const PayloadLayout image_layout = payload(PayloadKind::kImage);
  const PayloadLayout sent_layout = payload(PayloadKind::kContribution);
  std::vector<float> image_dense(image_layout.numel, 10.0f);
  std::vector<float> sent_dense(sent_layout.numel);
  for (std::size_t i = 7; i < sent_dense.size(); ++i) sent_dense[i] = 1.5f;
  auto image = Buffer::make(image_layout.bytes);
  auto sent = Buffer::make(sent_layout.bytes);
  encode_payload(image_layout, image_dense.data(), image->data());
  encode_payload(sent_layout, sent_dense.data(), sent->data());
  AdoptFragment action;
  action.image = image;
  action.sent = sent;
  mover->adopt(action, pieces(PayloadKind::kImage), pieces(PayloadKind::kContribution));
  for (const float v : store->values[0]) EXPECT_EQ(v, 9.5f);
  for (const float v : store->values[2]) EXPECT_EQ(v, 10.0f);
}

TEST_F(MoverTest, ReadoptionGoesBackToTheAnchor) {
  const auto before = store->values;
  for (auto& tensor : store->values) {
    for (float& v : tensor) v = -1.0f;
  }
  AdoptFragment action;
  action.formula = AdoptFormula::kOverwrite;
  mover->adopt(action, pieces(PayloadKind::kImage), {});
  EXPECT_EQ(store->values, before);
}

TEST_F(MoverTest, ShortPayloadIsAnErrorNotARead) {
  AdoptFragment action;
  action.image = Buffer::make(8);
  EXPECT_THROW(mover->adopt(action, pieces(PayloadKind::kImage), {}), std::logic_error);
}

TEST(Mover, ModelWithoutParametersIsRefused) {
  EXPECT_THROW(Mover(std::make_shared<ArrayStore>(std::vector<testing::NamedShape>{})), ConfigError);
}

}  // namespace
}  // namespace diloco
