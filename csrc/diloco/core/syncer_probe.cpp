// PROBE: bytes for bytes, to whoever wants to know what a link carries before it joins (`diloco doctor`), and what a
// WELCOME says of the run. Bounded (probe_turns.h), and the run goes first: while the syncer has to wait for a learner's
// sign of life, nobody measures.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "diloco/core/syncer_impl.h"

namespace diloco {
namespace {

constexpr std::uint64_t kLeastBytes = 1 << 10;  // counted for an empty one
constexpr std::uint64_t kRunBytes = 1 << 20;    // counted for the run at least: making it takes time, too

}  // namespace

ConstBufferPtr probe_bytes() {
  static const ConstBufferPtr bytes = [] {
    const BufferPtr out = Buffer::make(kProbeFrameBytes);
    std::uint64_t state = 1;
    for (std::size_t at = 0; at < out->size(); at += sizeof state) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;  // xorshift64
      std::memcpy(out->data() + at, &state, sizeof state);
    }
    return out;
  }();
  return bytes;
}

void SyncerCore::Impl::on_probe(const FrameEvent& frame) {
  const Header& asked = frame.header;
  const bool run = asked.flags == kProbeRun;
  OutFrame reply;
  reply.header.type = MessageType::kProbeReply;
  reply.header.epoch = epoch;
  reply.header.shard = options.shard;
  reply.header.transfer = asked.transfer;
  const auto refuse = [&](const std::string& text, Seconds again_s) {
    reply.header.flags = kProbeRefused;
    reply.header.offset = static_cast<std::uint64_t>(std::ceil(again_s * 1000));
    reply.body = text;
    actions.push_back(SendTo{frame.peer, std::move(reply)});
  };
  if (asked.flags != 0 && !run) return refuse(fmt::format("PROBE: flags 0 or 1 are known, got {}", asked.flags), 0);
  if (asked.total > kProbeFrameBytes) {
    return refuse(fmt::format("PROBE may ask for at most {} bytes, got {}", kProbeFrameBytes, asked.total), 0);
  }
  if (const auto text = probe_disturbs(); !text.empty()) return refuse(text, 1.0);
  const std::uint64_t bytes =
      run ? kRunBytes : std::max(kLeastBytes, static_cast<std::uint64_t>(frame.payload.size()) + asked.total);
  Seconds again_s = 0.0;
  switch (probes.ask(frame.peer, bytes, now, &again_s)) {
    case ProbeTurns::Answer::kGranted: break;
    case ProbeTurns::Answer::kOtherPeer: return refuse("somebody else is measuring", again_s);
    case ProbeTurns::Answer::kPause:
      return refuse(fmt::format("one peer may measure for {:g} s at a time", kProbeTurnS), again_s);
    case ProbeTurns::Answer::kBudget:
      return refuse(fmt::format("measuring may take {} bytes a second, and more have been moved", kProbeBytesPerS),
                    again_s);
  }
  if (run) {
    reply.header.flags = kProbeRun;
    if (layout) reply.body = run_outline();
    probes.owe(reply.body.size() - std::min<std::uint64_t>(reply.body.size(), kRunBytes));
  } else if (asked.total > 0) {
    reply.slice = {probe_bytes(), 0, asked.total};
  }
  actions.push_back(SendTo{frame.peer, std::move(reply)});
}

// What a WELCOME says to everybody. No token, no session: nothing can be done with it.
std::string SyncerCore::Impl::run_outline() const {
  Welcome outline;
  outline.layout = *layout;
  outline.plan = plan;
  outline.settings = settings.to_map();
  for (const auto& slot : slots) outline.versions.push_back(slot.state ? slot.state->version : Version{});
  outline.merged_to.resize(plan.size());
  return encode(outline);
}

// "" or why the run would suffer.
std::string SyncerCore::Impl::probe_disturbs() const {
  if (shutdown_at) return "the syncer is stopping";
  for (const auto& [id, session] : sessions) {
    const Seconds silent = now - session.liveness.last_heard();
    if (session.control != 0 && silent > settings.heartbeat_timeout_s / 2) {
      return fmt::format("learner '{}' has not been heard for {:.1f} s, and counts as gone after {:g} s: the network has "
                         "enough to do", session.account->learner, silent, settings.heartbeat_timeout_s);
    }
  }
  return {};
}

}  // namespace diloco
