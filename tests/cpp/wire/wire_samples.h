// Random but valid messages, and every decoder behind one function type, for the wire tests.
#pragma once

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "diloco/wire/header.h"
#include "diloco/wire/messages.h"

namespace diloco::wire_test {

using Random = std::mt19937_64;

inline Bytes as_bytes(const std::string& text) { return std::as_bytes(std::span(text.data(), text.size())); }

inline std::uint64_t any_uint(Random& random) {
  return random() >> (random() % 64);  // all magnitudes
}
inline std::uint64_t below(Random& random, std::uint64_t n) { return random() % n; }

inline std::string any_text(Random& random, std::size_t longest) {
  static const std::vector<std::string> letters = {"a", "B", "7", ".", "_", "-", " ", "/", "ä", "€", "日", "😀"};
  std::string text;
  const std::size_t count = below(random, longest / 4 + 1);
  for (std::size_t i = 0; i < count; ++i) text += letters[below(random, letters.size())];
  return text;
}

inline Layout any_layout(Random& random) {
  Layout layout;
  const std::size_t count = 1 + below(random, 12);
  for (std::size_t i = 0; i < count; ++i) {
    TensorSpec tensor;
    tensor.name = "t" + std::to_string(i) + any_text(random, 20);
    const std::size_t dims = below(random, 4);
    for (std::size_t d = 0; d < dims; ++d) tensor.shape.push_back(static_cast<std::int64_t>(below(random, 300)));
    tensor.dtype = static_cast<Dtype>(below(random, 4));
    for (std::size_t a = below(random, 3); a > 0; --a) tensor.aliases.push_back(any_text(random, 20));
    layout.tensors.push_back(std::move(tensor));
  }
  return layout;
}

inline std::uint64_t numel_of(const TensorSpec& tensor) {
  std::uint64_t n = 1;
  for (const auto dim : tensor.shape) n *= static_cast<std::uint64_t>(dim);
  return n;
}

inline Plan any_plan(Random& random, const Layout& layout) {
  Plan plan;
  const std::size_t count = 1 + below(random, layout.tensors.size());
  plan.fragments.resize(count);
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    Fragment& fragment = plan.fragments[i < count ? i : below(random, count)];
    fragment.tensors.push_back(static_cast<std::uint32_t>(i));
    fragment.numel += numel_of(layout.tensors[i]);
  }
  for (Fragment& fragment : plan.fragments) fragment.shard = static_cast<std::uint32_t>(below(random, 3));
  return plan;
}

inline Part any_part(Random& random, std::size_t tensors) {
  Part part(tensors);
  for (Box& box : part) {
    box.absent = below(random, 5) == 0;
    for (std::size_t d = box.absent ? 0 : below(random, 4); d > 0; --d) {
      box.offset.push_back(static_cast<std::int64_t>(below(random, 300)));
      box.shape.push_back(static_cast<std::int64_t>(below(random, 300)));
    }
  }
  return part;
}

inline Version any_version(Random& random) { return {any_uint(random) >> 2, any_uint(random) >> 2}; }

inline std::map<std::string, std::string> any_settings(Random& random) {
  std::map<std::string, std::string> settings;
  for (std::size_t i = below(random, 5); i > 0; --i) settings["name" + any_text(random, 12)] = any_text(random, 40);
  return settings;
}

inline Hello any_hello(Random& random) {
  Hello m;
  m.learner_id = "l" + any_text(random, 40);
  m.run_id = any_text(random, 40);
  m.host = any_text(random, 40);
  m.pid = any_uint(random);
  m.role = static_cast<Role>(below(random, 3));
  m.software = "diloco 0.1.0";
  m.highest_epoch = any_uint(random) >> 2;
  m.layout = any_layout(random);
  m.adopted.resize(below(random, m.layout.tensors.size() + 1));
  for (Version& v : m.adopted) v = any_version(random);
  m.merged_to.resize(m.adopted.size());
  for (auto& to : m.merged_to) to = any_uint(random);
  m.settings = any_settings(random);
  m.tokens = any_uint(random);
  m.steps = any_uint(random);
  m.clock = any_uint(random);
  m.downlink_credit = any_uint(random);
  for (std::uint32_t size = 1; size < m.layout.tensors.size(); ++size) {
    if (below(random, 4) == 0) m.grown_from.push_back(size);
  }
  if (below(random, 2)) {
    m.parts = static_cast<std::uint32_t>(1 + below(random, 8));
    m.ranks = m.parts + static_cast<std::uint32_t>(1 + below(random, 8));
    if (m.parts > 1) m.part = any_part(random, m.layout.tensors.size());
  }
  return m;
}

inline Lane any_lane(Random& random) { return {any_part(random, below(random, 6))}; }

inline Welcome any_welcome(Random& random) {
  Welcome m;
  m.lane_token = random();
  m.layout = any_layout(random);
  m.plan = any_plan(random, m.layout);
  m.settings = any_settings(random);
  for (std::uint32_t size = 1; size < m.layout.tensors.size(); ++size) {
    const bool some = !m.grown_from.empty() || fragments_within(m.plan, size) > 0;
    if (some && below(random, 4) == 0) m.grown_from.push_back(size);
  }
  if (!m.grown_from.empty()) m.plan.began_with = fragments_within(m.plan, m.grown_from.front());
  for (std::uint32_t p = 0; p < m.plan.size(); ++p) {
    m.versions.push_back(any_version(random));
    m.merged_to.push_back(any_uint(random));
    if (below(random, 2)) m.held.emplace_back(p, any_uint(random));
  }
  m.run_clock = any_uint(random);
  m.run_tokens = any_uint(random);
  return m;
}

inline Step any_step(Random& random) {
  Step m{any_uint(random), any_uint(random), any_uint(random), {}};
  m.adopted.resize(below(random, 5));
  for (Adopted& a : m.adopted) a = {static_cast<FragmentId>(random()), any_version(random)};
  return m;
}

inline Heartbeat any_heartbeat(Random& random) {
  Heartbeat m;
  m.probe = below(random, 2) == 1;
  for (std::size_t i = 0; i < below(random, 7); ++i) {
    m.discarded[reason_name(static_cast<DiscardReason>(i))] = any_uint(random);
  }
  m.lr = static_cast<double>(below(random, 1000)) / 1000.0;
  return m;
}

inline Arm any_arm(Random& random) {
  Arm m;
  for (std::uint32_t p = 0; p < 40; ++p) {
    if (below(random, 3) == 0) m.fragments.push_back(p * 7919);
  }
  return m;
}

inline Pull any_pull(Random& random) {
  return {static_cast<PayloadKind>(below(random, 2)), static_cast<FragmentId>(random()), any_uint(random),
          any_uint(random), any_uint(random), any_uint(random), below(random, 2) ? any_uint(random) : 0,
          below(random, 2) ? any_version(random) : Version{}};
}

inline Begin any_begin(Random& random) {
  Begin m;
  m.kind = static_cast<PayloadKind>(below(random, 3));
  m.fragment = static_cast<FragmentId>(random());
  m.round = any_uint(random);
  m.base = any_version(random);
  m.from = any_uint(random) / 2;
  m.to = m.from + any_uint(random) / 2;
  m.c_steps = any_uint(random);
  m.step = below(random, 2) ? any_uint(random) : 0;
  m.clock = any_uint(random);
  for (std::size_t i = below(random, 6); i > 0; --i) m.merged.emplace_back(random() | 1, any_uint(random));
  return m;
}

inline Verdict any_verdict(Random& random) {
  Verdict m;
  m.fragment = static_cast<FragmentId>(random());
  m.from = any_uint(random) / 2;
  m.to = m.from + any_uint(random) / 2;
  m.reason = static_cast<DiscardReason>(below(random, 7));
  m.readopt = below(random, 2) == 1;
  m.text = any_text(random, 60) + "\n" + any_text(random, 60);
  return m;
}

inline Header any_header(Random& random) {
  Header h;
  h.type = static_cast<MessageType>(1 + below(random, 19));
  h.flags = static_cast<std::uint8_t>(random());
  h.session = random();
  h.epoch = any_uint(random);
  h.incarnation = random();
  h.fragment = static_cast<std::uint32_t>(random());
  h.shard = static_cast<std::uint32_t>(random());
  h.version = any_version(random);
  h.lane = static_cast<std::uint16_t>(random());
  h.parts = static_cast<std::uint16_t>(1 + below(random, 65535));
  h.part = static_cast<std::uint16_t>(below(random, h.parts));
  h.codec = static_cast<std::uint8_t>(random());
  h.colour = static_cast<std::uint32_t>(random());
  h.transfer = random();
  h.offset = any_uint(random);
  h.total = any_uint(random);
  h.payload_bytes = any_uint(random);
  h.checksum = random();
  return h;
}

// One kind of message: a random valid sample as bytes, and its decoder. `again` decodes and encodes.
struct Kind {
  std::string name;
  std::function<std::string(Random&)> sample;
  std::function<bool(Bytes, std::string*)> decodes;
  std::function<std::string(Bytes)> again;
};

template <typename Make, typename Decode>
Kind kind(std::string name, Make make, Decode decode) {
  return {std::move(name), [make](Random& random) { return encode(make(random)); },
          [decode](Bytes bytes, std::string* why) { return decode(bytes, why).has_value(); },
          [decode](Bytes bytes) { return encode(decode(bytes, nullptr).value()); }};
}

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      kind("HELLO", any_hello, decode_hello),
      kind("LANE", any_lane, decode_lane),
      kind("WELCOME", any_welcome, decode_welcome),
      kind("REJECT", [](Random& r) { return Reject{any_text(r, 20), any_text(r, 90)}; }, decode_reject),
      kind("STEP", any_step, decode_step),
      kind("HEARTBEAT", any_heartbeat, decode_heartbeat),
      kind("ARM", any_arm, decode_arm),
      kind("PULL", any_pull, decode_pull),
      kind("BEGIN", any_begin, decode_begin),
      kind("VERDICT", any_verdict, decode_verdict),
      kind("GOODBYE", [](Random& r) { return Goodbye{any_text(r, 90)}; }, decode_goodbye),
  };
  return all;
}

}  // namespace diloco::wire_test
