// Islands: several ranks, one learner. Ranks are threads here; tests/python has real processes.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <thread>

#include "learner/net_test.h"
#include "learner/thread_group.h"

namespace diloco {
namespace {

using namespace testing;

// How the ranks of an island hold the bowl's tensors.
enum class Sharding { kRows, kColumns, kReplicas, kGrid };

std::vector<std::uint32_t> parts_of(Sharding sharding, std::uint32_t ranks) {
  std::vector<std::uint32_t> part_of(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    part_of[rank] = sharding == Sharding::kReplicas ? 0 : sharding == Sharding::kGrid ? rank % (ranks / 2) : rank;
  }
  return part_of;
}

Box box_of(const TensorSpec& tensor, Sharding sharding, std::uint32_t part, std::uint32_t parts) {
  Box box = whole_box(tensor);
  if (tensor.shape.empty()) return box;  // every rank has the scalar
  const std::size_t d = sharding == Sharding::kColumns ? tensor.shape.size() - 1 : 0;
  const std::int64_t chunk = (tensor.shape[d] + parts - 1) / parts;  // as torch.chunk: the last ones may be empty
  box.offset[d] = std::min<std::int64_t>(part * chunk, tensor.shape[d]);
  box.shape[d] = std::min<std::int64_t>(chunk, tensor.shape[d] - box.offset[d]);
  return box;
}

struct Island {
  std::vector<Bowl> bowls;
  std::vector<std::unique_ptr<Learner>> ranks;
};

Island make_island(Net& net, const std::string& endpoint, const std::string& name, Sharding sharding, std::uint32_t ranks,
                   float target, float start = 0.0f, const std::function<void(LearnerOptions&)>& change = {}) {
  Island island;
  Layout layout;
  for (const NamedShape& shape : bowl_shapes()) layout.tensors.push_back({shape.name, shape.shape, Dtype::kF32, {}});
  const auto part_of = parts_of(sharding, ranks);
  const std::uint32_t parts = *std::max_element(part_of.begin(), part_of.end()) + 1;
  const auto groups = ThreadGroup::make(part_of);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    IslandMember member;
    member.group = groups[rank];
    member.rank = {part_of[rank], parts, std::find(part_of.begin(), part_of.begin() + rank, part_of[rank]) != part_of.begin() + rank};
    member.layout = layout;
    std::vector<NamedShape> held;
    for (const TensorSpec& tensor : layout.tensors) {
      const Box box = parts > 1 ? box_of(tensor, sharding, part_of[rank], parts) : whole_box(tensor);
      held.push_back({tensor.name, box.shape});
      if (parts > 1) member.held.push_back(box);
    }
    island.bowls.emplace_back(target, held, start);
    LearnerOptions options = named(name);
    options.island = std::move(member);
    if (change) change(options);
    island.ranks.push_back(net.learner(endpoint, options, island.bowls.back().store));
  }
  return island;
}

void on_all(Island& island, const std::function<void(Learner&, Bowl&)>& run) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < island.ranks.size(); ++rank) {
    threads.emplace_back([&, rank] { run(*island.ranks[rank], island.bowls[rank]); });
  }
  for (auto& thread : threads) thread.join();
}

// One rank stops when `done` says so; all of them at the same step.
std::uint64_t train(Island& island, float lr, const std::function<bool()>& done, Seconds limit_s = 30) {
  const TimePoint deadline = monotonic_now() + limit_s;
  std::atomic<std::uint64_t> last{~std::uint64_t{0}};
  std::atomic<std::uint64_t> made{0};
  on_all(island, [&](Learner& learner, Bowl& bowl) {
    for (std::uint64_t step = 1; step <= last; ++step) {
      bowl.step(lr);
      compute();
      learner.boundary({1});
      if (&learner == island.ranks.front().get()) {
        made = step;
        // No rank is more than one step ahead of another.
        if (last == ~std::uint64_t{0} && (done() || monotonic_now() > deadline)) last = step + 2;
      }
    }
  });
  return made;
}

double worst(const Island& island, float value) {
  double worst = 0;
  for (const Bowl& bowl : island.bowls) worst = std::max(worst, bowl.distance_to(value));
  return worst;
}

Settings island_settings() {
  Settings settings = small_settings();
  settings.wire_dtype = WireDtype::kF32;
  return settings;
}

std::string sharding_name(const ::testing::TestParamInfo<Sharding>& info) {
  const char* names[] = {"rows", "columns", "replicas", "grid"};
  return names[static_cast<int>(info.param)];
}

struct Islands : ::testing::TestWithParam<Sharding> {
  Net net{true};
};
INSTANTIATE_TEST_SUITE_P(Shardings, Islands,
                         ::testing::Values(Sharding::kRows, Sharding::kColumns, Sharding::kReplicas, Sharding::kGrid),
                         sharding_name);

TEST_P(Islands, TrainWithoutWaitingForTheSyncer) {
  SyncerOptions options;
  options.settings = island_settings();
  const auto syncer = net.syncer(options);
  Island island = make_island(net, syncer->endpoint(), "island", GetParam(), 4, 2.0f, -1.0f);
  Bowl alone(4.0f);
  on_all(island, [](Learner& learner, Bowl&) { EXPECT_TRUE(learner.join(20)); });
  const auto other = net.learner(syncer->endpoint(), named("single"), alone.store);
  ASSERT_TRUE(other->join(20));
  EXPECT_LT(alone.distance_to(-1.0f), 1e-6) << "the single learner takes over the island's weights";
  std::atomic<bool> stop{false};
  std::thread single([&] { train_until(*other, alone, 0.02f, [&] { return stop.load(); }); });
  const auto merged = [&] { return island.ranks[0]->stats().contributions_merged; };
  train(island, 0.02f, [&] { return merged() >= 12 && other->stats().contributions_merged >= 12; });
  stop = true;
  single.join();
  EXPECT_GE(merged(), 12u);
  EXPECT_GE(other->stats().contributions_merged, 12u);
  const auto adopted = island.ranks[0]->stats().adoptions;
  for (const auto& rank : island.ranks) {
    EXPECT_EQ(rank->stats().adoptions, adopted);
    EXPECT_EQ(rank->stats().steps, island.ranks[0]->stats().steps);
  }
  // The pull of both targets: neither trained alone.
  EXPECT_GT(worst(island, 2.0f), 1e-3);
}

// Replicas of a part stay bit-equal, whatever is adopted when.
TEST(Island, OfReplicasStaysBitEqual) {
  Net net(true);
  SyncerOptions options;
  options.settings = island_settings();
  const auto syncer = net.syncer(options);
  Island island = make_island(net, syncer->endpoint(), "island", Sharding::kReplicas, 3, 2.0f, -1.0f);
  on_all(island, [](Learner& learner, Bowl&) { EXPECT_TRUE(learner.join(20)); });
  train(island, 0.02f, [&] { return island.ranks[0]->stats().contributions_merged >= 10; });
  EXPECT_GE(island.ranks[0]->stats().contributions_merged, 10u);
  for (const Bowl& bowl : island.bowls) EXPECT_EQ(bowl.store->values, island.bowls[0].store->values);
}

// In lockstep an island, however it is cut, gives the weights that a single process gives.
TEST_P(Islands, InLockstepAreTheSameLearner) {
  Settings settings = island_settings();
  settings.mode = Mode::kLockstep;
  settings.sync_every = 6;
  settings.num_fragments = 3;
  settings.overlap_steps = 1;
  settings.min_quorum = 2;
  settings.merge = MergeKind::kRda;
  settings.outer_optimizer = OuterKind::kNesterov;
  settings.outer_lr = 0.5;
  settings.outer_momentum = 0.5;
  constexpr std::uint64_t kSteps = 40;
  const auto run = [&](std::uint32_t ranks, Sharding sharding) {
    SyncerOptions options;
    options.settings = settings;
    const auto syncer = net.syncer(options);
    Island island = make_island(net, syncer->endpoint(), "a", sharding, ranks, 2.0f, 5.0f);
    Bowl bowl(-3.0f, bowl_shapes(), 5.0f);
    const auto other = net.learner(syncer->endpoint(), named("b"), bowl.store);
    std::thread join([&] { EXPECT_TRUE(other->join(20)); });
    on_all(island, [](Learner& learner, Bowl&) { EXPECT_TRUE(learner.join(20)); });
    join.join();
    const TimePoint deadline = monotonic_now() + 60;
    const auto in_time = [&] {
      if (monotonic_now() > deadline) throw std::runtime_error("lockstep held for too long");
    };
    std::thread single([&] {
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        bowl.step(0.05f);
        other->boundary({ranks}, in_time);
      }
    });
    on_all(island, [&](Learner& learner, Bowl& own) {
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        own.step(0.05f);
        learner.boundary({1}, in_time);
      }
    });
    single.join();
    EXPECT_EQ(island.ranks[0]->stats().tokens, kSteps * ranks) << "in lockstep no token comes late";
    EXPECT_GE(island.ranks[0]->stats().contributions_merged, 15u);
    return std::pair(bowl.store->values, island.bowls[0].store->values[3]);  // of the other one, and the island's scalar
  };
  const auto [expected, expected_scalar] = run(1, Sharding::kRows);
  const auto [got, scalar] = run(4, GetParam());
  EXPECT_NEAR(scalar[0], expected_scalar[0], 1e-5 * std::abs(expected_scalar[0]));
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    for (std::size_t j = 0; j < got[i].size(); ++j) EXPECT_NEAR(got[i][j], expected[i][j], 1e-5 * std::abs(expected[i][j]));
  }
}

// The connection of any rank breaks: the island is not asked until all are back, trains on, and is merged again.
TEST_P(Islands, AreWholeAgainAfterARankLostItsConnection) {
  SyncerOptions options;
  options.settings = island_settings();
  const auto syncer = net.syncer(options);
  std::uint32_t next = 0;
  Island island = make_island(net, syncer->endpoint(), "island", GetParam(), 4, 2.0f, -1.0f,
                              [&](LearnerOptions&) { net.inproc()->name_next_client(std::to_string(next++)); });
  on_all(island, [](Learner& learner, Bowl&) { EXPECT_TRUE(learner.join(20)); });
  for (const char* rank : {"0", "1", "3"}) {
    const auto merged = [&] { return island.ranks[0]->stats().contributions_merged; };
    const auto before = merged();
    train(island, 0.001f, [&] { return merged() >= before + 4; });
    ASSERT_GE(merged(), before + 4);
    net.inproc()->reset(rank);
  }
  const auto before = island.ranks[0]->stats().contributions_merged;
  train(island, 0.001f, [&] { return island.ranks[0]->stats().contributions_merged >= before + 4; });
  EXPECT_GE(island.ranks[0]->stats().contributions_merged, before + 4);
}

// A syncer that lost its state takes it back from the parts of an island.
TEST_P(Islands, GiveARestartedSyncerTheWeightsTheyHold) {
  SyncerOptions options;
  options.settings = island_settings();
  auto syncer = net.syncer(options);
  Island island = make_island(net, syncer->endpoint(), "island", GetParam(), 4, 2.0f, -1.0f);
  on_all(island, [](Learner& learner, Bowl&) { EXPECT_TRUE(learner.join(20)); });
  train(island, 0.02f, [&] { return island.ranks[0]->stats().contributions_merged >= 6; });
  const std::string endpoint = syncer->endpoint();
  syncer.reset();
  options.bind = endpoint;
  syncer = net.syncer(options);
  const auto before = island.ranks[0]->stats().contributions_merged;
  train(island, 0.0f, [&] { return island.ranks[0]->stats().contributions_merged >= before + 3; });
  EXPECT_GE(island.ranks[0]->stats().contributions_merged, before + 3);
  EXPECT_GE(island.ranks[0]->stats().epoch, 2u);
  // Nothing has been trained since, so the weights are those of the island.
  ASSERT_TRUE(wait_until([&] { return !syncer->weights().empty(); }));
  for (const auto& tensor : syncer->weights()) {
    for (const float value : tensor) EXPECT_GT(value, -0.9f) << "the start was -1, training moved it towards 2";
  }
}

// All ranks hear why the leader was refused.
TEST(Island, ARefusalReachesEveryRank) {
  Net net(true);
  SyncerOptions options;
  options.settings = island_settings();
  options.settings.run_id = "one";
  const auto syncer = net.syncer(options);
  Island island = make_island(net, syncer->endpoint(), "island", Sharding::kRows, 3, 2.0f, 0.0f,
                              [](LearnerOptions& given) { given.run_id = "another"; });
  std::atomic<int> refused{0};
  on_all(island, [&](Learner& learner, Bowl&) {
    try {
      for (int i = 0; i < 5; ++i) {
        learner.join(20);
        learner.boundary({1});
      }
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("run"), std::string::npos) << error.what();
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

// Ranks that do not hold the model between them are refused, naming the tensor.
TEST(Island, PartsThatAreNotTheModelAreRefused) {
  Net net(true);
  SyncerOptions options;
  options.settings = island_settings();
  const auto syncer = net.syncer(options);
  Island island = make_island(net, syncer->endpoint(), "island", Sharding::kRows, 2, 2.0f, 0.0f, [](LearnerOptions& given) {
    if (given.island->rank.part == 1) given.island->held[0].offset[0] = 1;  // was 2 of 4 rows
  });
  std::atomic<int> refused{0};
  on_all(island, [&](Learner& learner, Bowl&) {
    try {
      learner.join(20);
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("'a.weight': parts 0 and 1 hold"), std::string::npos) << error.what();
      ++refused;
    }
  });
  EXPECT_EQ(refused, 2);
}

// NaN of one rank: all take the global weights again, and reset the same tensors' optimizer state.
TEST_P(Islands, ReAdoptTogetherAfterNanOfOneRank) {
  SyncerOptions options;
  options.settings = island_settings();
  const auto syncer = net.syncer(options);
  Island island = make_island(net, syncer->endpoint(), "island", GetParam(), 4, 2.0f, -1.0f);
  on_all(island, [](Learner& learner, Bowl&) { EXPECT_TRUE(learner.join(20)); });
  for (Bowl& bowl : island.bowls) {
    // Replicas have the same values.
    if (GetParam() == Sharding::kReplicas || &bowl == &island.bowls[0]) bowl.store->values[0][0] = std::nanf("");
  }
  if (GetParam() == Sharding::kGrid) island.bowls[2].store->values[0][0] = std::nanf("");
  std::array<std::atomic<int>, 4> resets{};
  std::atomic<std::uint64_t> last{~std::uint64_t{0}};
  const TimePoint deadline = monotonic_now() + 30;
  on_all(island, [&](Learner& learner, Bowl& bowl) {
    const auto rank = static_cast<std::size_t>(&bowl - island.bowls.data());
    for (std::uint64_t step = 1; step <= last; ++step) {
      bowl.step(0.02f);
      compute();
      resets[rank] += static_cast<int>(learner.boundary({1}).reset_inner_state.size());
      const bool enough = learner.stats().contributions_merged >= 4 || monotonic_now() > deadline;
      if (rank == 0 && last == ~std::uint64_t{0} && enough) last = step + 2;
    }
  });
  EXPECT_GE(island.ranks[0]->stats().contributions_merged, 4u);
  EXPECT_GE(resets[0], 4);
  for (const auto& each : resets) EXPECT_EQ(each, resets[0]);
  for (const Bowl& bowl : island.bowls) EXPECT_LT(bowl.distance_to(2.0f), 10.0) << "no NaN is left";
}

}  // namespace
}  // namespace diloco
