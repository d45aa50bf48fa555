// Islands: several ranks, one learner. Ranks are threads here; tests/python has real processes.
#include <gtest/gtest.h>

#include <atomic>
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
  if (std::getenv("ILOG")) options.log = [rank](LogLevel, const std::string& t) { fprintf(stderr, "rank %u: %s\n", rank, t.c_str()); };
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
  if (std::getenv("ILOG")) options.log = [](LogLevel, const std::string& t) { fprintf(stderr, "syncer: %s\n", t.c_str()); };
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
TEST(IslandOfReplicas, StaysBitEqual) {
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

}  // namespace
}  // namespace diloco
