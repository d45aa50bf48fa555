// tokens_partition, merged_once, merged_table: every token of a life on a fragment is merged, discarded, declared to be
// under way, or outstanding, and only one of these.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/sim/invariants_impl.h"

namespace diloco::sim {

namespace {

bool covered(std::vector<Interval> spans, std::uint64_t from, std::uint64_t to) {
  std::sort(spans.begin(), spans.end());
  for (const auto& [begin, end] : spans) {
    if (begin <= from) from = std::max(from, end);
  }
  return from >= to;
}

}  // namespace

void RunBooks::settle(LifeBooks& life, FragmentId p, std::uint64_t from, std::uint64_t to, std::size_t merge) {
  if (from >= to) return;
  auto& spans = share(life, p).settled;
  auto at = spans.end();
  if (!spans.empty() && from < spans.back().to) {
    at = std::lower_bound(spans.begin(), spans.end(), from,
                          [](const Share::Span& span, std::uint64_t value) { return span.to <= value; });
  }
  if (at != spans.end() && at->from < to) {
    const bool twice = merge != Share::kDiscarded && at->merge != Share::kDiscarded;
    fail(twice ? "merged_once" : "tokens_partition",
         fmt::format("{} fragment {}: tokens [{}, {}) are counted twice{}", life.id, p, std::max(from, at->from),
                     std::min(to, at->to), twice ? ", merged both times" : ""));
    return;
  }
  if (to > life.tokens.back()) {
    fail("tokens_partition", fmt::format("{} fragment {}: {} tokens are accounted for, {} were made", life.id, p, to,
                                         life.tokens.back()));
  }
  const std::size_t index = static_cast<std::size_t>(at - spans.begin());
  spans.insert(at, {from, to, merge});
  gaps.emplace_back(&life, p, index);
}

// A gap is work that only the syncer can still merge, or that went down with it; both are declared.
void RunBooks::check_gaps() {
  if (gaps.empty()) return;
  for (const auto& [life, p, index] : gaps) {
    const Share& books = life->shares[p];
    for (std::size_t i : {index, index + 1}) {
      if (i >= books.settled.size()) continue;
      const std::uint64_t before = i > 0 ? books.settled[i - 1].to : 0, from = books.settled[i].from;
      if (before < from && !covered(books.open, before, from)) {
        fail("tokens_partition", fmt::format("{} fragment {}: tokens [{}, {}) are unaccounted for", life->id, p, before,
                                             from));
      }
    }
  }
  gaps.clear();
}

void RunBooks::unsettle(std::size_t index, const MergeRecord& merge) {
  for (const auto& member : merge.members) {
    LifeBooks* of = life(member.incarnation);
    if (!of) continue;
    went_down.emplace(member.incarnation, merge.fragment);
    Share& books = share(*of, merge.fragment);
    std::erase_if(books.settled, [&](const Share::Span& span) { return span.merge == index; });
    books.open.push_back({member.from, member.to});
  }
}

// Up to where a life's work on a fragment is in the weights.
std::uint64_t RunBooks::merged_to(LifeBooks& life, FragmentId p) const {
  if (p >= life.shares.size()) return 0;
  const auto& spans = life.shares[p].settled;
  for (auto it = spans.rbegin(); it != spans.rend(); ++it) {
    if (it->merge != Share::kDiscarded) return it->to;
  }
  return 0;
}

// What an image says it contains is what was merged. After a loss of state it may say more: learners know of merges that
// went down, and do not offer that work again.
void RunBooks::check_table(FragmentId p, const MergedTable& table) {
  std::map<Incarnation, std::uint64_t> said(table.begin(), table.end());
  for (const auto& [incarnation, is] : fragments[p].contained) {
    const auto row = said.find(incarnation);
    const std::uint64_t told = row == said.end() ? 0 : row->second;
    if (told < is || (told > is && !went_down.contains({incarnation, p}))) {
      fail("merged_table", fmt::format("fragment {}: the new version is said to contain tokens up to {} of {}; merged are {}",
                                       p, told, lives.at(incarnation)->id, is));
    }
    said.erase(incarnation);
  }
  for (const auto& [incarnation, told] : said) {
    if (went_down.contains({incarnation, p})) continue;
    fail("merged_table", fmt::format("fragment {}: the new version is said to contain tokens up to {} of {:016x}; none are merged",
                                     p, told, incarnation));
  }
}

void Invariants::merge_voided(std::size_t index, const MergeRecord& merge) { run_->unsettle(index, merge); }

void Invariants::merge_restored(std::size_t index, const MergeRecord& merge) {
  for (const auto& member : merge.members) {
    if (LifeBooks* life = run_->life(member.incarnation)) {
      run_->settle(*life, merge.fragment, member.from, member.to, index);
    }
  }
}

void Invariants::discarded(std::size_t learner, const Discard& discard) {
  LifeBooks& life = *run_->current[learner];
  if (discard.reason == DiscardReason::kInFlight) {
    run_->share(life, discard.fragment).open.push_back({discard.from, discard.to});
  } else {
    run_->settle(life, discard.fragment, discard.from, discard.to, Share::kDiscarded);
  }
}

}  // namespace diloco::sim
