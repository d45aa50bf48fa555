#include "diloco/torch/collective.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <exception>
#include <limits>
#include <thread>

#include "diloco/base/errors.h"
#include "fake_group.h"

namespace diloco {
namespace {

using testing::FakeGroup;
using testing::FakeRoom;
using SettingTexts = std::map<std::string, std::string>;

const SettingTexts kPlain = {{"sync_every", "4"},  {"num_fragments", "1"}, {"overlap_steps", "2"}, {"merge", "mean"},
                             {"wire_dtype", "f32"}, {"weights", "equal"},   {"adopt", "overwrite"}};

SettingTexts with(SettingTexts base, const SettingTexts& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

// Two ranks of one group, each with a model of a matrix and a vector.
struct Job {
  struct Rank {
    at::Tensor matrix = at::zeros({3, 4}), vector = at::zeros({5});
    SettingTexts settings;
    std::vector<std::string> log;
    c10::intrusive_ptr<FakeGroup> group, control;
    std::unique_ptr<CollectiveLearner> learner;
    std::string refused;
  };

  explicit Job(SettingTexts settings = kPlain, bool on_device = false) : on_device(on_device) {
    for (int r = 0; r < 2; ++r) {
      ranks[r].settings = settings;
      ranks[r].group = c10::make_intrusive<FakeGroup>(room, r);
      ranks[r].control = c10::make_intrusive<FakeGroup>(control_room, r);
    }
  }

  void start() {
    each([this](Rank& rank) {
      try {
        rank.learner = std::make_unique<CollectiveLearner>(
            std::vector<NamedParameter>{{"matrix", rank.matrix, {}}, {"vector", rank.vector, {}}},
            Collectives(rank.group), Collectives(rank.control),
            CollectiveOptions{rank.settings, on_device, [&rank](LogLevel, const std::string& text) { rank.log.push_back(text); }});
      } catch (const ConfigError& error) {
        rank.refused = error.what();
      }
    });
  }

  // On a thread each, as they wait for one another; what one throws is thrown here.
  template <class F>
  void each(F work) {
    std::exception_ptr thrown;
    std::thread other([&] {
      try {
        work(ranks[1]);
      } catch (...) {
        thrown = std::current_exception();
      }
    });
    try {
      work(ranks[0]);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
    if (thrown) std::rethrow_exception(thrown);
  }

  void steps(int count, std::uint64_t tokens = 10) {
    each([&](Rank& rank) {
      for (int i = 0; i < count; ++i) rank.learner->boundary({tokens, 0.1});
    });
  }

  bool on_device;
  std::shared_ptr<FakeRoom> room = std::make_shared<FakeRoom>(2), control_room = std::make_shared<FakeRoom>(2);
  std::array<Rank, 2> ranks;
};

TEST(CollectiveLearner, StartsFromTheWeightsOfRank0) {
  Job job;
  job.ranks[0].matrix.fill_(2.0f);
  job.ranks[1].matrix.fill_(7.0f);
  job.start();
  for (const auto& rank : job.ranks) EXPECT_TRUE(at::equal(rank.matrix, at::full({3, 4}, 2.0f)));
}

TEST(CollectiveLearner, MergesStepsOuterAndAdopts) {
  Job job(with(kPlain, {{"overlap_steps", "0"}, {"outer_lr", "0.5"}}));
  job.start();
  job.ranks[0].matrix.fill_(1.0f);
  job.ranks[1].matrix.fill_(3.0f);
  job.steps(3);
  EXPECT_TRUE(at::equal(job.ranks[1].matrix, at::full({3, 4}, 3.0f)));  // not yet
  job.steps(1);
  // theta = 0 - 0.5 * mean(-1, -3)
  for (const auto& rank : job.ranks) EXPECT_TRUE(at::equal(rank.matrix, at::full({3, 4}, 1.0f)));
  const CollectiveStats stats = job.ranks[0].learner->stats();
  EXPECT_EQ(stats.merges, 1u);
  EXPECT_EQ(stats.tokens_merged, 40u);
  EXPECT_EQ(stats.tokens_outstanding, 0u);
  EXPECT_EQ(stats.versions, (std::vector<Version>{{1, 1}}));
}

TEST(CollectiveLearner, TokensWeigh) {
  Job job(with(kPlain, {{"overlap_steps", "0"}, {"weights", "tokens"}}));
  job.start();
  job.ranks[0].matrix.fill_(1.0f);
  job.ranks[1].matrix.fill_(2.0f);
  job.each([&](Job::Rank& rank) {
    const std::uint64_t tokens = &rank == &job.ranks[0] ? 30 : 10;
    for (int i = 0; i < 4; ++i) rank.learner->boundary({tokens, 0.0});
  });
  EXPECT_TRUE(at::allclose(job.ranks[0].matrix, at::full({3, 4}, 1.25f)));
  EXPECT_TRUE(at::equal(job.ranks[0].matrix, job.ranks[1].matrix));
}

TEST(CollectiveLearner, WithoutTokensNothingMoves) {
  Job job(with(kPlain, {{"overlap_steps", "0"}, {"outer_optimizer", "nesterov"}, {"outer_momentum", "0.9"}}));
  job.start();
  job.ranks[0].matrix.fill_(1.0f);
  job.steps(4, 0);
  for (const auto& rank : job.ranks) EXPECT_TRUE(at::equal(rank.matrix, at::zeros({3, 4})));
}

TEST(CollectiveLearner, StagingWaitsForNobodyAndAdoptionIsLater) {
  Job job;  // staged at step 2, adopted at step 4
  job.start();
  auto& learner = *job.ranks[0].learner;
  const std::size_t before = job.ranks[0].group->calls.size();
  for (int step = 1; step <= 3; ++step) EXPECT_EQ(learner.boundary({10, 0.0}).adopted, 0u);  // alone
  ASSERT_EQ(job.ranks[0].group->calls.size(), before + 2);  // a broadcast from each rank
  EXPECT_EQ(job.ranks[0].group->calls.back().op, "broadcast");
  EXPECT_FALSE(job.ranks[0].group->calls.back().work->isCompleted());
  EXPECT_GT(learner.stats().under_way_bytes, 0u);
  for (int step = 1; step <= 2; ++step) job.ranks[1].learner->boundary({10, 0.0});
  EXPECT_TRUE(job.ranks[0].group->calls.back().work->isCompleted());
  EXPECT_EQ(learner.boundary({10, 0.0}).adopted, 1u);
  EXPECT_EQ(learner.stats().under_way_bytes, 0u);
  EXPECT_EQ(learner.stats().discarded.at("overwritten"), 20u);
}

TEST(CollectiveLearner, WaitsForTheOthersAtTheAdoptionStepAndCanBeInterrupted) {
  Job job;
  job.start();
  auto& learner = *job.ranks[0].learner;
  for (int step = 1; step <= 3; ++step) learner.boundary({10, 0.0});
  struct Stop {};
  EXPECT_THROW(learner.boundary({10, 0.0}, [] { throw Stop(); }), Stop);
  EXPECT_THROW(learner.boundary({10, 0.0}), TransportError);  // out of step with the others now
  EXPECT_EQ(learner.stats().state, "failed");
}

TEST(CollectiveLearner, OnADeviceTheHostNeverWaits) {
  Job job(kPlain, true);
  job.start();
  job.steps(12);
  for (const auto& rank : job.ranks) {
    EXPECT_EQ(rank.learner->stats().merges, 3u);
    int stream_waits = 0;
    for (const auto& call : rank.group->calls) {
      EXPECT_EQ(call.work->host_waits, 0) << call.op;
      EXPECT_EQ(call.dtype, at::kByte);
      EXPECT_EQ(call.op, &call < &rank.group->calls[1] ? "broadcast" : "all_gather");
      stream_waits += call.work->stream_waits;
    }
    EXPECT_EQ(stream_waits, 4);  // the first weights, and one for each merge
  }
}

TEST(CollectiveLearner, PoisonDoesNotCountAndItsRankStartsAgainFromTheGlobalWeights) {
  Job job(with(kPlain, {{"num_fragments", "2"}, {"overlap_steps", "0"}, {"max_bad_payloads", "2"}}));
  job.start();
  job.ranks[0].matrix.fill_(1.0f);
  job.ranks[0].vector.fill_(1.0f);
  job.ranks[1].matrix.fill_(std::numeric_limits<float>::quiet_NaN());
  job.ranks[1].vector.fill_(5.0f);
  std::array<bool, 2> reset{};
  job.each([&](Job::Rank& rank) {
    for (int i = 0; i < 2; ++i) reset[&rank == &job.ranks[1]] |= rank.learner->boundary({10, 0.0}).reset;
  });
  // The matrix is due at step 2, the vector at 4.
  EXPECT_EQ(reset, (std::array<bool, 2>{false, true}));
  for (const auto& rank : job.ranks) EXPECT_TRUE(at::equal(rank.matrix, at::full({3, 4}, 1.0f)));
  EXPECT_TRUE(at::equal(job.ranks[1].vector, at::zeros({5})));
  EXPECT_EQ(job.ranks[1].learner->stats().discarded.at("nonfinite"), 40u);  // 20 tokens on each of two fragments
  EXPECT_EQ(job.ranks[1].learner->stats().tokens_merged, 0u);

  job.ranks[1].vector.fill_(std::numeric_limits<float>::infinity());
  std::array<std::string, 2> why;
  job.each([&](Job::Rank& rank) {
    try {
      for (int i = 0; i < 2; ++i) rank.learner->boundary({10, 0.0});
    } catch (const ConfigError& error) {
      why[&rank == &job.ranks[1]] = error.what();
    }
  });
  EXPECT_NE(why[0].find("rank 1 sent 2 contributions that were not finite (max_bad_payloads)"), std::string::npos) << why[0];
  EXPECT_EQ(why[0], why[1]);
}

TEST(CollectiveLearner, Rank0WarnsOnceOfLearningRatesThatStayFarApart) {
  Job job(with(kPlain, {{"sync_every", "1"}, {"overlap_steps", "0"}}));
  job.start();
  job.each([&](Job::Rank& rank) {
    rank.log.clear();
    for (int i = 0; i < 12; ++i) rank.learner->boundary({10, &rank == &job.ranks[0] ? 0.1 : 0.5});
  });
  ASSERT_EQ(job.ranks[0].log.size(), 1u);
  EXPECT_TRUE(job.ranks[0].log[0].starts_with("rank 1 trains with learning rate 0.5")) << job.ranks[0].log[0];
  EXPECT_TRUE(job.ranks[1].log.empty());
}

TEST(CollectiveLearner, Rank0WarnsOnceOfEqualContributions) {
  Job job(with(kPlain, {{"sync_every", "1"}, {"overlap_steps", "0"}}));
  job.start();
  job.each([&](Job::Rank& rank) {
    rank.log.clear();
    for (int i = 0; i < 3; ++i) {
      rank.learner->boundary({10, 0.1});  // equal, but for nothing: nobody has moved
      rank.matrix.add_(1.0f);
    }
  });
  ASSERT_EQ(job.ranks[0].log.size(), 1u);
  EXPECT_TRUE(job.ranks[0].log[0].starts_with("rank 0 and rank 1 sent equal contributions")) << job.ranks[0].log[0];
}

TEST(CollectiveLearner, ADisagreementIsRefusedOnAllRanks) {
  Job settings;
  settings.ranks[1].settings["outer_lr"] = "0.5";
  settings.start();
  EXPECT_EQ(settings.ranks[0].refused, settings.ranks[1].refused);
  EXPECT_NE(settings.ranks[0].refused.find("rank 1 has outer_lr = 0.5, rank 0 has 1"), std::string::npos)
      << settings.ranks[0].refused;

  Job model;
  model.ranks[1].vector = at::zeros({6});
  model.start();
  EXPECT_EQ(model.ranks[0].refused, model.ranks[1].refused);
  EXPECT_NE(model.ranks[0].refused.find("parameter 'vector': rank 1 has float32 (6,), rank 0 has float32 (5,)"),
            std::string::npos)
      << model.ranks[0].refused;

  Job alone;  // what one rank refuses, the others hear
  alone.ranks[1].settings["min_quorum"] = "2";
  alone.start();
  EXPECT_EQ(alone.ranks[0].refused, alone.ranks[1].refused);
  EXPECT_TRUE(alone.ranks[0].refused.starts_with("rank 1: min_quorum means nothing without a syncer"))
      << alone.ranks[0].refused;
}

TEST(CollectiveLearner, AGroupThatFailedStaysFailed) {
  Job job;
  job.start();
  job.room->failure = "Connection closed by peer";
  auto& learner = *job.ranks[0].learner;
  learner.boundary({10, 0.0});
  EXPECT_THROW(learner.boundary({10, 0.0}), TransportError);
  EXPECT_THROW(learner.boundary({10, 0.0}), TransportError);
  EXPECT_EQ(learner.stats().state, "failed");
  learner.close(1.0);
  EXPECT_THROW(learner.boundary({10, 0.0}), std::logic_error);
}

TEST(CollectiveSettings, RefusesByName) {
  const auto why = [](const SettingTexts& given) -> std::string {
    try {
      collective_settings(given);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return {};
  };
  for (const char* name : {"min_quorum", "max_learners", "chunk_bytes", "max_staleness", "staging_bytes"}) {
    EXPECT_TRUE(why({{name, "100"}}).starts_with(std::string(name) + " means nothing without a syncer")) << why({{name, "100"}});
  }
  EXPECT_NE(why({{"grace", "none"}}).find("leave it out, as an argument and as DILOCO_GRACE"), std::string::npos);
  EXPECT_NE(why({{"preset", "async"}}).find("got preset = async"), std::string::npos);
  EXPECT_NE(why({{"mode", "decoupled"}}).find("got mode = decoupled"), std::string::npos);
  EXPECT_NE(why({{"overlap_steps", "30"}}).find("overlap_steps must be below sync_every"), std::string::npos);
  EXPECT_EQ(why({{"preset", "finetune"}, {"mode", "lockstep"}}), "");
  EXPECT_EQ(collective_settings({}).mode, Mode::kLockstep);
  EXPECT_EQ(collective_settings({{"preset", "diloco"}}).sync_every, 500u);
}

}  // namespace
}  // namespace diloco
