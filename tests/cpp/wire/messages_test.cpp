#include "diloco/wire/messages.h"

#include <gtest/gtest.h>

#include "wire/wire_samples.h"

namespace diloco::wire_test {
namespace {

constexpr int kRounds = 300;

TEST(WireMessages, EncodingSurvivesDecodingForEveryKind) {
  Random random(11);
  for (const Kind& kind : kinds()) {
    for (int i = 0; i < kRounds; ++i) {
      const std::string bytes = kind.sample(random);
      std::string why;
      ASSERT_TRUE(kind.decodes(as_bytes(bytes), &why)) << kind.name << ": " << why;
      ASSERT_EQ(kind.again(as_bytes(bytes)), bytes) << kind.name;
    }
  }
}

TEST(WireMessages, HelloKeepsEveryField) {
  Random random(12);
  for (int i = 0; i < kRounds; ++i) {
    const Hello m = any_hello(random);
    const Hello back = decode_hello(as_bytes(encode(m)), nullptr).value();
    EXPECT_EQ(back.learner_id, m.learner_id);
    EXPECT_EQ(back.run_id, m.run_id);
    EXPECT_EQ(back.host, m.host);
    EXPECT_EQ(back.pid, m.pid);
    EXPECT_EQ(back.role, m.role);
    EXPECT_EQ(back.software, m.software);
    EXPECT_EQ(back.highest_epoch, m.highest_epoch);
    EXPECT_TRUE(back.layout == m.layout);
    EXPECT_EQ(back.grown_from, m.grown_from);
    EXPECT_EQ(back.adopted, m.adopted);
    EXPECT_EQ(back.merged_to, m.merged_to);
    EXPECT_EQ(back.settings, m.settings);
    EXPECT_EQ(back.tokens, m.tokens);
    EXPECT_EQ(back.steps, m.steps);
    EXPECT_EQ(back.clock, m.clock);
    EXPECT_EQ(back.downlink_credit, m.downlink_credit);
    EXPECT_EQ(back.ranks, m.ranks);
    EXPECT_EQ(back.parts, m.parts);
    EXPECT_EQ(back.part, m.part);
  }
}

TEST(WireMessages, HelloOfOneProcessSaysNothingOfIslands) {
  Random random(14);
  Hello m = any_hello(random);
  m.ranks = m.parts = 1;
  m.part.clear();
  const std::string bytes = encode(m);
  EXPECT_EQ(bytes.find("ranks"), std::string::npos);
  EXPECT_EQ(decode_hello(as_bytes(bytes), nullptr).value().ranks, 1u);
}

TEST(WireMessages, HelloOfAnIslandHasAPartOfEveryTensorAndSensibleNumbers) {
  Random random(15);
  const auto refused = [&](const std::function<void(Hello&)>& change) {
    Hello m = any_hello(random);
    m.role = Role::kLearner;
    m.ranks = 4, m.parts = 2;
    m.part = any_part(random, m.layout.tensors.size());
    change(m);
    std::string why;
    EXPECT_FALSE(decode_hello(as_bytes(encode(m)), &why).has_value());
    return why;
  };
  EXPECT_NE(refused([](Hello& m) { m.parts = 5; }).find("ranks = 4 and parts = 5"), std::string::npos);
  EXPECT_NE(refused([](Hello& m) { m.parts = 0; }).find("parts = 0"), std::string::npos);
  EXPECT_NE(refused([](Hello& m) { m.ranks = 1 << 20, m.parts = kMaxParts + 1; }).find("at most 4096 parts"),
            std::string::npos);
  EXPECT_NE(refused([](Hello& m) { m.part.emplace_back(); }).find("part has"), std::string::npos);
  EXPECT_NE(refused([](Hello& m) { m.part[0] = {{1}, {1, 2}, false}; }).find("part[0].shape has 2 entries, expected 1"),
            std::string::npos);
}

TEST(WireMessages, WhatNeverGrewSaysNothingOfIt) {
  Random random(16);
  Hello hello = any_hello(random);
  hello.grown_from.clear();
  EXPECT_EQ(encode(hello).find("grown_from"), std::string::npos);
  Welcome welcome = any_welcome(random);
  welcome.grown_from.clear();
  EXPECT_EQ(encode(welcome).find("grown_from"), std::string::npos);
}

TEST(WireMessages, WelcomeKeepsEveryField) {
  Random random(13);
  for (int i = 0; i < kRounds; ++i) {
    const Welcome m = any_welcome(random);
    const Welcome back = decode_welcome(as_bytes(encode(m)), nullptr).value();
    EXPECT_EQ(back.lane_token, m.lane_token);
    EXPECT_TRUE(back.layout == m.layout);
    EXPECT_TRUE(back.plan == m.plan);
    EXPECT_EQ(back.grown_from, m.grown_from);
    EXPECT_EQ(back.settings, m.settings);
    EXPECT_EQ(back.versions, m.versions);
    EXPECT_EQ(back.merged_to, m.merged_to);
    EXPECT_EQ(back.held, m.held);
  }
}

TEST(WireMessages, StepKeepsEveryFieldAndItsSize) {
  Random random(14);
  for (int i = 0; i < kRounds; ++i) {
    const Step m = any_step(random);
    const std::string bytes = encode(m);
    EXPECT_EQ(bytes.size(), 32 + 20 * m.adopted.size());
    const Step back = decode_step(as_bytes(bytes), nullptr).value();
    EXPECT_EQ(back.clock, m.clock);
    EXPECT_EQ(back.steps, m.steps);
    EXPECT_EQ(back.tokens, m.tokens);
    ASSERT_EQ(back.adopted.size(), m.adopted.size());
    for (std::size_t k = 0; k < m.adopted.size(); ++k) {
      EXPECT_EQ(back.adopted[k].fragment, m.adopted[k].fragment);
      EXPECT_EQ(back.adopted[k].version, m.adopted[k].version);
    }
  }
}

TEST(WireMessages, BeginKeepsEveryField) {
  Random random(15);
  for (int i = 0; i < kRounds; ++i) {
    const Begin m = any_begin(random);
    const Begin back = decode_begin(as_bytes(encode(m)), nullptr).value();
    EXPECT_EQ(back.kind, m.kind);
    EXPECT_EQ(back.fragment, m.fragment);
    EXPECT_EQ(back.round, m.round);
    EXPECT_EQ(back.base, m.base);
    EXPECT_EQ(back.from, m.from);
    EXPECT_EQ(back.to, m.to);
    EXPECT_EQ(back.c_steps, m.c_steps);
    EXPECT_EQ(back.clock, m.clock);
    EXPECT_EQ(back.merged, m.merged);
  }
}

TEST(WireMessages, PullVerdictHeartbeatArmRejectGoodbyeKeepEveryField) {
  Random random(16);
  for (int i = 0; i < kRounds; ++i) {
    const Pull p = any_pull(random);
    const Pull pull = decode_pull(as_bytes(encode(p)), nullptr).value();
    EXPECT_EQ(std::tie(pull.kind, pull.fragment, pull.round, pull.clock, pull.merged_to, pull.held_to),
              std::tie(p.kind, p.fragment, p.round, p.clock, p.merged_to, p.held_to));
    const Verdict v = any_verdict(random);
    const Verdict verdict = decode_verdict(as_bytes(encode(v)), nullptr).value();
    EXPECT_EQ(std::tie(verdict.fragment, verdict.from, verdict.to, verdict.reason, verdict.readopt, verdict.text),
              std::tie(v.fragment, v.from, v.to, v.reason, v.readopt, v.text));
    const Heartbeat h = any_heartbeat(random);
    const Heartbeat heartbeat = decode_heartbeat(as_bytes(encode(h)), nullptr).value();
    EXPECT_EQ(std::tie(heartbeat.probe, heartbeat.discarded, heartbeat.lr),
              std::tie(h.probe, h.discarded, h.lr));
    const Arm a = any_arm(random);
    EXPECT_EQ(decode_arm(as_bytes(encode(a)), nullptr).value().fragments, a.fragments);
    const Reject r{any_text(random, 20), any_text(random, 90)};
    const Reject reject = decode_reject(as_bytes(encode(r)), nullptr).value();
    EXPECT_EQ(std::tie(reject.code, reject.text), std::tie(r.code, r.text));
    const Goodbye g{any_text(random, 90)};
    EXPECT_EQ(decode_goodbye(as_bytes(encode(g)), nullptr).value().reason, g.reason);
  }
}

TEST(WireMessages, AnEmptyHeartbeatIsOne) {
  const auto heartbeat = decode_heartbeat({}, nullptr);
  ASSERT_TRUE(heartbeat.has_value());
  EXPECT_FALSE(heartbeat->probe);
  EXPECT_TRUE(heartbeat->discarded.empty());
}

TEST(WireMessages, EdgeNumbersSurvive) {
  Step step{~0ull, ~0ull, ~0ull, {{~0u, {~0ull, ~0ull}}}};
  EXPECT_EQ(decode_step(as_bytes(encode(step)), nullptr).value().tokens, ~0ull);
  Verdict verdict;
  verdict.from = 0;
  verdict.to = ~0ull;
  EXPECT_EQ(decode_verdict(as_bytes(encode(verdict)), nullptr).value().to, ~0ull);
  Hello hello;
  hello.learner_id = std::string(64, 'x');
  hello.layout.tensors = {{"a", {std::int64_t{1} << 62}, Dtype::kBf16, {}}, {"zero", {0, std::int64_t{1} << 40, std::int64_t{1} << 40}, Dtype::kF32, {}}, {"scalar", {}, Dtype::kF64, {}}};
  EXPECT_FALSE(decode_hello(as_bytes(encode(hello)), nullptr).has_value());  // one element too many
  hello.layout.tensors.pop_back();
  std::string why;
  EXPECT_TRUE(decode_hello(as_bytes(encode(hello)), &why).has_value()) << why;
}

TEST(WireMessages, ManyTensorsFitTheLimits) {
  Hello hello;
  hello.learner_id = "big";
  for (int i = 0; i < 50000; ++i) {
    hello.layout.tensors.push_back({"model.layers." + std::to_string(i) + ".mlp.weight", {4096, 4096}, Dtype::kBf16, {}});
  }
  hello.adopted.resize(24);
  hello.merged_to.resize(24);
  const std::string bytes = encode(hello);
  EXPECT_LE(bytes.size(), max_payload_bytes(MessageType::kHello, 0));
  std::string why;
  EXPECT_TRUE(decode_hello(as_bytes(bytes), &why).has_value()) << why;
}

}  // namespace
}  // namespace diloco::wire_test
