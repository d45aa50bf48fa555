// Connections, one per shard of the syncer: greeting, loss, frames in. Runs on the I/O thread's events.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/core/learner_impl.h"

namespace diloco {

bool LearnerCore::Impl::owns(const ShardLink& link, FragmentId p) const {
  return p < fragments.size() && plan->fragments[p].shard == link.shard;
}
bool LearnerCore::Impl::serves(const ShardLink& link, FragmentId p) const { return owns(link, p) && p < link.fragments; }

// "syncer at tcp://127.0.0.1:29400", with the shard if there are several.
std::string LearnerCore::Impl::name_of(const ShardLink& link) const {
  if (links.size() == 1) return "syncer at " + options.endpoint_text;
  return fmt::format("shard {} of the syncer at {}", link.shard, options.endpoint_text);
}

Header LearnerCore::Impl::header_template(const ShardLink& link) const {
  Header header;
  header.session = link.session;
  header.epoch = link.epoch;
  header.incarnation = options.incarnation;
  header.shard = link.shard;
  header.parts = static_cast<std::uint16_t>(island() ? options.island->parts : 1);
  return header;
}

void LearnerCore::Impl::send(ShardLink& link, Channel channel, MessageType type, std::string body, FragmentId fragment,
                             std::uint64_t offset, std::uint64_t total, std::uint64_t transfer) {
  OutFrame frame;
  frame.header = header_template(link);
  frame.header.type = type;
  frame.header.fragment = fragment;
  frame.header.offset = offset;
  frame.header.total = total;
  frame.header.transfer = transfer;
  frame.body = std::move(body);
  actions.push_back(SendOn{channel, std::move(frame), link.shard});
}

void LearnerCore::Impl::on_channel_up(ShardLink& link, Channel channel) {
  if (channel == Channel::kControl && link.state == ShardLink::State::kConnecting) {
    link.state = ShardLink::State::kGreeting;
    say_hello(link);
  } else if (channel == Channel::kBulk && link.state == ShardLink::State::kLaning) {
    send(link, Channel::kBulk, MessageType::kLane, {}, 0, 0, 0, link.lane_token);
    link.state = ShardLink::State::kUp;
    link.failures = 0;
    if (link.told_away) log(LogLevel::kWarning, fmt::format("the {} is back", name_of(link)));
    if (link.ever_joined) ++link.reconnects;
    link.told_away = false;
    link.ever_joined = true;
    link.liveness.start(now, settings.heartbeat_interval_s, settings.heartbeat_timeout_s);
    if (steps > 0) report(link);
  }
}

void LearnerCore::Impl::say_hello(ShardLink& link) {
  Hello hello;
  hello.learner_id = options.learner_id;
  hello.run_id = options.run_id;
  hello.host = options.host;
  hello.pid = options.pid;
  hello.software = options.software;
  hello.highest_epoch = link.epoch;
  say_layout(hello);
  hello.settings = options.insisted_settings;
  hello.tokens = tokens;
  hello.steps = steps;
  hello.clock = clock;
  hello.downlink_credit = settings.credit_window_bytes;
  if (island()) {
    hello.ranks = options.island->ranks;
    hello.parts = options.island->parts;
    hello.part = options.island->part;
  }
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    const bool mine = owns(link, p);
    hello.adopted.push_back(mine ? fragments[p].adopted : Version{});
    hello.merged_to.push_back(mine ? fragments[p].merged_to : 0);
    link.epoch = std::max(link.epoch, hello.adopted.back().epoch);
  }
  link.downlink_credit.reset(settings.credit_window_bytes, settings.credit_window_bytes);
  link.downlink.reset();
  link.session = 0;
  send(link, Channel::kControl, MessageType::kHello, encode(hello));
}

void LearnerCore::Impl::drop(ShardLink& link) {
  link.state = ShardLink::State::kDown;
  link.session = 0;
  actions.push_back(DropChannel{Channel::kControl, link.shard});
  actions.push_back(DropChannel{Channel::kBulk, link.shard});
}

// The connection is over; train on and come back. What was under way is forgotten, what was staged stays.
void LearnerCore::Impl::lose(ShardLink& link, const std::string& why, bool at_once) {
  if (link.down() || rejected || closed) return;
  if (link.up()) link.away_since = now;
  drop(link);
  link.uplink.reset(0);
  link.downlink.reset();
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    if (!owns(link, p)) continue;
    LearnerFragment& fragment = fragments[p];
    fragment.pull.reset();
    fragment.anchor_wanted = fragment.anchor_sending = false;
    // Images not adopted yet belong to a session that is over; the next one sends its own.
    if (!fragment.adopting) fragment.ready.reset();
    // Parts of uploads under way never complete; what has left completely may still be merged.
    std::erase_if(fragment.sent, [](const SentImage& image) { return !image.gone; });
  }
  const Seconds back_off = back_off_s(link.failures, options.random());
  link.retry_at = at_once && link.failures == 0 ? now : now + back_off;
  ++link.failures;
  if (!link.told_away && !closing) {
    link.told_away = true;
    const char* meanwhile = settings.mode == Mode::kLockstep ? "in lockstep training waits for it"
                                                             : "training goes on locally";
    log(LogLevel::kWarning, fmt::format("no {} ({}); {}, and it is tried again by itself", name_of(link), why, meanwhile));
  }
}

// Out for good, by one shard's word or because what the shards say cannot be.
void LearnerCore::Impl::refuse(Reject reject) {
  rejected = std::move(reject);
  holding = false;
  leave();
  actions.push_back(Rejected{*rejected});
}

void LearnerCore::Impl::leave() {
  for (auto& link : links) {
    if (!link.down()) drop(link);
  }
}

void LearnerCore::Impl::broken(ShardLink& link, MessageType type, const std::string& text) {
  log(LogLevel::kWarning, fmt::format("the {} sent a bad {}: {}", name_of(link), message_name(type), text));
  lose(link, "protocol violation", false);
}

void LearnerCore::Impl::on_frame(const ChannelFrame& frame) {
  ShardLink& link = links.at(frame.shard);
  if (closed || rejected || link.down() || link.state == ShardLink::State::kConnecting) return;
  const Header& header = frame.header;
  // The control connection alone shows life: it has the heartbeats, and may be dead while bulk is not.
  if (frame.channel == Channel::kControl) link.liveness.heard(now);
  if (header.type == MessageType::kReject) {
    std::string why;
    const auto reject = decode_reject(frame.payload, &why);
    return refuse(reject ? *reject : Reject{"malformed", "the syncer refused this learner without a readable reason"});
  }
  if (header.type == MessageType::kRehello) {
    const bool may_have_grown = layout.tensors.size() < options.layout.tensors.size();
    return may_have_grown ? greet_again(link) : lose(link, "it asks for a new greeting", true);
  }
  if (header.shard != link.shard) {
    return broken(link, header.type, fmt::format("it is of shard {}, this is the connection to shard {}", header.shard,
                                                 link.shard));
  }
  if (header.type == MessageType::kWelcome) {
    return link.state == ShardLink::State::kGreeting ? on_welcome(link, header, frame.payload)
                                                     : broken(link, header.type, "out of place");
  }
  if (header.session != link.session || link.session == 0) return;  // of an earlier session
  link.epoch = std::max(link.epoch, header.epoch);  // another learner may have forced a later one
  on_message(link, frame);
}

void LearnerCore::Impl::on_message(ShardLink& link, const ChannelFrame& frame) {
  const Header& header = frame.header;
  std::string why;
  const auto bad = [&](const std::string& text) { broken(link, header.type, text); };
  const auto foreign = [&](FragmentId p) { return fmt::format("fragment {} is not one of this shard's", p); };
  switch (header.type) {
    case MessageType::kHeartbeat:
      if (const auto beat = decode_heartbeat(frame.payload, &why); !beat) bad(why);
      else if (beat->probe) send(link, Channel::kControl, MessageType::kHeartbeat, encode(Heartbeat{}));
      break;
    case MessageType::kArm:
      if (const auto arm = decode_arm(frame.payload, &why); !arm) bad(why);
      else {
        for (FragmentId p = 0; p < fragments.size(); ++p) {
          if (serves(link, p)) fragments[p].armed = false;
        }
        for (const FragmentId p : arm->fragments) {
          if (serves(link, p)) fragments[p].armed = true;
        }
      }
      break;
    case MessageType::kPull:
      if (const auto pull = decode_pull(frame.payload, &why); !pull) bad(why);
      else if (!serves(link, pull->fragment)) bad(foreign(pull->fragment));
      else on_pull(link, header, *pull);
      break;
    case MessageType::kCredit:
      link.uplink.grant(header.offset);
      pump(link);
      break;
    case MessageType::kBegin:
      if (const auto begin = decode_begin(frame.payload, &why); !begin) bad(why);
      else if (!serves(link, begin->fragment)) bad(foreign(begin->fragment));
      else if (begin->kind != PayloadKind::kImage) bad("not an image");
      else on_begin(link, header, *begin);
      break;
    case MessageType::kChunk:
      link.downlink_credit.receive(frame.payload.size());
      on_transfer(link, link.downlink.chunk(header, frame.payload));
      break;
    case MessageType::kVerdict:
      if (const auto verdict = decode_verdict(frame.payload, &why); !verdict) bad(why);
      else if (!serves(link, verdict->fragment)) bad(foreign(verdict->fragment));
      else on_verdict(*verdict);
      break;
    case MessageType::kGoodbye:
      lose(link, "it is shutting down", false);
      break;
    default:
      bad("not a message a syncer sends");
  }
}

// What this WELCOME says otherwise than those before it. A shard that comes back may have new settings as long as no
// other one is here with the old ones.
std::string LearnerCore::Impl::welcome_difference(const ShardLink& link, const Welcome& welcome,
                                                  const Settings& theirs) const {
  const Layout own = own_part_of(welcome);
  if (const auto difference = first_difference(own, welcome.layout); !difference.empty()) {
    return links.size() == 1 ? difference : fmt::format("shard {}: {}", link.shard, difference);
  }
  const auto names = [&](const ShardLink& other) {
    return fmt::format("syncer shards {} and {}", other.shard, link.shard);
  };
  constexpr const char* kDo = "give all shards of a run the same settings and start this learner again";
  if (plan) {
    // Where models grow, one side may know more of the plan than the other.
    const std::uint32_t both = std::min(plan->size(), welcome.plan.size());
    const auto known = [&](const Plan& all) { return has_grown() ? first_of(all, both) : all; };
    if (const auto difference = first_difference(known(*plan), layout, known(welcome.plan), welcome.layout);
        !difference.empty()) {
      if (link.session_epoch > 0) {
        return fmt::format("the {} came back with another plan (num_fragments or fragmenter changed): {}; start this "
                           "learner again", name_of(link), difference);
      }
      const auto other = std::find_if(links.begin(), links.end(),
                                      [](const ShardLink& known) { return known.session_epoch > 0; });
      return fmt::format("{} have different plans (num_fragments, fragmenter or number of shards): {}; {}",
                         names(*other), difference, kDo);
    }
  }
  for (const auto& other : links) {
    if (other.session == 0) continue;
    for (const auto& [name, value] : theirs.to_map()) {
      if (const auto ours = settings.get(name); ours != value) {
        return fmt::format("{} have different settings: {} = {} and {}; {}", names(other), name, ours, value, kDo);
      }
    }
  }
  return {};
}

void LearnerCore::Impl::on_welcome(ShardLink& link, const Header& header, Bytes payload) {
  std::string why;
  const auto malformed = [&](const std::string& text) { refuse(Reject{"malformed", text}); };
  const auto welcome = decode_welcome(payload, &why);
  if (!welcome) return malformed("the syncer's WELCOME cannot be read: " + why);
  Settings from_syncer;
  try {
    for (const auto& [name, value] : welcome->settings) from_syncer.set(name, value);
    check_plan(welcome->plan, welcome->layout, options.shards);
  } catch (const std::exception& error) {
    return malformed(std::string("the syncer's WELCOME makes no sense: ") + error.what());
  }
  if (const auto difference = welcome_difference(link, *welcome, from_syncer); !difference.empty()) {
    return malformed(difference);
  }
  link.fragments = welcome->plan.size();
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    // The same life of the syncer says what it still holds. Another life will tell with its first version what the
    // recovered weights contain; until then nothing is known.
    if (!serves(link, p) || header.epoch != link.epoch) continue;
    std::erase_if(fragments[p].sent, [&](const SentImage& image) {
      return image.staged.base.epoch == header.epoch && image.staged.to > welcome->merged_to[p] &&
             std::find(welcome->held.begin(), welcome->held.end(), std::pair(p, image.staged.to)) == welcome->held.end();
    });
    shrink_limbo(p, DiscardReason::kOverwritten);
  }
  link.session = header.session;
  link.epoch = link.session_epoch = header.epoch;
  link.lane_token = welcome->lane_token;
  run_clock = std::max(run_clock, welcome->run_clock);
  run_tokens = std::max(run_tokens, welcome->run_tokens);
  settings = from_syncer;
  take_plan(*welcome);
  if (island()) {
    const auto* bytes = reinterpret_cast<const char*>(payload.data());
    welcome_body.assign(bytes, payload.size());
  }
  say_versions(link, *welcome);
  link.uplink.reset(settings.credit_window_bytes);
  link.downlink_credit.set_window(settings.credit_window_bytes);
  if (const auto total = link.downlink_credit.announce()) {
    send(link, Channel::kControl, MessageType::kCredit, {}, 0, *total, link.downlink_credit.received());
  }
  link.state = ShardLink::State::kLaning;
  link.liveness.start(now, settings.heartbeat_interval_s, settings.heartbeat_timeout_s);
  beat(link);  // the syncer has waited for a sign of life since it sent the WELCOME, and the bulk connection takes its time
  link.attempt_deadline = now + settings.heartbeat_timeout_s;
  actions.push_back(ConnectChannel{Channel::kBulk, link.shard});
}

}  // namespace diloco
