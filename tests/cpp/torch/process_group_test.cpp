#include "diloco/torch/process_group.h"

#include <gtest/gtest.h>

#include "diloco/base/errors.h"
#include "fake_group.h"

namespace diloco {
namespace {

using testing::FakeGroup;
using testing::FakeRoom;

struct Two {
  std::shared_ptr<FakeRoom> room = std::make_shared<FakeRoom>(2);
  c10::intrusive_ptr<FakeGroup> groups[2] = {c10::make_intrusive<FakeGroup>(room, 0),
                                             c10::make_intrusive<FakeGroup>(room, 1)};
  Collectives a{groups[0]}, b{groups[1]};
};

TEST(Collectives, KnowRankAndSize) {
  Two two;
  EXPECT_EQ(two.b.rank(), 1);
  EXPECT_EQ(two.b.size(), 2);
}

TEST(Collectives, ReduceBroadcastAndGather) {
  Two two;
  const at::Tensor one = at::tensor({1, 5}, at::kLong), other = at::tensor({3, 2}, at::kLong);
  two.a.start_all_reduce(one, Reduce::kMin);
  two.b.all_reduce(other, Reduce::kMin);
  EXPECT_TRUE(at::equal(one, at::tensor({1, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(other, one));

  const at::Tensor x = at::full({2}, 1.5f), y = at::full({2}, 2.0f);
  two.a.start_all_reduce(x, Reduce::kSum);
  two.b.all_reduce(y, Reduce::kSum);
  EXPECT_TRUE(at::equal(x, at::full({2}, 3.5f)));

  const at::Tensor from = at::arange(3.0f), to = at::zeros({3});
  two.a.start_broadcast(to, 1);
  two.b.broadcast(from, 1);
  EXPECT_TRUE(at::equal(to, from));

  const at::Tensor rows = at::zeros({2, 3}), same = at::zeros({2, 3});
  two.a.start_all_gather(rows.unbind(), from);
  two.b.all_gather(same.unbind(), from + 1.0f);
  EXPECT_TRUE(at::equal(rows, at::stack({from, from + 1.0f})));
  EXPECT_TRUE(at::equal(same, rows));
}

TEST(Collectives, ExchangeGathersInPlace) {
  Two two;
  const at::Tensor all = at::arange(4.0f).reshape({2, 2}), a = all.clone(), b = all.clone();
  a[1].zero_();
  b[0].zero_();
  const Pending first = two.a.start_exchange(a.unbind());
  EXPECT_FALSE(first.wait_for(0.01));
  two.b.start_exchange(b.unbind()).wait();
  EXPECT_TRUE(first.wait_for(0.01));
  EXPECT_TRUE(at::equal(a, all));
  EXPECT_TRUE(at::equal(b, all));
  EXPECT_THROW(two.a.start_exchange({at::zeros({1})}), ConfigError);
}

TEST(Collectives, StartingDoesNotWait) {
  Two two;
  const Pending mine = two.a.start_all_reduce(at::ones({1}), Reduce::kSum);
  EXPECT_FALSE(mine.none());
  EXPECT_FALSE(mine.completed());
  EXPECT_FALSE(mine.wait_for(0.01));
  two.b.all_reduce(at::ones({1}), Reduce::kSum);
  EXPECT_TRUE(mine.completed());
  EXPECT_TRUE(mine.wait_for(0.01));
  EXPECT_TRUE(Pending().none());
}

TEST(Collectives, OrderAfterIsNoHostWait) {
  Two two;
  const Pending mine = two.a.start_all_reduce(at::ones({1}), Reduce::kSum);
  mine.order_after();  // not complete: a host wait would block for ever
  EXPECT_EQ(two.groups[0]->calls[0].work->host_waits, 0);
  EXPECT_EQ(two.groups[0]->calls[0].work->stream_waits, 1);
}

TEST(Collectives, AGroupThatFailsIsATransportErrorOfOneSentence) {
  Two two;
  two.room->failure = "[/build/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4242. Good luck!\nmore";
  try {
    two.a.all_reduce(at::ones({1}), Reduce::kSum);
    FAIL() << "expected a TransportError";
  } catch (const TransportError& error) {
    EXPECT_STREQ(error.what(),
                 "rank 0 of 2: all_reduce failed, a rank of the group has ended or is late (Connection closed by peer "
                 "[127.0.0.1]:4242); end all ranks, start them again and resume from a checkpoint");
  }
}

TEST(Collectives, AFailureWhileUnderWayIsThrownByTheWait) {
  Two two;
  const Pending mine = two.a.start_all_reduce(at::ones({1}), Reduce::kSum);
  two.groups[0]->calls[0].work->finish(std::make_exception_ptr(std::runtime_error("gone")));
  EXPECT_THROW(mine.wait(), TransportError);
  EXPECT_THROW(mine.wait_for(0.01), TransportError);
}

TEST(Collectives, RefusesRowsThatDoNotFit) {
  Two two;
  EXPECT_THROW(two.a.start_all_gather(at::zeros({3, 2}).unbind(), at::zeros({2})), ConfigError);
  EXPECT_THROW(two.a.start_all_gather(at::zeros({2, 2}).unbind(), at::zeros({3})), ConfigError);
  EXPECT_THROW(two.a.start_all_gather(at::zeros({2, 2}).unbind(), at::zeros({2}, at::kLong)), ConfigError);
  EXPECT_THROW(Collectives(c10::intrusive_ptr<c10d::ProcessGroup>()), ConfigError);
}

}  // namespace
}  // namespace diloco
