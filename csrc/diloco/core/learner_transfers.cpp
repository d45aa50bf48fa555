// What the frames of a session ask for: answers to pulls, arriving images, verdicts. Runs on the I/O thread's events.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/core/learner_impl.h"

namespace diloco {

constexpr std::uint64_t kAnchorTag = 1ull << 63;  // | fragment: tag of an anchor's transfer
constexpr std::size_t kGoneImagesKept = 2;  // fully sent: the one the syncer holds and the one that may replace it

void LearnerCore::Impl::on_pull(ShardLink& link, const Header& header, const Pull& pull) {
  LearnerFragment& fragment = fragments[pull.fragment];
  link.uplink.grant(header.offset);
  if (pull.kind == PayloadKind::kAnchor) {
    fragment.anchor_wanted = true;
    if (!fragment.adopting && !fragment.ordered) send_anchor(pull.fragment);
    return pump(link);
  }
  // What the syncer neither holds nor can still receive will never be merged. An answer to this very PULL, repeated on
  // the way, can.
  std::erase_if(fragment.sent, [&](const SentImage& image) {
    const bool earlier = image.session != link.session || image.round < pull.round;
    return image.gone && (pull.held_to == 0 ? earlier : image.staged.to < pull.held_to);
  });
  if (pull.held_to == 0) shrink_limbo(pull.fragment, DiscardReason::kOverwritten);
  fragment.pull = pull;
  answer(pull.fragment);
  miss_if_in_limbo(pull.fragment);
}

// Work that the syncer holds has been given up here. A newer copy would not contain it, so none is made until it is
// settled; a round that waited for one would wait for ever.
void LearnerCore::Impl::miss_if_in_limbo(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  ShardLink& link = link_of(p);
  if (!fragment.pull || !fragment.in_limbo() || !link.up()) return;
  fragment.pull.reset();
  send(link, Channel::kControl, MessageType::kMiss, {}, p);
}

// A waiting pull and a staged copy make an upload.
void LearnerCore::Impl::answer(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  ShardLink& link = link_of(p);
  if (!fragment.pull || !fragment.staged || !link.up() || fragment.adopting) return;
  const Staged staged = *std::exchange(fragment.staged, std::nullopt);
  Begin begin;
  begin.kind = PayloadKind::kContribution;
  begin.fragment = p;
  begin.round = fragment.pull->round;
  begin.base = staged.base;
  begin.from = staged.from;
  begin.to = staged.to;
  begin.c_steps = staged.steps;
  if (island()) begin.step = fragment.from_steps + staged.steps;
  begin.clock = staged.clock;
  if (settings.mode == Mode::kLockstep) fragment.expecting = fragment.pull->clock;  // also of a round that was late
  fragment.pull.reset();

  Transfer transfer;
  transfer.fragment = p;
  transfer.kind = PayloadKind::kContribution;
  transfer.version = staged.base;
  transfer.begin = std::make_shared<const std::string>(encode(begin));
  transfer.image = {staged.bytes, 0, {}};
  transfer.total = staged.bytes->size();
  transfer.tag = next_tag++;
  fragment.sent.push_back({staged, fragment.from_steps + staged.steps, transfer.tag, link.session, begin.round, false});
  if (const auto replaced = link.uplink.push(std::move(transfer))) {
    std::erase_if(fragment.sent, [&](const SentImage& image) { return image.tag == *replaced; });
  }
  ++contributions_sent;
  pump(link);
}

void LearnerCore::Impl::send_anchor(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  fragment.anchor_wanted = false;
  fragment.anchor_sending = true;
  Begin begin;
  begin.kind = PayloadKind::kAnchor;
  begin.fragment = p;
  begin.base = fragment.adopted;
  begin.clock = clock;
  begin.merged = fragment.merged_table;
  Transfer transfer;
  transfer.fragment = p;
  transfer.kind = PayloadKind::kAnchor;
  transfer.version = fragment.adopted;
  transfer.begin = std::make_shared<const std::string>(encode(begin));
  transfer.total = payloads[p][static_cast<std::size_t>(PayloadKind::kAnchor)].bytes;
  transfer.read = [this, p](std::uint64_t offset, std::span<std::byte> out) { options.read_anchor(p, offset, out); };
  transfer.tag = kAnchorTag | p;
  link_of(p).uplink.push(std::move(transfer));
}

void LearnerCore::Impl::pump(ShardLink& link) {
  if (!link.up()) return;
  auto batch = link.uplink.take(header_template(link), settings.chunk_bytes);
  for (auto& frame : batch.frames) actions.push_back(SendOn{Channel::kBulk, std::move(frame), link.shard});
  for (const auto& [tag, end] : batch.finished) {
    if (tag & kAnchorTag) {
      fragments[static_cast<FragmentId>(tag)].anchor_sending = false;  // it may be overwritten again
      continue;
    }
    for (auto& fragment : fragments) {
      for (auto& image : fragment.sent) {
        if (image.tag == tag) image.gone = true;
      }
      const auto gone = std::count_if(fragment.sent.begin(), fragment.sent.end(),
                                      [](const SentImage& image) { return image.gone; });
      for (auto excess = gone - static_cast<std::ptrdiff_t>(kGoneImagesKept); excess > 0; --excess) {
        fragment.sent.erase(std::find_if(fragment.sent.begin(), fragment.sent.end(),
                                         [](const SentImage& image) { return image.gone; }));
      }
    }
  }
}

void LearnerCore::Impl::on_begin(ShardLink& link, const Header& header, const Begin& begin) {
  const LearnerFragment& fragment = fragments[begin.fragment];
  const bool news = begin.base > fragment.adopted && (!fragment.ready || begin.base > fragment.ready->version) &&
                    (!fragment.pending || begin.base > fragment.pending->version);
  const auto& expected = payloads[begin.fragment][static_cast<std::size_t>(PayloadKind::kImage)];
  on_transfer(link, link.downlink.begin(header, begin, expected.bytes, news));
}

void LearnerCore::Impl::on_transfer(ShardLink& link, Reassembly::Outcome outcome) {
  if (!outcome.error.empty()) {
    log(LogLevel::kWarning, fmt::format("the {} broke the protocol: {}", name_of(link), outcome.error));
    return lose(link, "protocol violation", false);
  }
  if (!outcome.complete) {
    if (const auto total = link.downlink_credit.announce()) {
      send(link, Channel::kControl, MessageType::kCredit, {}, 0, *total, link.downlink_credit.received());
    }
    return;
  }
  // Announced at the end of every image: the syncer measures its round trip by it.
  const std::uint64_t granted = link.downlink_credit.grant_now();
  send(link, Channel::kControl, MessageType::kCredit, {}, 0, granted, link.downlink_credit.received());
  if (!outcome.bytes) return;
  const Begin& begin = *outcome.complete;
  fragments[begin.fragment].ready = ReadyImage{begin.base, begin.clock, std::move(outcome.bytes), begin.merged};
}

void LearnerCore::Impl::on_verdict(const Verdict& verdict) {
  LearnerFragment& fragment = fragments[verdict.fragment];
  std::erase_if(fragment.sent, [&](const SentImage& image) {
    return image.gone && image.staged.from == verdict.from && image.staged.to == verdict.to;
  });
  if (verdict.from == fragment.limbo_from) shrink_limbo(verdict.fragment, verdict.reason);
  if (!verdict.readopt) return;
  // NaN in one fragment has reached all others through the forward pass: take everything again.
  for (auto& other : fragments) other.readopt = verdict.reason;
  log(LogLevel::kError, fmt::format("the syncer refused fragment {} of this learner: {}; the global weights are "
                                    "taken again at the next step, with fresh optimizer state", verdict.fragment, verdict.text));
}

}  // namespace diloco
