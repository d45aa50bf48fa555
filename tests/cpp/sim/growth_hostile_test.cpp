// HELLOs about growth that no well-behaved learner says, and islands in a run that grows.
#include "sim/bare_syncer.h"

namespace diloco::sim {
namespace {

struct HostileGrowth : BareSyncer {
  // HELLO and, if it is admitted, LANE; false if it was refused.
  bool hello(PeerId control, Incarnation incarnation, Layout own, std::vector<std::uint32_t> grown_from,
             std::uint32_t ranks = 1) {
    sent.clear();
    Hello hello;
    hello.learner_id = "learner-" + std::to_string(incarnation);
    hello.layout = std::move(own);
    hello.grown_from = std::move(grown_from);
    hello.downlink_credit = 1 << 20;
    hello.ranks = ranks;
    frame(control, header_of(MessageType::kHello, incarnation), encode(hello));
    const OutFrame* welcome = last(control, MessageType::kWelcome);
    if (!welcome) return false;
    std::string why;
    const auto body = decode_welcome(std::as_bytes(std::span(welcome->body.data(), welcome->body.size())), &why);
    EXPECT_TRUE(body) << why;
    Header lane = header_of(MessageType::kLane, incarnation, welcome->header.session);
    lane.transfer = body->lane_token;
    frame(control + 1, lane);
    return true;
  }
  Layout with(const std::string& name, std::vector<std::string> aliases = {}) const {
    Layout grown = layout;
    grown.tensors.push_back({name, {3}, Dtype::kF32, std::move(aliases)});
    return grown;
  }
  // Of a learner that knows an earlier life of the syncer.
  Hello from_before(Layout own) const {
    Hello hello;
    hello.learner_id = "before";
    hello.layout = std::move(own);
    hello.grown_from = {began};
    hello.highest_epoch = 6;
    hello.downlink_credit = 1 << 20;
    return hello;
  }
  std::size_t tensors() const { return core->layout().tensors.size(); }
  const std::uint32_t began = static_cast<std::uint32_t>(layout.tensors.size());
};

TEST_F(HostileGrowth, TensorsThatMakeNoLayoutAreRefused) {
  make();
  ASSERT_TRUE(hello(10, 1, layout, {}));
  for (const Incarnation who : {2u, 3u}) EXPECT_FALSE(hello(10 * who, who, with("x", {"y", "y"}), {began}));
  EXPECT_EQ(tensors(), began);
  EXPECT_TRUE(hello(40, 4, layout, {}));
}

TEST_F(HostileGrowth, AnIslandStaysInARunThatGrows) {
  make();
  ASSERT_TRUE(hello(10, 1, layout, {}, 2));
  ASSERT_TRUE(hello(20, 2, with("x"), {began}));
  ASSERT_TRUE(hello(30, 3, with("x"), {began}));
  ASSERT_EQ(tensors(), began + 1);
  handle(PeerGoneEvent{10, "cable"});
  EXPECT_TRUE(hello(40, 1, layout, {}, 2)) << "it comes back";
  EXPECT_FALSE(hello(50, 5, with("y"), {began}, 2)) << "but adds nothing";
}

// The first at a syncer that has lost its state brings nothing in that it has alone: others are on their way.
TEST_F(HostileGrowth, WhoComesBackFirstIsNotTheOnlyOne) {
  make();
  frame(20, header_of(MessageType::kHello, 2), encode(from_before(with("mine"))));
  ASSERT_GT(core->epoch(), 6u);
  EXPECT_EQ(tensors(), began);
  ASSERT_TRUE(hello(30, 3, with("head"), {began}));
  ASSERT_TRUE(hello(40, 4, with("head"), {began}));
  EXPECT_EQ(tensors(), began + 1);
  EXPECT_EQ(core->layout().tensors.back().name, "head");
}

// What the run had in an earlier life, it has again: who has adopted versions of it is the proof.
TEST_F(HostileGrowth, WhatAnEarlierLifeHadIsTakenAtOnce) {
  make();
  Hello before = from_before(with("head"));
  before.adopted = {{6, 3}, {6, 3}, {6, 2}};
  before.merged_to = {9, 9, 9};
  frame(20, header_of(MessageType::kHello, 2), encode(before));
  EXPECT_EQ(tensors(), began + 1);
  EXPECT_EQ(count(20, MessageType::kWelcome), 1u);
}

}  // namespace
}  // namespace diloco::sim
