// What a learner is told when the syncer does not want it.
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <optional>
#include <thread>

#include "diloco/base/errors.h"
#include "diloco/wire/messages.h"
#include "learner/net_test.h"

namespace diloco {
namespace {

using namespace testing;

struct Refusal : NetTest {
  std::string refused_with(const std::string& endpoint, LearnerOptions options, std::shared_ptr<ParameterStore> store) {
    const auto learner = net.learner(endpoint, std::move(options), std::move(store));
    std::string text = "not refused";
    try {
      learner->join(20);
    } catch (const ConfigError& error) {
      text = error.what();
      EXPECT_THROW(learner->boundary({1}), ConfigError) << "every call after";
      EXPECT_EQ(learner->stats().state, "rejected");
    }
    learner->close(1);
    return text;
  }
  void expect_all(const std::string& text, const std::vector<std::string>& parts) {
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  void expect_first_still_trains() {
    EXPECT_TRUE(train_until(*first, bowl, 0.1f, [&, goal = first->stats().contributions_merged + 2] {
      return first->stats().contributions_merged >= goal;
    }));
  }
  void start(Settings settings) {
    SyncerOptions options;
    options.settings = settings;
    syncer = net.syncer(options);
    LearnerOptions mine = named("first");
    mine.run_id = settings.run_id;
    first = net.learner(syncer->endpoint(), mine, bowl.store);
    ASSERT_TRUE(first->join(20));
  }

  Bowl bowl{1.0f};
  std::unique_ptr<Syncer> syncer;
  std::unique_ptr<Learner> first;
};
DILOCO_OVER_BOTH_NETS(Refusal);

TEST_P(Refusal, OtherModelNamesTheFirstParameterOnBothSides) {
  start(small_settings());
  auto shapes = bowl_shapes();
  shapes[0].shape = {4, 9};
  const auto other = std::make_shared<ArrayStore>(shapes);
  expect_all(refused_with(syncer->endpoint(), named("other"), other), {"a.weight", "(4, 8)", "(4, 9)", "layout"});
  expect_first_still_trains();
}

TEST_P(Refusal, OtherRunId) {
  Settings settings = small_settings();
  settings.run_id = "monday";
  start(settings);
  LearnerOptions options = named("stray");
  options.run_id = "tuesday";
  expect_all(refused_with(syncer->endpoint(), options, std::make_shared<ArrayStore>(bowl_shapes())),
             {"monday", "tuesday", "run_id"});
}

TEST_P(Refusal, OtherSettingNamesBothValues) {
  start(small_settings());
  LearnerOptions options = named("stubborn");
  options.settings["sync_every"] = "99";
  expect_all(refused_with(syncer->endpoint(), options, std::make_shared<ArrayStore>(bowl_shapes())),
             {"sync_every", "99", "8"});
}

TEST_P(Refusal, FullRun) {
  Settings settings = small_settings();
  settings.max_learners = 1;
  start(settings);
  expect_all(refused_with(syncer->endpoint(), named("second"), std::make_shared<ArrayStore>(bowl_shapes())),
             {"full", "max_learners"});
}

// It would train for ever without an outer step.
TEST_P(Refusal, MemoryTooSmallForAQuorum) {
  Settings settings = small_settings();
  settings.num_fragments = 1;
  settings.payload_memory_bytes = 64;
  SyncerOptions options;
  options.settings = settings;
  syncer = net.syncer(options);
  expect_all(refused_with(syncer->endpoint(), named("first"), std::make_shared<ArrayStore>(bowl_shapes())),
             {"memory", "payload_memory_bytes", "1 contributions (min_quorum)", "64"});
  // It has left nothing behind: a model that fits may come.
  const auto small = std::make_shared<ArrayStore>(std::vector<NamedShape>{{"weight", {4}}});
  const auto fits = net.learner(syncer->endpoint(), named("second"), small);
  EXPECT_TRUE(fits->join(20));
  fits->close(1);
}

TEST_P(Refusal, MemoryTooSmallForOneMoreInLockstep) {
  Settings settings = small_settings();
  settings.mode = Mode::kLockstep;
  const Layout layout = ArrayStore(bowl_shapes()).layout();
  const Plan plan = make_plan(layout, settings.fragmenter, settings.num_fragments);
  for (FragmentId p = 0; p < plan.size(); ++p) {
    settings.payload_memory_bytes = std::max(settings.payload_memory_bytes,
                                             payload_layout(layout, plan, p, PayloadKind::kContribution, settings).bytes);
  }
  start(settings);
  expect_all(refused_with(syncer->endpoint(), named("second"), std::make_shared<ArrayStore>(bowl_shapes())),
             {"memory", "payload_memory_bytes", "2 contributions", "lockstep", std::to_string(settings.payload_memory_bytes)});
}

// F055: two learners with one id. The one that runs is not disturbed; the newcomer is told who has the name.
TEST_P(Refusal, IdOfALivingLearner) {
  start(small_settings());
  const auto text = refused_with(syncer->endpoint(), named("first"), std::make_shared<ArrayStore>(bowl_shapes()));
  expect_all(text, {"duplicate_id", "first", std::to_string(::getpid())});
  expect_first_still_trains();
}

TEST_P(Refusal, IdThatIsTooLongNeverLeavesTheMachine) {
  start(small_settings());
  EXPECT_THROW(net.learner(syncer->endpoint(), named(std::string(65, 'x')), bowl.store), ConfigError);
}

// One end below the shells: polls until a frame of this type has come.
template <class Transport>
std::optional<InFrame> await(Transport& transport, MessageType type, Seconds limit_s = 20) {
  std::vector<TransportEvent> events;
  const TimePoint deadline = monotonic_now() + limit_s;
  while (monotonic_now() < deadline) {
    events.clear();
    transport.poll(0.05, &events);
    for (auto& event : events) {
      if (auto* frame = std::get_if<InFrame>(&event); frame && frame->header.type == type) return *frame;
    }
  }
  return std::nullopt;
}

OutFrame hello_frame(const std::string& id, Incarnation incarnation) {
  Hello hello;
  hello.learner_id = id;
  hello.layout = ArrayStore(bowl_shapes()).layout();
  OutFrame frame;
  frame.header.type = MessageType::kHello;
  frame.header.incarnation = incarnation;
  frame.body = encode(hello);
  return frame;
}

std::string reject_text(const std::optional<InFrame>& frame) {
  if (!frame) return "no REJECT came";
  std::string why;
  const auto reject = decode_reject(frame->payload, &why);
  return reject ? reject->code + ": " + reject->text : why;
}

void connect(ClientTransport& client) {
  client.connect(Channel::kControl);
  std::vector<TransportEvent> events;
  const TimePoint deadline = monotonic_now() + 20;
  while (monotonic_now() < deadline) {
    client.poll(0.05, &events);
    for (const auto& event : events) {
      if (std::holds_alternative<Connected>(event)) return;
    }
  }
  FAIL() << "no connection";
}

// The holder of a name is there but says nothing; a newcomer takes the name over and the holder is told.
TEST_P(Refusal, ASilentHolderIsSuperseded) {
  Settings settings = small_settings();
  settings.heartbeat_timeout_s = 60;  // silence alone does not end it
  start(settings);
  const auto holder = net.client(syncer->endpoint());
  connect(*holder);
  ASSERT_TRUE(holder->send(Channel::kControl, hello_frame("twin", 77)));
  ASSERT_TRUE(await(*holder, MessageType::kWelcome));
  Bowl other{2.0f};
  const auto newcomer = net.learner(syncer->endpoint(), named("twin"), other.store);
  EXPECT_TRUE(newcomer->join(20));
  expect_all(reject_text(await(*holder, MessageType::kReject)), {"superseded", "twin", std::to_string(::getpid())});
  // It is shut out for good.
  const auto again = net.client(syncer->endpoint());
  connect(*again);
  ASSERT_TRUE(again->send(Channel::kControl, hello_frame("twin", 77)));
  expect_all(reject_text(await(*again, MessageType::kReject)), {"superseded", "twin"});
  EXPECT_EQ(newcomer->stats().state, "training");
  expect_first_still_trains();
}

// A transport that can stop like a process does: nothing is read, nothing is said, connections stay.
class Stoppable : public ClientTransport {
 public:
  explicit Stoppable(std::unique_ptr<ClientTransport> inner) : inner_(std::move(inner)) {}
  void connect(Channel channel) override { inner_->connect(channel); }
  void disconnect(Channel channel) override { inner_->disconnect(channel); }
  void poll(Seconds timeout, std::vector<TransportEvent>* events) override {
    if (stopped) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    else inner_->poll(std::min(timeout, 0.05), events);
  }
  bool send(Channel channel, OutFrame frame) override { return stopped || inner_->send(channel, std::move(frame)); }
  void wake() override { inner_->wake(); }
  void close() override { inner_->close(); }
  TransportCounters counters() const override { return inner_->counters(); }
  std::atomic<bool> stopped = false;

 private:
  std::unique_ptr<ClientTransport> inner_;
};

TEST_P(Refusal, ALearnerThatWasReplacedIsToldSo) {
  Settings settings = small_settings();
  settings.heartbeat_timeout_s = 60;
  start(settings);
  Bowl old_bowl{2.0f}, new_bowl{2.0f};
  auto stoppable = std::make_unique<Stoppable>(net.client(syncer->endpoint()));
  Stoppable& process = *stoppable;
  LearnerOptions options = named("twin");
  options.log = [](LogLevel, const std::string&) {};
  Learner old(options, old_bowl.store, std::move(stoppable));
  ASSERT_TRUE(old.join(20));
  process.stopped = true;
  // What it had said before may still be on its way, and counts as a sign of life: as often as it does, start again.
  std::unique_ptr<Learner> newcomer;
  for (const TimePoint deadline = monotonic_now() + 20; !newcomer && monotonic_now() < deadline;) {
    auto started = net.learner(syncer->endpoint(), named("twin"), new_bowl.store);
    try {
      EXPECT_TRUE(started->join(20));
      newcomer = std::move(started);
    } catch (const ConfigError& error) {
      expect_all(error.what(), {"duplicate_id"});
    }
  }
  ASSERT_TRUE(newcomer);
  process.stopped = false;
  std::string text = "not told";
  try {
    train_until(old, old_bowl, 0.1f, [] { return false; });
  } catch (const ConfigError& error) {
    text = error.what();
  }
  expect_all(text, {"superseded", "twin", std::to_string(::getpid())});
  EXPECT_EQ(old.stats().state, "rejected");
  EXPECT_EQ(newcomer->stats().state, "training");
}

TEST_P(Refusal, ALearnerThatStaysPoisonedIsEjected) {
  Settings settings = small_settings();
  settings.max_bad_payloads = 1;
  start(settings);
  Bowl sick{1.0f};
  const auto learner = net.learner(syncer->endpoint(), named("sick"), sick.store);
  ASSERT_TRUE(learner->join(20));
  std::string text = "not ejected";
  try {
    train_until(*learner, sick, std::numeric_limits<float>::quiet_NaN(), [&] {
      first->boundary({1});
      return false;
    });
  } catch (const ConfigError& error) {
    text = error.what();
  }
  expect_all(text, {"ejected", "sick", "max_bad_payloads"});
  EXPECT_EQ(learner->stats().state, "rejected");
  expect_first_still_trains();
}

TEST_P(Refusal, FirstWeightsThatAreNotFiniteAreEjected) {
  SyncerOptions options;
  options.settings = small_settings();
  syncer = net.syncer(options);
  Bowl sick{1.0f, bowl_shapes(), std::numeric_limits<float>::infinity()};
  expect_all(refused_with(syncer->endpoint(), named("sick"), sick.store), {"ejected", "not finite"});
}

TEST_P(Refusal, OtherProtocolVersionNamesBoth) {
  start(small_settings());
  const auto client = net.client(syncer->endpoint());
  connect(*client);
  OutFrame hello = hello_frame("future", 5);
  hello.header.protocol = 77;
  ASSERT_TRUE(client->send(Channel::kControl, std::move(hello)));
  expect_all(reject_text(await(*client, MessageType::kReject)),
             {"protocol", std::to_string(kProtocolVersion), "77", "install the same"});
  expect_first_still_trains();
}

// And the other way round: a learner that meets a syncer of the future stops with that syncer's words.
TEST_P(Refusal, ASyncerOfAnotherProtocolIsUnderstood) {
  const auto server = net.server();
  const std::string endpoint = server->bind("127.0.0.1:0");
  const auto learner = net.learner(endpoint, named("late"), bowl.store);
  const auto hello = await(*server, MessageType::kHello);
  ASSERT_TRUE(hello);
  OutFrame reject;
  reject.header.type = MessageType::kReject;
  reject.header.protocol = 78;
  reject.body = encode(Reject{"protocol", "this syncer speaks protocol 78, the learner speaks 1"});
  ASSERT_TRUE(server->send(hello->peer, std::move(reject)));
  std::string text;
  try {
    learner->join(20);
  } catch (const ConfigError& error) {
    text = error.what();
  }
  expect_all(text, {"(protocol)", "78"});
  EXPECT_EQ(learner->stats().state, "rejected");
}

}  // namespace
}  // namespace diloco
