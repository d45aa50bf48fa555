// Peers that say what no learner says, told to the bare core.
#include "diloco/core/credit.h"
#include "resident.h"
#include "sim/bare_syncer.h"

namespace diloco::sim {
namespace {

struct Hostile : BareSyncer {};

TEST_F(Hostile, NoCreditBuysMoreThanTheSyncersOwnWindow) {
  layout = small_layout(2, 2048, 2048);  // 16 MiB a fragment
  make();
  const SessionId holder = join(10, 1, 1 << 20, "holder");
  ASSERT_NE(holder, 0u);
  upload(11, 1, holder, 0, 1, {});
  upload(11, 1, holder, 1, 2, {});
  ASSERT_TRUE(core->fragment(0) && core->fragment(1));

  const std::uint64_t window = sender_window(settings.credit_window_bytes);
  const SessionId greedy = join(20, 2, std::uint64_t{1} << 60, "greedy");
  ASSERT_NE(greedy, 0u);
  EXPECT_EQ(chunk_bytes_to(21), window);
  // Nor does a later grant, nor a report of more than was ever sent or of less than before.
  Header credit = header_of(MessageType::kCredit, 2, greedy);
  credit.offset = ~std::uint64_t{0};
  frame(20, credit);
  EXPECT_EQ(chunk_bytes_to(21), window);
  credit.total = window / 2;
  frame(20, credit);
  EXPECT_EQ(chunk_bytes_to(21), window + window / 2);
  credit.total = 0;
  frame(20, credit);
  EXPECT_EQ(chunk_bytes_to(21), window + window / 2);
  credit.total = ~std::uint64_t{0};
  frame(20, credit);
  EXPECT_LE(chunk_bytes_to(21), 2 * window + window / 2);
  EXPECT_TRUE(cuts.empty());
}

// "Nothing will come" is an answer to a PULL, and not half an answer.
TEST_F(Hostile, MissIsRefusedWithoutAPullOrAfterABegin) {
  for (const bool begun : {false, true}) {
    for (const FragmentId fragment : {0u, 1u, 2u, ~0u}) {
      if (begun && fragment > 1) continue;
      cuts.clear();
      sent.clear();
      make();
      const SessionId session = join(10, 1, 1 << 20, "a");
      upload(11, 1, session, 0, 1, {});
      upload(11, 1, session, 1, 2, {});
      Header miss = header_of(MessageType::kMiss, 1, session);
      miss.fragment = fragment;
      if (begun) {
        const Step step{24, 24, 24, {{0, core->fragment(0)->version}, {1, core->fragment(1)->version}}};
        frame(10, header_of(MessageType::kStep, 1, session), encode(step));
        const std::size_t asked = count(10, MessageType::kPull);
        ASSERT_EQ(asked, 4u) << "two anchors, two contributions";
        frame(10, miss);
        EXPECT_TRUE(cuts.empty()) << "the PULL is answered";
        EXPECT_EQ(count(10, MessageType::kPull), asked + 1) << "nothing is held: it is asked again";
        Begin begin;
        begin.fragment = fragment;
        begin.base = core->fragment(fragment)->version;
        begin.to = begin.c_steps = begin.clock = 24;
        Header header = header_of(MessageType::kBegin, 1, session);
        header.fragment = fragment;
        header.transfer = 3;
        header.total = payload_layout(core->layout(), core->plan(), fragment, PayloadKind::kContribution, settings).bytes;
        frame(11, header, encode(begin));
        EXPECT_TRUE(cuts.empty());
      }
      frame(10, miss);
      EXPECT_FALSE(cuts.empty()) << "fragment " << fragment << (begun ? " after BEGIN" : " without PULL");
    }
  }
}

// A learner that comes back from a run with a larger window has granted more than this syncer sends; it must tell what
// it has read all the same, or both wait for ever.
TEST(Credit, ReceiverTellsByWhatItReadNotByWhatItGranted) {
  SenderCredit sender;
  ReceiverCredit receiver;
  sender.reset(1000, 100);
  receiver.reset(1000, 1000);
  receiver.set_window(100);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(sender.allows(10)) << i;
    sender.spend(10);
    receiver.receive(10);
    if (const auto total = receiver.announce()) sender.grant(*total, receiver.received());
  }
}

MergedTable rows(Incarnation first, std::size_t count) {
  MergedTable table;
  for (std::size_t i = 0; i < count; ++i) table.emplace_back(first + i, 7);
  return table;
}

TEST_F(Hostile, AMergedTableMayNameAsManyIncarnationsAsARunMayHave) {
  make();
  const SessionId session = join(10, 1, 1 << 20, "holder");
  upload(11, 1, session, 0, 1, rows(100, kMaxIncarnations - 1));  // and itself
  upload(11, 1, session, 1, 2, rows(100, kMaxIncarnations - 1));
  EXPECT_TRUE(cuts.empty());
  ASSERT_TRUE(core->fragment(0) && core->fragment(1));
  // It is passed on whole; whoever is named in it keeps its account.
  ASSERT_NE(join(20, 100, 1 << 20, "named"), 0u);
  std::string why;
  const OutFrame* image = last(21, MessageType::kBegin);
  ASSERT_NE(image, nullptr);
  const auto begin = decode_begin(std::as_bytes(std::span(image->body.data(), image->body.size())), &why);
  ASSERT_TRUE(begin) << why;
  EXPECT_EQ(begin->merged.size(), kMaxIncarnations - 1);
  const OutFrame* welcome = last(20, MessageType::kWelcome);
  const auto body = decode_welcome(std::as_bytes(std::span(welcome->body.data(), welcome->body.size())), &why);
  EXPECT_EQ(body->merged_to, (std::vector<std::uint64_t>{7, 7}));
  // One more than a run may have is refused, in words.
  EXPECT_EQ(join(30, 5, 1 << 20, "newcomer"), 0u);
  const OutFrame* reject = last(30, MessageType::kReject);
  ASSERT_NE(reject, nullptr);
  EXPECT_NE(reject->body.find("incarnations"), std::string::npos) << reject->body;
  EXPECT_NE(reject->body.find("full"), std::string::npos) << reject->body;
}

TEST_F(Hostile, ALongerMergedTableIsAProtocolViolation) {
  make();
  const SessionId session = join(10, 1, 1 << 20, "holder");
  upload(11, 1, session, 0, 1, rows(100, kMaxIncarnations + 1));
  ASSERT_FALSE(cuts.empty());
  const OutFrame* reject = last(10, MessageType::kReject);
  ASSERT_NE(reject, nullptr);
  EXPECT_NE(reject->body.find("65537 rows, at most 65536"), std::string::npos) << reject->body;
  EXPECT_FALSE(core->fragment(0));
}

TEST_F(Hostile, NorMayTheTablesOfTwoFragmentsNameMoreTogether) {
  make();
  const SessionId session = join(10, 1, 1 << 20, "holder");
  upload(11, 1, session, 0, 1, rows(100, kMaxIncarnations - 1));
  EXPECT_TRUE(cuts.empty());
  upload(11, 1, session, 1, 2, rows(1 << 20, 10));
  ASSERT_FALSE(cuts.empty());
  EXPECT_NE(cuts[0].why.find("at most 65536"), std::string::npos) << cuts[0].why;
}

// Incarnations that came and went without being merged do not fill the run up.
TEST_F(Hostile, NewIncarnationsWithoutEndLockNobodyOut) {
  make();
  for (Incarnation i = 1; i <= kMaxIncarnations + 100; ++i) {
    ASSERT_NE(join(10, i, 0, "restless"), 0u) << i;
    handle(PeerGoneEvent{10, "gone"});
    sent.clear();
    cuts.clear();
    if (i == 200) {  // one is enough to see the rest: the table fills the run up
      const SessionId session = join(10, i, 0, "restless");
      upload(11, i, session, 0, 1, rows(1 << 20, kMaxIncarnations - 300));
      ASSERT_TRUE(core->fragment(0));
      handle(PeerGoneEvent{10, "gone"});
      i = kMaxIncarnations - 1000;
    }
  }
}

TEST_F(Hostile, AnIncarnationStaysItsLearnersAfterALaterLife) {
  make();
  ASSERT_NE(join(10, 1, 0, "owner"), 0u);
  handle(PeerGoneEvent{10, "gone"});
  ASSERT_NE(join(20, 2, 0, "owner"), 0u);
  EXPECT_EQ(join(30, 1, 0, "thief"), 0u);
  const OutFrame* reject = last(30, MessageType::kReject);
  ASSERT_NE(reject, nullptr);
  EXPECT_NE(reject->body.find("belongs to learner 'owner'"), std::string::npos) << reject->body;
}

// What a life costs once the next one is there. The incarnations themselves are bounded (kMaxIncarnations).
TEST_F(Hostile, ALifeThatIsOverCostsLittle) {
  make();
  std::uint64_t before = 0;
  std::size_t size = 0;
  constexpr Incarnation kWarm = 2000, kLives = 12000;
  for (Incarnation i = 1; i <= kLives; ++i) {
    ASSERT_NE(join(10, i, 0, "restless"), 0u) << i;
    handle(PeerGoneEvent{10, "gone"});
    sent.clear();
    cuts.clear();
    if (i != kWarm) continue;
    before = resident_bytes();
    size = core->status_json(now).size();
  }
  EXPECT_LT(core->status_json(now).size(), size + 100);
  const std::uint64_t each = (resident_bytes() - before) / (kLives - kWarm);
  EXPECT_TRUE(!kResidentTells || each < 600) << each;
}

}  // namespace
}  // namespace diloco::sim
