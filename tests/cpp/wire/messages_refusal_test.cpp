// What decoders must refuse, each with the sentence that says why.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "diloco/wire/msgpack.h"
#include "wire/wire_samples.h"

namespace diloco::wire_test {
namespace {

using json = nlohmann::json;

json unpack(const std::string& bytes) { return json::from_msgpack(bytes); }
std::string pack(const json& value) {
  std::string out;
  json::to_msgpack(value, out);
  return out;
}

template <typename Decode>
void expect_refused(Decode decode, const std::string& bytes, const std::string& part_of_why) {
  std::string why;
  EXPECT_FALSE(decode(as_bytes(bytes), &why).has_value()) << part_of_why;
  EXPECT_NE(why.find(part_of_why), std::string::npos) << "got: " << why << "\nexpected: " << part_of_why;
}

json hello_json() {
  Hello m;
  m.learner_id = "a";
  m.layout.tensors = {{"w", {2, 3}, Dtype::kF32, {}}, {"b", {3}, Dtype::kF32, {}}};
  return unpack(encode(m));
}

json welcome_json() {
  Welcome m;
  m.layout.tensors = {{"w", {2, 3}, Dtype::kF32, {}}, {"b", {3}, Dtype::kF32, {}}};
  m.plan.fragments = {{{0}, 6, 0}, {{1}, 3, 0}};
  m.versions.resize(2);
  m.merged_to.resize(2);
  return unpack(encode(m));
}

TEST(WireRefusal, EveryMissingKeyIsNamed) {
  Random random(21);
  for (const Kind& kind : kinds()) {
    if (kind.name == "STEP") continue;
    const json whole = unpack(kind.sample(random));
    for (const auto& [key, value] : whole.items()) {
      // Said by islands only, or of what has grown.
      const std::string name = kind.name + "." + key;
      if (name == "HELLO.grown_from" || name == "WELCOME.grown_from") continue;
      if (name == "HELLO.ranks" || name == "PULL.step" || name == "PULL.base" || name == "BEGIN.step") continue;
      json without = whole;
      without.erase(key);
      std::string why;
      EXPECT_FALSE(kind.decodes(as_bytes(pack(without)), &why)) << kind.name << "." << key;
      EXPECT_NE(why.find(key), std::string::npos) << why;
      EXPECT_EQ(why.find(kind.name), 0u) << why;
    }
  }
}

TEST(WireRefusal, EveryMistypedKeyIsNamed) {
  Random random(22);
  const std::vector<json> wrong = {nullptr, 1.5, -1, json::binary({1, 2, 3})};
  for (const Kind& kind : kinds()) {
    if (kind.name == "STEP") continue;
    const json whole = unpack(kind.sample(random));
    for (const auto& [key, value] : whole.items()) {
      for (const json& other : wrong) {
        if (value.is_number_float() && other.is_number_float()) continue;
        json mistyped = whole;
        mistyped[key] = other;
        std::string why;
        EXPECT_FALSE(kind.decodes(as_bytes(pack(mistyped)), &why)) << kind.name << "." << key << " = " << other;
        EXPECT_NE(why.find(key), std::string::npos) << why;
      }
    }
  }
}

TEST(WireRefusal, UnknownKeysAreIgnored) {
  Random random(23);
  for (const Kind& kind : kinds()) {
    if (kind.name == "STEP") continue;
    json more = unpack(kind.sample(random));
    more["from_the_future"] = {{"nested", {1, 2.5, "x", nullptr, true}}};
    std::string why;
    EXPECT_TRUE(kind.decodes(as_bytes(pack(more)), &why)) << why;
  }
}

TEST(WireRefusal, NotAMap) {
  for (const Kind& kind : kinds()) {
    if (kind.name == "STEP") continue;
    for (const json& other : {json::array({1, 2}), json(7), json("text"), json(nullptr)}) {
      std::string why;
      EXPECT_FALSE(kind.decodes(as_bytes(pack(other)), &why));
      EXPECT_NE(why.find("map"), std::string::npos) << why;
    }
  }
}

TEST(WireRefusal, LearnerId) {
  json hello = hello_json();
  const auto with = [&](const std::string& id) { hello["learner_id"] = id; return pack(hello); };
  EXPECT_TRUE(decode_hello(as_bytes(with("größe-7")), nullptr).has_value());
  expect_refused(decode_hello, with(""), "learner_id is empty");
  expect_refused(decode_hello, with(std::string(65, 'x')), "learner_id has 65 bytes, at most 64");
  expect_refused(decode_hello, with("a\nb"), "learner_id has control characters");
  expect_refused(decode_hello, with(std::string("a\0b", 3)), "learner_id has control characters");
  expect_refused(decode_hello, with("\x1b[31mred"), "control characters");
  expect_refused(decode_hello, with("\x7f"), "control characters");
  expect_refused(decode_hello, with("\xc2\x9b" "1m"), "control characters");  // C1: CSI
  expect_refused(decode_hello, with("\xff\xfe"), "not UTF-8");
  expect_refused(decode_hello, with("\xc0\xaf"), "not UTF-8");          // overlong
  expect_refused(decode_hello, with("\xed\xa0\x80"), "not UTF-8");      // surrogate
  expect_refused(decode_hello, with("abc\xe2\x82"), "not UTF-8");       // cut short
}

TEST(WireRefusal, RoleAndDtypeOutOfRange) {
  json hello = hello_json();
  hello["role"] = 3;
  expect_refused(decode_hello, pack(hello), "role is 3");
  hello = hello_json();
  hello["layout"][0]["dtype"] = 4;
  expect_refused(decode_hello, pack(hello), "layout[0].dtype is 4");
}

TEST(WireRefusal, LayoutSizes) {
  json hello = hello_json();
  const auto with_shape = [&](const json& shape) { hello["layout"][1]["shape"] = shape; return pack(hello); };
  expect_refused(decode_hello, with_shape({-1}), "layout[1].shape[0] must be a non-negative integer");
  expect_refused(decode_hello, with_shape({1ull << 63}), "layout[1].shape[0]");
  expect_refused(decode_hello, with_shape({1ull << 32, 1ull << 32}), "tensor 'b' has more than 2^62");
  expect_refused(decode_hello, with_shape({1ull << 31, 1ull << 31, 2}), "tensor 'b' has more than 2^62");
  expect_refused(decode_hello, with_shape({3037000500ull, 3037000500ull}), "tensor 'b' has more than 2^62");
  expect_refused(decode_hello, with_shape({1ull << 62}), "more than 2^62 elements together");
  expect_refused(decode_hello, with_shape(json(std::vector<int>(65, 1))), "more than 64");
  EXPECT_TRUE(decode_hello(as_bytes(with_shape({0, 1ull << 62, 1ull << 62})), nullptr).has_value());
}

TEST(WireRefusal, LayoutNames) {
  json hello = hello_json();
  hello["layout"][1]["name"] = "w";
  expect_refused(decode_hello, pack(hello), "tensor 'w' appears twice");
  hello["layout"][1]["name"] = "";
  expect_refused(decode_hello, pack(hello), "layout[1].name is empty");
  hello["layout"][1]["name"] = std::string(4097, 'n');
  expect_refused(decode_hello, pack(hello), "layout[1].name has 4097 bytes");
  hello = hello_json();
  hello["layout"] = json::array();
  expect_refused(decode_hello, pack(hello), "no tensors");
}

TEST(WireRefusal, AdoptedAndMergedToDisagree) {
  json hello = hello_json();
  hello["adopted"] = {{1, 2}};
  expect_refused(decode_hello, pack(hello), "merged_to has 0 entries, expected 1");
  hello["adopted"] = {{1, 2}, {1, 2}, {1, 2}};
  hello["merged_to"] = {1, 2, 3};
  expect_refused(decode_hello, pack(hello), "more fragments than");
  hello["adopted"] = {{1, 2, 3}};
  expect_refused(decode_hello, pack(hello), "adopted[0] must be [epoch, n]");
}

// One more outer step, or one more life of the syncer, must not wrap to 0.
TEST(WireRefusal, Growth) {
  json hello = hello_json();
  for (const json& sizes : {json{0}, json{2}, json{1, 1}, json{7}}) {
    hello["grown_from"] = sizes;
    expect_refused(decode_hello, pack(hello), "expected ascending sizes below that of the layout, 2");
  }
  hello["grown_from"] = {1};
  EXPECT_EQ(decode_hello(as_bytes(pack(hello)), nullptr).value().grown_from, (std::vector<std::uint32_t>{1}));
  json welcome = welcome_json();
  welcome["grown_from"] = {2};
  expect_refused(decode_welcome, pack(welcome), "expected ascending sizes below that of the layout, 2");
  std::swap(welcome["plan"][0], welcome["plan"][1]);
  welcome["grown_from"] = {1};
  expect_refused(decode_welcome, pack(welcome), "no fragment has only what the run began with");
}

TEST(WireRefusal, NumbersThatCountingOnWouldWrap) {
  json hello = hello_json();
  hello["highest_epoch"] = ~0ull;
  expect_refused(decode_hello, pack(hello), "highest_epoch is 18446744073709551615, at most 4611686018427387904");
  hello = hello_json();
  hello["merged_to"] = {0};
  for (const json& version : {json{~0ull, 0}, json{1, ~0ull}}) {
    hello["adopted"] = json::array({version});
    expect_refused(decode_hello, pack(hello), "adopted[0] is 18446744073709551615");
  }
}

TEST(WireRefusal, Plan) {
  const auto with = [](auto change) { json w = welcome_json(); change(w); return pack(w); };
  EXPECT_TRUE(decode_welcome(as_bytes(with([](json&) {})), nullptr).has_value());
  expect_refused(decode_welcome, with([](json& w) { w["plan"][1]["tensors"] = {0}; w["plan"][1]["numel"] = 6; }), "tensor 'w' is in two fragments");
  expect_refused(decode_welcome, with([](json& w) { w["plan"][1]["tensors"] = {2}; }), "the layout has 2 tensors");
  expect_refused(decode_welcome, with([](json& w) { w["plan"][1]["tensors"] = {~0ull}; }), "the layout has 2 tensors");
  expect_refused(decode_welcome, with([](json& w) { w["plan"][1]["tensors"] = json::array(); }), "plan[1] has no tensors");
  expect_refused(decode_welcome, with([](json& w) { w["plan"][1]["numel"] = 4; }), "plan[1].numel is 4, its tensors have 3");
  expect_refused(decode_welcome, with([](json& w) { w["plan"].erase(1); }), "leaves out");
  expect_refused(decode_welcome, with([](json& w) { w["plan"] = json::array(); }), "leaves out");
  expect_refused(decode_welcome, with([](json& w) { w["versions"].erase(0); }), "versions has 1 entries, expected 2");
  expect_refused(decode_welcome, with([](json& w) { w["merged_to"] = {1, 2, 3}; }), "merged_to has 3 entries, expected 2");
  expect_refused(decode_welcome, with([](json& w) { w["held"] = {{2, 5}}; }), "held[0] is 2, at most 1");
  expect_refused(decode_welcome, with([](json& w) { w["held"] = {1, 1}; }), "must be [fragment, to]");
}

TEST(WireRefusal, OtherBodies) {
  Random random(24);
  const auto with = [&](const std::string& bytes, auto change) { json m = unpack(bytes); change(m); return pack(m); };
  expect_refused(decode_pull, with(encode(any_pull(random)), [](json& m) { m["kind"] = 2; }), "kind is 2");
  expect_refused(decode_pull, with(encode(any_pull(random)), [](json& m) { m["fragment"] = 1ull << 32; }), "fragment is 4294967296");
  expect_refused(decode_begin, with(encode(any_begin(random)), [](json& m) { m["kind"] = 3; }), "kind is 3");
  expect_refused(decode_begin, with(encode(any_begin(random)), [](json& m) { m["from"] = 9; m["to"] = 8; }), "[9, 8) is backwards");
  expect_refused(decode_begin, with(encode(any_begin(random)), [](json& m) { m["merged"] = {{0, 5}}; }), "incarnation 0");
  expect_refused(decode_begin, with(encode(any_begin(random)), [](json& m) { m["merged"] = {{7, 5}, {7, 6}}; }), "repeats an incarnation");
  expect_refused(decode_begin, with(encode(any_begin(random)), [](json& m) { m["merged"] = {{7}}; }), "merged[0]");
  expect_refused(decode_verdict, with(encode(any_verdict(random)), [](json& m) { m["reason"] = 7; }), "reason is 7");
  expect_refused(decode_verdict, with(encode(any_verdict(random)), [](json& m) { m["from"] = 2; m["to"] = 1; }), "backwards");
  expect_refused(decode_verdict, with(encode(any_verdict(random)), [](json& m) { m["readopt"] = 1; }), "readopt must be true or false");
  expect_refused(decode_arm, pack({{"fragments", {3, 3}}}), "names fragment 3 twice");
  expect_refused(decode_heartbeat, pack({{"probe", false}, {"discarded", {{"lost", -1}}}, {"lr", 0.1}}), "discarded.lost");
  expect_refused(decode_heartbeat, pack({{"probe", false}, {"discarded", json::object()}, {"lr", -1.0}}), "lr must be a number");
  expect_refused(decode_heartbeat, pack({{"probe", false}, {"discarded", json::object()}, {"lr", "fast"}}), "lr must be a number");
  expect_refused(decode_reject, pack({{"code", "x"}, {"text", std::string(16385, 'x')}}), "text has 16385 bytes");
}

TEST(WireRefusal, StepCountsThatLie) {
  Random random(25);
  std::string bytes = encode(Step{1, 2, 3, {{0, {1, 1}}}});
  for (const std::uint64_t count : {std::uint64_t{0}, std::uint64_t{2}, ~std::uint64_t{0}, (~std::uint64_t{0}) / 20 + 2}) {
    for (std::size_t i = 0; i < 8; ++i) bytes[24 + i] = static_cast<char>(count >> (8 * i));
    expect_refused(decode_step, bytes, "announces " + std::to_string(count) + " adoptions");
  }
}

TEST(WireRefusal, MergedTableLongerThanARunsIncarnations) {
  Begin m;
  for (Incarnation i = 1; i <= kMaxIncarnations; ++i) m.merged.emplace_back(~i, ~std::uint64_t{0});
  const std::string largest = encode(m);
  EXPECT_TRUE(decode_begin(as_bytes(largest), nullptr));
  EXPECT_LE(largest.size(), max_payload_bytes(MessageType::kBegin, 64));
  m.merged.emplace_back(1, 1);
  expect_refused(decode_begin, encode(m), "merged has 65537 rows, at most 65536 are allowed");
}

TEST(WireRefusal, CountsThatLieCostNothing) {
  // A map, list or text that announces 2^32 - 1 entries in a handful of bytes.
  for (const unsigned char tag : {0xdf, 0xdd, 0xdb, 0xc6, 0xc9}) {
    std::string bytes = {static_cast<char>(0x81), static_cast<char>(0xa1), 'x', static_cast<char>(tag), '\xff', '\xff', '\xff', '\xff'};
    std::string why;
    EXPECT_FALSE(msgpack_well_formed(as_bytes(bytes), &why));
    EXPECT_NE(why.find("announces"), std::string::npos) << why;
    for (const Kind& kind : kinds()) EXPECT_FALSE(kind.decodes(as_bytes(bytes), &why));
  }
}

TEST(WireRefusal, DeepNestingOnAnyStack) {
  for (const char tag : {'\x91', '\x81'}) {
    std::string bytes;
    for (int i = 0; i < 8 << 20; ++i) {
      bytes += tag;
      if (tag == '\x81') bytes += "\xa1k";
    }
    bytes += '\xc0';
    std::string why;
    EXPECT_FALSE(decode_hello(as_bytes(bytes), &why).has_value());
    EXPECT_NE(why.find("deeper than 32"), std::string::npos) << why;
  }
  json deep = 1;
  for (int i = 0; i < 31; ++i) deep = json::array({deep});
  json hello = hello_json();
  hello["extra"] = deep;
  EXPECT_TRUE(decode_hello(as_bytes(pack(hello)), nullptr).has_value());
  hello["extra"] = json::array({deep});
  expect_refused(decode_hello, pack(hello), "deeper than 32");
}

TEST(WireRefusal, TooManyValues) {
  std::string bytes = "\xdd";
  const std::uint32_t count = (1u << 20) + 1;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(count >> shift);
  bytes.append(count, '\xc0');
  expect_refused(decode_welcome, bytes, "more than 1048576 values");
}

TEST(WireRefusal, DuplicateKeysNumbersAndStrayBytes) {
  std::string why;
  EXPECT_FALSE(msgpack_well_formed(as_bytes(std::string("\x82\xa1" "a\x01\xa1" "a\x02")), &why));
  EXPECT_NE(why.find("key 'a' appears twice"), std::string::npos) << why;
  EXPECT_FALSE(msgpack_well_formed(as_bytes(std::string("\x81\x01\x02")), &why));
  EXPECT_NE(why.find("a key is not text"), std::string::npos) << why;
  EXPECT_FALSE(msgpack_well_formed(as_bytes(std::string("\xc1")), &why));
  EXPECT_FALSE(msgpack_well_formed(as_bytes(std::string("\xca\x7f\xc0\x00\x00", 5)), &why));  // NaN
  EXPECT_NE(why.find("not finite"), std::string::npos) << why;
  EXPECT_FALSE(msgpack_well_formed(as_bytes(std::string("\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", 9)), &why));  // Inf
  EXPECT_FALSE(msgpack_well_formed({}, &why));
  expect_refused(decode_reject, encode(Reject{"a", "b"}) + "x", "1 bytes follow");
  for (const json& number : {json(std::numeric_limits<double>::quiet_NaN()), json(1e300)}) {
    json hello = hello_json();
    hello["tokens"] = number;
    EXPECT_FALSE(decode_hello(as_bytes(pack(hello)), &why).has_value());
  }
}

TEST(WireRefusal, SignedEncodingsOfPositiveNumbersPass) {
  // {"reason"...} bodies from encoders that always write int64.
  const std::string begin = encode(Arm{{5}});
  std::string bytes = "\x81\xa9" "fragments\x91\xd3";
  bytes += std::string("\0\0\0\0\0\0\0\5", 8);
  const auto arm = decode_arm(as_bytes(bytes), nullptr);
  ASSERT_TRUE(arm.has_value());
  EXPECT_EQ(arm->fragments, decode_arm(as_bytes(begin), nullptr)->fragments);
}

}  // namespace
}  // namespace diloco::wire_test
