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

// An island of two parts, each with half the rows of both tensors, told by hand: part 0 on 10 and 11, part 1 on 12.
struct HostileIsland : Hostile {
  void join_island() {
    make();
    Hello hello;
    hello.learner_id = "island";
    hello.layout = layout;
    hello.downlink_credit = 1 << 20;
    hello.ranks = hello.parts = 2;
    for (const auto& tensor : layout.tensors) hello.part.push_back(half(tensor, 0));
    frame(10, header_of(MessageType::kHello, 1), encode(hello));
    const OutFrame* welcome = last(10, MessageType::kWelcome);
    ASSERT_NE(welcome, nullptr);
    session = welcome->header.session;
    std::string why;
    token = decode_welcome(std::as_bytes(std::span(welcome->body.data(), welcome->body.size())), &why)->lane_token;
    lane(11, 0);
    lane(12, 1);
  }
  static Box half(const TensorSpec& tensor, std::int64_t which) {
    Box box = whole_box(tensor);
    const std::int64_t rows = tensor.shape[0] / 2;
    box.offset[0] = which * rows;
    box.shape[0] = which == 0 ? rows : tensor.shape[0] - rows;
    return box;
  }
  void lane(PeerId peer, std::uint16_t part, std::uint16_t parts = 2) {
    Header header = header_of(MessageType::kLane, 1, session);
    header.transfer = token;
    header.part = part;
    header.parts = parts;
    header.offset = 1 << 20;
    Lane body;
    for (const auto& tensor : layout.tensors) body.part.push_back(half(tensor, part));
    frame(peer, header, part == 0 ? std::string() : encode(body));
  }
  // BEGIN and all bytes of one part.
  void upload_part(PeerId peer, std::uint16_t part, Begin begin, std::uint64_t transfer, Incarnation incarnation = 1) {
    Part held;
    for (const auto& tensor : layout.tensors) held.push_back(half(tensor, part));
    const auto bytes = payload_layout(layout_of_part(layout, held), core->plan(), begin.fragment, begin.kind, settings).bytes;
    Header header = header_of(MessageType::kBegin, incarnation, session);
    header.fragment = begin.fragment;
    header.part = part;
    header.parts = 2;
    header.transfer = transfer;
    header.total = bytes;
    frame(peer, header, encode(begin));
    for (std::uint64_t at = 0; at < bytes;) {
      const auto size = std::min<std::uint64_t>(settings.chunk_bytes, bytes - at);
      header.type = MessageType::kChunk;
      header.offset = at;
      frame(peer, header, std::string(size, '\0'));
      at += size;
    }
  }
  // Weights for both fragments, then a step, so that rounds open; the fragment asked for.
  FragmentId get_pulled() {
    for (FragmentId p = 0; p < 2; ++p) {
      Begin anchor;
      anchor.kind = PayloadKind::kAnchor;
      anchor.fragment = p;
      upload_part(11, 0, anchor, 1 + p);
      upload_part(12, 1, anchor, 1 + p);
    }
    EXPECT_TRUE(core->fragment(0) && core->fragment(1));
    Step step{24, 24, 24, {}};
    for (FragmentId p = 0; p < 2; ++p) step.adopted.push_back({p, core->fragment(p)->version});
    frame(10, header_of(MessageType::kStep, 1, session), encode(step));
    const OutFrame* pull = last(10, MessageType::kPull);
    EXPECT_NE(pull, nullptr);
    return pull->header.fragment;
  }
  Begin contribution(FragmentId p) const {
    Begin begin;
    begin.fragment = p;
    begin.base = core->fragment(p)->version;
    begin.to = begin.c_steps = begin.step = begin.clock = 24;
    return begin;
  }
  SessionId session = 0;
  std::uint64_t token = 0;
};

TEST_F(HostileIsland, IsAskedForOnePartEachAndMergedWhenAllAreIn) {
  join_island();
  const FragmentId p = get_pulled();
  const Begin begin = contribution(p);
  upload_part(11, 0, begin, 3);
  const OutFrame* pull = last(12, MessageType::kPull);
  ASSERT_NE(pull, nullptr);
  std::string why;
  const auto asked = decode_pull(std::as_bytes(std::span(pull->body.data(), pull->body.size())), &why);
  ASSERT_TRUE(asked) << why;
  EXPECT_EQ(asked->step, 24u);
  EXPECT_EQ(asked->base, begin.base);
  upload_part(12, 1, begin, 3);
  EXPECT_TRUE(cuts.empty());
}

TEST_F(HostileIsland, PartsThatDisagreeAreRefusedInWords) {
  const auto refusal = [&](const std::function<void(Begin&)>& change, Incarnation incarnation = 1) {
    sent.clear();
    cuts.clear();
    join_island();
    const FragmentId p = get_pulled();
    Begin begin = contribution(p);
    upload_part(11, 0, begin, 3);
    change(begin);
    upload_part(12, 1, begin, 3, incarnation);
    EXPECT_FALSE(cuts.empty());
    const OutFrame* reject = last(10, MessageType::kReject);
    return reject ? reject->body : std::string();
  };
  EXPECT_NE(refusal([](Begin& begin) { begin.step = 23; }).find("step 23"), std::string::npos);
  EXPECT_NE(refusal([](Begin& begin) { begin.c_steps = 7; }).find("7 of its steps new"), std::string::npos);
  EXPECT_NE(refusal([](Begin& begin) { begin.base = {1, 9}; }).find("base 1.9"), std::string::npos);
  EXPECT_NE(refusal([](Begin&) {}, 2).find("incarnation 0000000000000002"), std::string::npos);
}

TEST_F(HostileIsland, APartThatIsGoneDropsTheWholeAndItIsAskedAgain) {
  join_island();
  const FragmentId p = get_pulled();
  upload_part(11, 0, contribution(p), 3);
  const auto asked = count(10, MessageType::kPull);
  Header miss = header_of(MessageType::kMiss, 1, session);
  miss.fragment = p;
  miss.part = 1;
  miss.parts = 2;
  frame(12, miss);
  EXPECT_TRUE(cuts.empty());
  EXPECT_EQ(count(10, MessageType::kPull), asked + 1);
  EXPECT_EQ(core->payload_bytes_held(), payload_layout(layout, core->plan(), p, PayloadKind::kContribution, settings).bytes +
                                            payload_layout(layout, core->plan(), 1 - p, PayloadKind::kContribution, settings).bytes)
      << "of the two PULLs that are out, and no more";
}

TEST_F(HostileIsland, ALaneThatIsBoundTwiceEndsTheSession) {
  join_island();
  lane(13, 1);
  EXPECT_GE(std::count_if(cuts.begin(), cuts.end(), [](const CutPeer& cut) { return cut.peer == 10; }), 1);
}

TEST_F(HostileIsland, ALaneOfAnotherNumberOfPartsIsNotBound) {
  join_island();
  lane(13, 0, 3);
  ASSERT_EQ(cuts.size(), 1u);
  EXPECT_EQ(cuts[0].peer, 13u);
}

TEST_F(HostileIsland, ARankThatIsSilentEndsTheSession) {
  join_island();
  for (int i = 0; i < 30; ++i) {
    now += settings.heartbeat_interval_s / 2;
    frame(10, header_of(MessageType::kHeartbeat, 1, session));
  }
  ASSERT_FALSE(cuts.empty());
  EXPECT_NE(cuts[0].why.find("part 1 silent"), std::string::npos) << cuts[0].why;
}

}  // namespace
}  // namespace diloco::sim
