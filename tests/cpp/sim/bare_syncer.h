// The bare syncer core and peers written by hand: every message is the test's own.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "sim/clusters.h"

namespace diloco::sim {

struct BareSyncer : ::testing::Test {
  BareSyncer() {
    settings.sync_every = 12;
    settings.num_fragments = 2;
    settings.chunk_bytes = 1 << 16;
    settings.credit_window_bytes = 1 << 20;
  }
  void make() {
    SyncerCoreOptions options;
    options.settings = settings;
    options.random = [this] { return random(); };
    core = std::make_unique<SyncerCore>(std::move(options));
  }
  std::vector<SyncerAction> handle(const SyncerEvent& event) { return keep(core->handle(event, now += 0.001)); }
  // Keeps what was sent; work is done at once.
  std::vector<SyncerAction> keep(std::vector<SyncerAction> actions) {
    for (auto& action : actions) {
      if (auto* send = std::get_if<SendTo>(&action)) sent.push_back(*send);
      if (auto* cut = std::get_if<CutPeer>(&action)) cuts.push_back(*cut);
      if (auto* init = std::get_if<RunInit>(&action)) handle(InitDone{init->job, run_init(init->init)});
    }
    return actions;
  }
  void frame(PeerId peer, Header header, const std::string& body = {}) {
    handle(FrameEvent{peer, header, std::as_bytes(std::span(body.data(), body.size()))});
  }
  static Header header_of(MessageType type, Incarnation incarnation, SessionId session = 0) {
    Header header;
    header.type = type;
    header.incarnation = incarnation;
    header.session = session;
    return header;
  }
  // The last message of this type to this peer.
  const OutFrame* last(PeerId peer, MessageType type) const {
    for (auto it = sent.rbegin(); it != sent.rend(); ++it) {
      if (it->peer == peer && it->frame.header.type == type) return &it->frame;
    }
    return nullptr;
  }
  std::size_t count(PeerId peer, MessageType type) const {
    return std::count_if(sent.begin(), sent.end(),
                         [&](const SendTo& one) { return one.peer == peer && one.frame.header.type == type; });
  }
  // HELLO, and LANE on the next peer number; the session's number, or 0.
  SessionId join(PeerId control, Incarnation incarnation, std::uint64_t credit, const std::string& id,
                 const std::vector<Version>& adopted = {}) {
    Hello hello;
    hello.learner_id = id;
    hello.layout = layout;
    hello.downlink_credit = credit;
    hello.adopted = adopted;
    hello.merged_to.resize(adopted.size());
    for (const Version& version : adopted) hello.highest_epoch = std::max(hello.highest_epoch, version.epoch);
    frame(control, header_of(MessageType::kHello, incarnation), encode(hello));
    const OutFrame* welcome = last(control, MessageType::kWelcome);
    if (!welcome) return 0;
    const SessionId session = welcome->header.session;
    std::string why;
    const auto body = decode_welcome(std::as_bytes(std::span(welcome->body.data(), welcome->body.size())), &why);
    EXPECT_TRUE(body) << why;
    Header lane = header_of(MessageType::kLane, incarnation, session);
    lane.transfer = body->lane_token;
    frame(control + 1, lane);
    return session;
  }
  // Uploads a fragment's anchor of zeros.
  void upload(PeerId bulk, Incarnation incarnation, SessionId session, FragmentId fragment, std::uint64_t transfer,
              const MergedTable& merged) {
    Begin begin;
    begin.kind = PayloadKind::kAnchor;
    begin.fragment = fragment;
    begin.merged = merged;
    const auto bytes = payload_layout(core->layout(), core->plan(), fragment, PayloadKind::kAnchor, settings).bytes;
    Header header = header_of(MessageType::kBegin, incarnation, session);
    header.fragment = fragment;
    header.transfer = transfer;
    header.total = bytes;
    frame(bulk, header, encode(begin));
    header.type = MessageType::kChunk;
    for (std::uint64_t at = 0; at < bytes; at += settings.chunk_bytes) {
      header.offset = at;
      frame(bulk, header, std::string(std::min(settings.chunk_bytes, bytes - at), '\0'));
    }
  }
  std::uint64_t chunk_bytes_to(PeerId peer) const {
    std::uint64_t bytes = 0;
    for (const auto& one : sent) {
      if (one.peer == peer && one.frame.header.type == MessageType::kChunk) bytes += one.frame.slice.size;
    }
    return bytes;
  }

  Settings settings;
  Layout layout = small_layout(2, 4, 5);
  std::mt19937_64 random{3};
  std::unique_ptr<SyncerCore> core;
  TimePoint now = 0.0;
  std::vector<SendTo> sent;
  std::vector<CutPeer> cuts;
};

}  // namespace diloco::sim
