#include "diloco/syncer/link_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/base/version.h"
#include "diloco/core/probe_turns.h"
#include "diloco/syncer/monitor_line.h"
#include "diloco/wire/header.h"

namespace diloco {
namespace {

// A train of equal frames. The first is small enough for a slow link, the last large enough for a fast one.
struct Train {
  std::uint64_t frames, bytes;
};
constexpr std::array<Train, 4> kTrains = {{{8, 16 << 10}, {8, 128 << 10}, {16, 256 << 10}, {32, 256 << 10}}};
constexpr Seconds kLongEnough = 0.25;  // a train that took so long is believed
constexpr int kRoundTrips = 5;

class Prober {
 public:
  Prober(const std::string& endpoint, TimePoint deadline) : line_(endpoint, deadline), deadline_(deadline) {}

  // Sends a PROBE; its number.
  std::uint64_t ask(std::uint64_t up, std::uint64_t down, std::uint8_t flags = 0) {
    OutFrame frame;
    frame.header.type = MessageType::kProbe;
    frame.header.flags = flags;
    frame.header.transfer = ++number_;
    frame.header.total = down;
    if (up > 0) frame.slice = {bytes_, 0, up};
    line_.send(std::move(frame));
    return number_;
  }

  // The answers to the PROBEs from number `first` on, of so many bytes in all; false if the syncer refused one of them, and it is time to try again.
  // Throws when the time is over and fewer than two have come; two tell a rate.
  bool answers(std::uint64_t first, std::uint64_t count, std::uint64_t bytes, std::vector<TimePoint>* came,
               InFrame* last = nullptr) {
    std::uint64_t refused = 0, again_ms = 0, seen = 0;
    while (seen < count) {
      auto reply = line_.next({MessageType::kProbeReply}, deadline_);
      if (!reply) {
        if (refused == 0 && came->size() >= 2) return true;
        throw TransportError(fmt::format("{} did not answer in time: {} of {} messages; {}", line_.endpoint(), seen, count,
                                         why_.empty() ? "the link is slow or the syncer busy: give more time" : why_));
      }
      if (reply->header.transfer < first) continue;  // of a train that was refused in part
      ++seen;
      if (reply->header.flags == kProbeRefused) {
        ++refused;
        again_ms = std::max(again_ms, reply->header.offset);
        why_.assign(reinterpret_cast<const char*>(reply->payload.data()), reply->payload.size());
        continue;
      }
      came->push_back(monotonic_now());
      if (last) *last = std::move(*reply);
    }
    if (refused == 0) return true;
    // What was granted is gone: a whole train needs room again, not only the message that was refused.
    const bool in_part = refused < count;
    pause(static_cast<double>(again_ms) / 1000 + (in_part ? static_cast<double>(bytes) / kProbeBytesPerS : 0.0));
    return false;
  }

  // Seconds of silence.
  void pause(Seconds seconds) {
    const TimePoint start = monotonic_now(), until = start + std::max(seconds, 0.01);
    if (until >= deadline_) {
      throw TransportError(fmt::format("{} does not let itself be measured now: {}; try again later", line_.endpoint(), why_));
    }
    static_cast<void>(line_.next({}, until));
    waited_ += monotonic_now() - start;
  }

  Seconds round_trip() {
    std::vector<Seconds> trips;
    while (trips.size() < kRoundTrips) {
      const TimePoint start = monotonic_now();
      std::vector<TimePoint> came;
      if (answers(ask(0, 0), 1, 0, &came)) trips.push_back(came.front() - start);
    }
    std::sort(trips.begin(), trips.end());
    return trips[trips.size() / 2];
  }

  // Bytes per second of the fastest train, and what was moved.
  double rate(bool up, std::uint64_t* moved) {
    double best = 0.0;
    for (const Train& train : kTrains) {
      std::vector<TimePoint> came;
      bool whole = false;
      while (!whole) {
        came.clear();
        const std::uint64_t first = number_ + 1;
        for (std::uint64_t i = 0; i < train.frames; ++i) ask(up ? train.bytes : 0, up ? 0 : train.bytes);
        *moved += train.frames * train.bytes;
        whole = answers(first, train.frames, train.frames * train.bytes, &came);
      }
      const Seconds took = std::max(came.back() - came.front(), 1e-6);
      best = std::max(best, static_cast<double>((came.size() - 1) * train.bytes) / took);
      if (took >= kLongEnough || came.size() < train.frames) break;
    }
    return best;
  }

  Seconds waited() const { return waited_; }

 private:
  MonitorLine line_;
  const TimePoint deadline_;
  const ConstBufferPtr bytes_ = probe_bytes();
  std::uint64_t number_ = 0;
  std::string why_;  // of the last refusal
  Seconds waited_ = 0.0;
};

}  // namespace

LinkProbe probe_link(const std::string& endpoint, Seconds timeout) {
  Prober prober(endpoint, monotonic_now() + timeout);
  LinkProbe out;
  out.round_trip_s = prober.round_trip();
  out.up_bytes_per_s = prober.rate(true, &out.up_bytes);
  out.down_bytes_per_s = prober.rate(false, &out.down_bytes);
  out.waited_s = prober.waited();
  return out;
}

std::optional<Welcome> ask_run(const std::string& endpoint, Seconds timeout) {
  Prober prober(endpoint, monotonic_now() + timeout);
  InFrame reply;
  for (std::vector<TimePoint> came; came.empty();) {
    if (!prober.answers(prober.ask(0, 0, kProbeRun), 1, 0, &came, &reply)) came.clear();
  }
  if (reply.payload.empty()) return std::nullopt;
  std::string why;
  auto run = decode_welcome(reply.payload, &why);
  if (!run) throw TransportError(fmt::format("{} describes its run in a way that cannot be read: {}", endpoint, why));
  return run;
}

ProtocolAnswer ask_protocol(const std::string& endpoint, Seconds timeout) {
  const TimePoint deadline = monotonic_now() + timeout;
  MonitorLine line(endpoint, deadline);
  Hello hello;
  hello.learner_id = "doctor";
  hello.role = Role::kMonitor;
  hello.software = std::string("diloco ") + kVersion;
  OutFrame frame;
  frame.header.type = MessageType::kHello;
  frame.header.incarnation = 1;
  frame.body = encode(hello);
  line.send(std::move(frame));
  const auto reply = line.next({MessageType::kReject}, deadline);
  if (!reply) throw TransportError(fmt::format("{} does not answer a HELLO; is a diloco syncer listening there?", line.endpoint()));
  std::string why;
  const auto reject = decode_reject(reply->payload, &why);
  if (!reject) throw TransportError(fmt::format("{} refuses in a way that cannot be read: {}", line.endpoint(), why));
  return {reply->header.protocol, *reject};
}

}  // namespace diloco
