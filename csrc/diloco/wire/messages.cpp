#include "diloco/wire/messages.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>

#include "diloco/wire/msgpack.h"

namespace diloco {
namespace {

using json = nlohmann::json;

constexpr std::uint64_t kMaxNumel = std::uint64_t{1} << 62;
constexpr std::uint64_t kMaxVersion = std::uint64_t{1} << 62;  // epochs and outer steps: counting on from it never wraps
constexpr std::size_t kMaxDims = 64;
constexpr std::size_t kMaxName = 4096;   // tensor names
constexpr std::size_t kMaxShort = 256;   // host, run id, software
constexpr std::size_t kMaxLong = 16384;  // sentences
constexpr std::size_t kMaxLearnerId = 64;

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- reading ----

std::uint64_t as_uint(const json& value, const std::string& what,
                      std::uint64_t max = std::numeric_limits<std::uint64_t>::max()) {
  // Other encoders may use the signed forms for small positive numbers.
  const bool negative = value.is_number_integer() && !value.is_number_unsigned() && value.get<std::int64_t>() < 0;
  if (!value.is_number_integer() || negative) throw Refused(what + " must be a non-negative integer");
  const auto n = value.get<std::uint64_t>();
  if (n > max) throw Refused(what + " is " + std::to_string(n) + ", at most " + std::to_string(max) + " is allowed");
  return n;
}

std::string as_text(const json& value, const std::string& what, std::size_t max, bool lines = false) {
  if (!value.is_string()) throw Refused(what + " must be text");
  const auto& text = value.get_ref<const std::string&>();
  if (text.size() > max) {
    throw Refused(what + " has " + std::to_string(text.size()) + " bytes, at most " + std::to_string(max) +
                  " are allowed");
  }
  if (!is_clean_text(text, lines)) throw Refused(what + " has control characters or is not UTF-8");
  return text;
}

// One MessagePack map and the path to it, for messages.
class Map {
 public:
  Map(const json& value, std::string path) : value_(value), path_(std::move(path)) {
    if (!value.is_object()) throw Refused((path_.empty() ? "the body" : path_) + " must be a map");
  }
  std::string name(const char* key) const { return path_.empty() ? key : path_ + "." + key; }
  const json& at(const char* key) const {
    const auto found = value_.find(key);
    if (found == value_.end()) throw Refused(name(key) + " is missing");
    return *found;
  }
  bool has(const char* key) const { return value_.contains(key); }
  std::uint64_t uint(const char* key, std::uint64_t max = std::numeric_limits<std::uint64_t>::max()) const {
    return as_uint(at(key), name(key), max);
  }
  std::uint32_t u32(const char* key) const {
    return static_cast<std::uint32_t>(uint(key, std::numeric_limits<std::uint32_t>::max()));
  }
  double number(const char* key) const {  // finite, at least 0
    const json& value = at(key);
    const double number = value.is_number() ? value.get<double>() : -1.0;
    if (!std::isfinite(number) || number < 0.0) throw Refused(name(key) + " must be a number, at least 0");
    return number;
  }
  bool boolean(const char* key) const {
    if (!at(key).is_boolean()) throw Refused(name(key) + " must be true or false");
    return at(key).get<bool>();
  }
  std::string text(const char* key, std::size_t max, bool lines = false) const {
    return as_text(at(key), name(key), max, lines);
  }
  template <typename E>
  E choice(const char* key, E last) const {
    return static_cast<E>(uint(key, static_cast<std::uint64_t>(last)));
  }
  // Calls read(element, "key[i]") for each element.
  template <typename F>
  void each(const char* key, F read) const {
    const json& list = at(key);
    if (!list.is_array()) throw Refused(name(key) + " must be a list");
    std::size_t i = 0;
    for (const json& element : list) read(element, name(key) + "[" + std::to_string(i++) + "]");
  }

 private:
  const json& value_;
  std::string path_;
};

template <typename T, typename Fill>
std::optional<T> decode_map(Bytes bytes, std::string* why, const char* message, Fill fill) {
  try {
    std::string reason;
    if (!msgpack_well_formed(bytes, &reason)) throw Refused(reason);
    const auto* first = reinterpret_cast<const std::uint8_t*>(bytes.data());
    const json body = json::from_msgpack(first, first + bytes.size());
    T out;
    fill(Map(body, ""), out);
    return out;
  } catch (const std::exception& error) {
    if (why) *why = std::string(message) + ": " + error.what();
    return std::nullopt;
  }
}

std::string pack(const json& body) {
  std::string out;
  json::to_msgpack(body, out);
  return out;
}

// ---- shared pieces ----

json version_json(const Version& v) { return json::array({v.epoch, v.n}); }

Version as_version(const json& value, const std::string& what) {
  if (!value.is_array() || value.size() != 2) throw Refused(what + " must be [epoch, n]");
  return {as_uint(value[0], what, kMaxVersion), as_uint(value[1], what, kMaxVersion)};
}

json versions_json(const std::vector<Version>& versions) {
  json list = json::array();
  for (const Version& v : versions) list.push_back(version_json(v));
  return list;
}

std::vector<Version> read_versions(const Map& map, const char* key) {
  std::vector<Version> out;
  map.each(key, [&](const json& v, const std::string& what) { out.push_back(as_version(v, what)); });
  return out;
}

std::vector<std::uint64_t> read_uints(const Map& map, const char* key) {
  std::vector<std::uint64_t> out;
  map.each(key, [&](const json& v, const std::string& what) { out.push_back(as_uint(v, what)); });
  return out;
}

std::vector<FragmentId> read_fragments(const Map& map, const char* key, std::uint64_t fragments) {
  std::set<FragmentId> seen;
  std::vector<FragmentId> out;
  map.each(key, [&](const json& v, const std::string& what) {
    const std::uint64_t id = as_uint(v, what, std::numeric_limits<FragmentId>::max());
    if (id >= fragments) {
      throw Refused(what + " is fragment " + std::to_string(id) + ", there are " + std::to_string(fragments));
    }
    if (!seen.insert(static_cast<FragmentId>(id)).second) {
      throw Refused(what + " names fragment " + std::to_string(id) + " twice");
    }
    out.push_back(static_cast<FragmentId>(id));
  });
  return out;
}

std::map<std::string, std::string> read_settings(const Map& map, const char* key) {
  std::map<std::string, std::string> out;
  const json& value = map.at(key);
  if (!value.is_object()) throw Refused(map.name(key) + " must be a map");
  for (const auto& [name, text] : value.items()) {
    if (name.size() > kMaxShort || !is_clean_text(name, false)) throw Refused(map.name(key) + " has a bad name");
    out[name] = as_text(text, map.name(key) + "." + name, kMaxLong, true);
  }
  return out;
}

json layout_json(const Layout& layout) {
  json tensors = json::array();
  for (const TensorSpec& t : layout.tensors) {
    tensors.push_back({{"name", t.name},
                       {"shape", t.shape},
                       {"dtype", static_cast<std::uint64_t>(t.dtype)},
                       {"aliases", t.aliases}});
  }
  return tensors;
}

// Elements of a tensor, refusing products beyond 2^62. An empty dimension makes the others harmless.
std::uint64_t checked_numel(const TensorSpec& tensor) {
  std::uint64_t numel = 1;
  for (const std::int64_t dim : tensor.shape) {
    if (dim == 0) return 0;
  }
  for (const std::int64_t dim : tensor.shape) {
    const auto d = static_cast<std::uint64_t>(dim);
    if (numel > kMaxNumel / d) throw Refused("tensor '" + tensor.name + "' has more than 2^62 elements");
    numel *= d;
  }
  return numel;
}

TensorSpec read_tensor(const json& value, const std::string& what) {
  const Map map(value, what);
  TensorSpec t;
  t.name = map.text("name", kMaxName);
  if (t.name.empty()) throw Refused(what + ".name is empty");
  map.each("shape", [&](const json& dim, const std::string& which) {
    t.shape.push_back(static_cast<std::int64_t>(as_uint(dim, which, kMaxNumel)));
  });
  if (t.shape.size() > kMaxDims) throw Refused(what + ".shape has more than " + std::to_string(kMaxDims) + " numbers");
  t.dtype = map.choice("dtype", Dtype::kF64);
  map.each("aliases", [&](const json& alias, const std::string& which) {
    t.aliases.push_back(as_text(alias, which, kMaxName));
  });
  return t;
}

Layout read_layout(const Map& map, const char* key) {
  Layout layout;
  std::set<std::string> names;
  std::uint64_t total = 0;
  map.each(key, [&](const json& value, const std::string& what) {
    TensorSpec tensor = read_tensor(value, what);
    if (!names.insert(tensor.name).second) throw Refused("tensor '" + tensor.name + "' appears twice");
    const std::uint64_t numel = checked_numel(tensor);
    if (numel > kMaxNumel - total) throw Refused("the tensors have more than 2^62 elements together");
    total += numel;
    layout.tensors.push_back(std::move(tensor));
  });
  return layout;
}

json plan_json(const Plan& plan) {
  json fragments = json::array();
  for (const Fragment& f : plan.fragments) {
    fragments.push_back({{"tensors", f.tensors}, {"numel", f.numel}, {"shard", f.shard}});
  }
  return fragments;
}

Plan read_plan(const Map& map, const char* key, const Layout& layout) {
  Plan plan;
  std::vector<bool> placed(layout.tensors.size(), false);
  std::size_t count = 0;
  map.each(key, [&](const json& value, const std::string& what) {
    const Map fields(value, what);
    Fragment fragment;
    std::uint64_t numel = 0;
    fields.each("tensors", [&](const json& index, const std::string& which) {
      const std::uint64_t i = as_uint(index, which);
      if (i >= placed.size()) {
        throw Refused(which + " is " + std::to_string(i) + ", the layout has " + std::to_string(placed.size()) +
                      " tensors");
      }
      if (placed[i]) throw Refused("tensor '" + layout.tensors[i].name + "' is in two fragments");
      placed[i] = true;
      ++count;
      numel += checked_numel(layout.tensors[i]);
      fragment.tensors.push_back(static_cast<std::uint32_t>(i));
    });
    if (fragment.tensors.empty()) throw Refused(what + " has no tensors");
    fragment.numel = fields.uint("numel");
    if (fragment.numel != numel) {
      throw Refused(what + ".numel is " + std::to_string(fragment.numel) + ", its tensors have " +
                    std::to_string(numel));
    }
    fragment.shard = fields.u32("shard");
    plan.fragments.push_back(std::move(fragment));
  });
  if (count != placed.size()) throw Refused("the plan leaves out tensors of the layout");
  return plan;
}

std::vector<std::uint32_t> read_growth(const Map& map, const char* key, const Layout& layout) {
  std::vector<std::uint32_t> sizes;
  map.each(key, [&](const json& value, const std::string& what) {
    const std::uint64_t size = as_uint(value, what);
    if (size <= (sizes.empty() ? 0 : sizes.back()) || size >= layout.tensors.size()) {
      throw Refused(what + " is " + std::to_string(size) + "; expected ascending sizes below that of the layout, " +
                    std::to_string(layout.tensors.size()));
    }
    sizes.push_back(static_cast<std::uint32_t>(size));
  });
  return sizes;
}

void require_same_length(const char* what, std::size_t got, std::size_t expected) {
  if (got != expected) {
    throw Refused(std::string(what) + " has " + std::to_string(got) + " entries, expected " +
                  std::to_string(expected));
  }
}

// Each box is [offset, shape], absent ones are [].
json part_json(const Part& part) {
  json list = json::array();
  for (const Box& box : part) list.push_back(box.absent ? json::array() : json::array({box.offset, box.shape}));
  return list;
}

std::vector<std::int64_t> as_dims(const json& value, const std::string& what) {
  if (!value.is_array() || value.size() > kMaxDims) throw Refused(what + " must be a list of at most 64 numbers");
  std::vector<std::int64_t> out;
  for (const json& dim : value) out.push_back(static_cast<std::int64_t>(as_uint(dim, what, kMaxNumel)));
  return out;
}

Part read_part(const Map& map, const char* key) {
  Part part;
  map.each(key, [&](const json& value, const std::string& what) {
    if (!value.is_array() || (value.size() != 0 && value.size() != 2)) throw Refused(what + " must be [] or [offset, shape]");
    Box box;
    box.absent = value.empty();
    if (!box.absent) {
      box.offset = as_dims(value[0], what + ".offset");
      box.shape = as_dims(value[1], what + ".shape");
      require_same_length((what + ".shape").c_str(), box.shape.size(), box.offset.size());
    }
    part.push_back(std::move(box));
  });
  return part;
}

json merged_json(const MergedTable& merged) {
  json list = json::array();
  for (const auto& [incarnation, to] : merged) list.push_back(json::array({incarnation, to}));
  return list;
}

MergedTable read_merged(const Map& map, const char* key) {
  MergedTable out;
  std::set<Incarnation> seen;
  if (const std::size_t rows = map.at(key).size(); rows > kMaxIncarnations) {
    throw Refused(map.name(key) + " has " + std::to_string(rows) + " rows, at most " +
                  std::to_string(kMaxIncarnations) + " are allowed: one per incarnation that was ever merged");
  }
  map.each(key, [&](const json& row, const std::string& what) {
    if (!row.is_array() || row.size() != 2) throw Refused(what + " must be [incarnation, merged_to]");
    const Incarnation incarnation = as_uint(row[0], what);
    if (incarnation == 0) throw Refused(what + " names incarnation 0");
    if (!seen.insert(incarnation).second) throw Refused(what + " repeats an incarnation");
    out.emplace_back(incarnation, as_uint(row[1], what));
  });
  return out;
}

void check_interval(std::uint64_t from, std::uint64_t to) {
  if (from > to) throw Refused("interval [" + std::to_string(from) + ", " + std::to_string(to) + ") is backwards");
}

}  // namespace

const char* reason_name(DiscardReason reason) {
  switch (reason) {
    case DiscardReason::kOverwritten: return "overwritten";
    case DiscardReason::kBlended: return "blended";
    case DiscardReason::kCarryLimit: return "carry_limit";
    case DiscardReason::kLost: return "lost";
    case DiscardReason::kStale: return "stale";
    case DiscardReason::kNonfinite: return "nonfinite";
    case DiscardReason::kRefused: return "refused";
    case DiscardReason::kInFlight: return "in_flight";
    case DiscardReason::kAbsent: return "absent";
  }
  return "unknown";
}

// ---- HELLO ----

std::string encode(const Hello& m) {
  json body({{"learner_id", m.learner_id},
               {"run_id", m.run_id},
               {"host", m.host},
               {"pid", m.pid},
               {"role", static_cast<std::uint64_t>(m.role)},
               {"software", m.software},
               {"highest_epoch", m.highest_epoch},
               {"layout", layout_json(m.layout)},
               {"adopted", versions_json(m.adopted)},
               {"merged_to", m.merged_to},
               {"settings", m.settings},
               {"tokens", m.tokens},
               {"steps", m.steps},
               {"clock", m.clock},
               {"downlink_credit", m.downlink_credit}});
  if (!m.grown_from.empty()) body["grown_from"] = m.grown_from;
  if (m.ranks > 1) {
    body["ranks"] = m.ranks;
    body["parts"] = m.parts;
    body["part"] = part_json(m.part);
  }
  return pack(body);
}

std::optional<Hello> decode_hello(Bytes bytes, std::string* why) {
  return decode_map<Hello>(bytes, why, "HELLO", [](const Map& map, Hello& m) {
    m.learner_id = map.text("learner_id", kMaxLearnerId);
    if (m.learner_id.empty()) throw Refused("learner_id is empty");
    m.run_id = map.text("run_id", kMaxShort);
    m.host = map.text("host", kMaxShort);
    m.pid = map.uint("pid");
    m.role = map.choice("role", Role::kMonitor);
    m.software = map.text("software", kMaxShort);
    m.highest_epoch = map.uint("highest_epoch", kMaxVersion);
    m.layout = read_layout(map, "layout");
    if (m.role == Role::kLearner && m.layout.tensors.empty()) throw Refused("the layout has no tensors");
    m.adopted = read_versions(map, "adopted");
    if (m.adopted.size() > m.layout.tensors.size()) throw Refused("adopted has more fragments than there are tensors");
    m.merged_to = read_uints(map, "merged_to");
    require_same_length("merged_to", m.merged_to.size(), m.adopted.size());
    m.settings = read_settings(map, "settings");
    m.tokens = map.uint("tokens");
    m.steps = map.uint("steps");
    m.clock = map.uint("clock");
    m.downlink_credit = map.uint("downlink_credit");
    if (map.has("grown_from")) m.grown_from = read_growth(map, "grown_from", m.layout);
    if (!map.has("ranks")) return;
    m.ranks = map.u32("ranks");
    m.parts = map.u32("parts");
    if (m.parts < 1 || m.ranks < m.parts || m.parts > kMaxParts) {
      throw Refused("ranks = " + std::to_string(m.ranks) + " and parts = " + std::to_string(m.parts) +
                    "; expected 1 <= parts <= ranks and at most " + std::to_string(kMaxParts) + " parts");
    }
    m.part = read_part(map, "part");
    require_same_length("part", m.part.size(), m.parts > 1 ? m.layout.tensors.size() : 0);
  });
}

// ---- LANE ----

std::string encode(const Lane& m) { return pack({{"part", part_json(m.part)}}); }

std::optional<Lane> decode_lane(Bytes bytes, std::string* why) {
  return decode_map<Lane>(bytes, why, "LANE", [](const Map& map, Lane& m) { m.part = read_part(map, "part"); });
}

// ---- WELCOME ----

std::string encode(const Welcome& m) {
  json held = json::array();
  for (const auto& [fragment, to] : m.held) held.push_back(json::array({fragment, to}));
  json body({{"lane_token", m.lane_token},
             {"layout", layout_json(m.layout)},
             {"plan", plan_json(m.plan)},
             {"settings", m.settings},
             {"versions", versions_json(m.versions)},
             {"merged_to", m.merged_to},
             {"held", held},
             {"run_clock", m.run_clock},
             {"run_tokens", m.run_tokens}});
  if (!m.grown_from.empty()) body["grown_from"] = m.grown_from;
  return pack(body);
}

std::optional<Welcome> decode_welcome(Bytes bytes, std::string* why) {
  return decode_map<Welcome>(bytes, why, "WELCOME", [](const Map& map, Welcome& m) {
    m.lane_token = map.uint("lane_token");
    m.layout = read_layout(map, "layout");
    if (m.layout.tensors.empty()) throw Refused("the layout has no tensors");
    m.plan = read_plan(map, "plan", m.layout);
    if (map.has("grown_from")) {
      m.grown_from = read_growth(map, "grown_from", m.layout);
      m.plan.began_with = m.grown_from.empty() ? 0 : fragments_within(m.plan, m.grown_from.front());
      if (!m.grown_from.empty() && m.plan.began_with == 0) throw Refused("no fragment has only what the run began with");
    }
    m.settings = read_settings(map, "settings");
    m.versions = read_versions(map, "versions");
    require_same_length("versions", m.versions.size(), m.plan.fragments.size());
    m.merged_to = read_uints(map, "merged_to");
    require_same_length("merged_to", m.merged_to.size(), m.plan.fragments.size());
    map.each("held", [&](const json& row, const std::string& what) {
      if (!row.is_array() || row.size() != 2) throw Refused(what + " must be [fragment, to]");
      const auto fragment = as_uint(row[0], what, m.plan.fragments.size() - 1);
      m.held.emplace_back(static_cast<FragmentId>(fragment), as_uint(row[1], what));
    });
    m.run_clock = map.uint("run_clock");
    m.run_tokens = map.uint("run_tokens");
  });
}

// ---- REJECT ----

std::string encode(const Reject& m) { return pack({{"code", m.code}, {"text", m.text}}); }

std::optional<Reject> decode_reject(Bytes bytes, std::string* why) {
  return decode_map<Reject>(bytes, why, "REJECT", [](const Map& map, Reject& m) {
    m.code = map.text("code", kMaxShort);
    m.text = map.text("text", kMaxLong, true);
  });
}

// ---- STEP: clock, steps, tokens, n (u64 each), then n times fragment (u32), epoch, n (u64 each); little-endian ----

namespace {

constexpr std::size_t kStepFixed = 32, kStepEach = 20;

void put(std::string& out, std::uint64_t value, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

std::uint64_t get(Bytes bytes, std::size_t offset, std::size_t width) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) value |= std::to_integer<std::uint64_t>(bytes[offset + i]) << (8 * i);
  return value;
}

std::nullopt_t refuse(std::string* why, const std::string& text) {
  if (why) *why = text;
  return std::nullopt;
}

}  // namespace

std::string encode(const Step& m) {
  std::string out;
  out.reserve(kStepFixed + kStepEach * m.adopted.size());
  for (const std::uint64_t value : {m.clock, m.steps, m.tokens, std::uint64_t{m.adopted.size()}}) put(out, value, 8);
  for (const Adopted& a : m.adopted) {
    put(out, a.fragment, 4);
    put(out, a.version.epoch, 8);
    put(out, a.version.n, 8);
  }
  return out;
}

std::optional<Step> decode_step(Bytes bytes, std::string* why) {
  if (bytes.size() < kStepFixed) {
    return refuse(why, "STEP: has " + std::to_string(bytes.size()) + " bytes, at least 32 are needed");
  }
  Step m;
  m.clock = get(bytes, 0, 8);
  m.steps = get(bytes, 8, 8);
  m.tokens = get(bytes, 16, 8);
  const std::uint64_t count = get(bytes, 24, 8);
  const std::size_t rest = bytes.size() - kStepFixed;
  if (rest % kStepEach != 0 || count != rest / kStepEach) {
    return refuse(why, "STEP: announces " + std::to_string(count) + " adoptions in " + std::to_string(rest) + " bytes");
  }
  m.adopted.reserve(count);
  for (std::size_t at = kStepFixed; at < bytes.size(); at += kStepEach) {
    m.adopted.push_back(
        {static_cast<FragmentId>(get(bytes, at, 4)), {get(bytes, at + 4, 8), get(bytes, at + 12, 8)}});
  }
  return m;
}

// ---- HEARTBEAT ----

std::string encode(const Heartbeat& m) {
  return pack({{"probe", m.probe}, {"discarded", m.discarded}, {"lr", m.lr}});
}

std::optional<Heartbeat> decode_heartbeat(Bytes bytes, std::string* why) {
  if (bytes.empty()) return Heartbeat{};
  return decode_map<Heartbeat>(bytes, why, "HEARTBEAT", [](const Map& map, Heartbeat& m) {
    m.probe = map.boolean("probe");
    const json& discarded = map.at("discarded");
    if (!discarded.is_object()) throw Refused("discarded must be a map");
    for (const auto& [reason, tokens] : discarded.items()) {
      if (reason.size() > kMaxShort || !is_clean_text(reason, false)) throw Refused("discarded has a bad name");
      m.discarded[reason] = as_uint(tokens, "discarded." + reason);
    }
    m.lr = map.number("lr");
  });
}

// ---- ARM, PULL, BEGIN, VERDICT, GOODBYE ----

std::string encode(const Arm& m) { return pack({{"fragments", m.fragments}}); }

std::optional<Arm> decode_arm(Bytes bytes, std::string* why) {
  return decode_map<Arm>(bytes, why, "ARM", [](const Map& map, Arm& m) {
    m.fragments = read_fragments(map, "fragments", std::numeric_limits<std::uint64_t>::max());
  });
}

std::string encode(const Pull& m) {
  json body({{"kind", static_cast<std::uint64_t>(m.kind)},
               {"fragment", m.fragment},
               {"round", m.round},
               {"clock", m.clock},
               {"merged_to", m.merged_to},
               {"held_to", m.held_to}});
  if (m.step > 0) body["step"] = m.step;
  if (!m.base.none()) body["base"] = version_json(m.base);
  return pack(body);
}

std::optional<Pull> decode_pull(Bytes bytes, std::string* why) {
  return decode_map<Pull>(bytes, why, "PULL", [](const Map& map, Pull& m) {
    m.kind = map.choice("kind", PayloadKind::kAnchor);
    m.fragment = map.u32("fragment");
    m.round = map.uint("round");
    m.clock = map.uint("clock");
    m.merged_to = map.uint("merged_to");
    m.held_to = map.uint("held_to");
    if (map.has("step")) m.step = map.uint("step");
    if (map.has("base")) m.base = as_version(map.at("base"), "base");
  });
}

std::string encode(const Begin& m) {
  json body({{"kind", static_cast<std::uint64_t>(m.kind)},
               {"fragment", m.fragment},
               {"round", m.round},
               {"base", version_json(m.base)},
               {"from", m.from},
               {"to", m.to},
               {"c_steps", m.c_steps},
               {"clock", m.clock},
               {"merged", merged_json(m.merged)}});
  if (m.step > 0) body["step"] = m.step;
  return pack(body);
}

std::optional<Begin> decode_begin(Bytes bytes, std::string* why) {
  return decode_map<Begin>(bytes, why, "BEGIN", [](const Map& map, Begin& m) {
    m.kind = map.choice("kind", PayloadKind::kImage);
    m.fragment = map.u32("fragment");
    m.round = map.uint("round");
    m.base = as_version(map.at("base"), "base");
    m.from = map.uint("from");
    m.to = map.uint("to");
    check_interval(m.from, m.to);
    m.c_steps = map.uint("c_steps");
    if (map.has("step")) m.step = map.uint("step");
    m.clock = map.uint("clock");
    m.merged = read_merged(map, "merged");
  });
}

std::string encode(const Verdict& m) {
  return pack({{"fragment", m.fragment},
               {"from", m.from},
               {"to", m.to},
               {"reason", static_cast<std::uint64_t>(m.reason)},
               {"readopt", m.readopt},
               {"text", m.text}});
}

std::optional<Verdict> decode_verdict(Bytes bytes, std::string* why) {
  return decode_map<Verdict>(bytes, why, "VERDICT", [](const Map& map, Verdict& m) {
    m.fragment = map.u32("fragment");
    m.from = map.uint("from");
    m.to = map.uint("to");
    check_interval(m.from, m.to);
    m.reason = map.choice("reason", DiscardReason::kRefused);
    m.readopt = map.boolean("readopt");
    m.text = map.text("text", kMaxLong, true);
  });
}

std::string encode(const Goodbye& m) { return pack({{"reason", m.reason}}); }

std::optional<Goodbye> decode_goodbye(Bytes bytes, std::string* why) {
  return decode_map<Goodbye>(bytes, why, "GOODBYE", [](const Map& map, Goodbye& m) {
    m.reason = map.text("reason", kMaxLong, true);
  });
}

}  // namespace diloco
