#include "diloco/wire/msgpack.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <unordered_set>

namespace diloco {
namespace {

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Walks the bytes once. Recursion is bounded by kMaxMsgpackDepth, which the parser behind it does not bound itself.
class Walker {
 public:
  explicit Walker(std::span<const std::byte> bytes) : bytes_(bytes) {}

  void walk() {
    value(0);
    if (at_ != bytes_.size()) throw Malformed(std::to_string(bytes_.size() - at_) + " bytes follow the body");
  }

 private:
  std::size_t left() const { return bytes_.size() - at_; }

  std::uint64_t number(std::size_t width) {
    if (left() < width) throw Malformed("cut short at byte " + std::to_string(bytes_.size()));
    std::uint64_t n = 0;
    for (std::size_t i = 0; i < width; ++i) n = n << 8 | std::to_integer<std::uint64_t>(bytes_[at_++]);
    return n;
  }

  std::string_view raw(std::uint64_t size) {
    if (size > left()) {
      throw Malformed("announces " + std::to_string(size) + " bytes where " + std::to_string(left()) + " are left");
    }
    std::string_view text(reinterpret_cast<const char*>(bytes_.data()) + at_, static_cast<std::size_t>(size));
    at_ += static_cast<std::size_t>(size);
    return text;
  }

  void array(std::uint64_t count, int depth) {
    check_count(count, count);
    for (std::uint64_t i = 0; i < count; ++i) value(depth + 1);
  }

  void map(std::uint64_t count, int depth) {
    check_count(count, 2 * count);
    std::unordered_set<std::string_view> keys;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string_view k = key();
      if (!keys.insert(k).second) throw Malformed("key '" + printable(k) + "' appears twice");
      value(depth + 1);
    }
  }

  void check_count(std::uint64_t count, std::uint64_t values) {
    if (values > left()) {
      throw Malformed("announces " + std::to_string(count) + " entries where " + std::to_string(left()) +
                      " bytes are left");
    }
  }

  std::string_view key() {
    const auto tag = static_cast<std::uint8_t>(number(1));
    if (tag >= 0xa0 && tag <= 0xbf) return raw(tag & 0x1f);
    if (tag >= 0xd9 && tag <= 0xdb) return raw(number(std::size_t{1} << (tag - 0xd9)));
    throw Malformed("a key is not text");
  }

  static std::string printable(std::string_view text) {
    return is_clean_text(text, false) ? std::string(text.substr(0, 64)) : "?";
  }

  void value(int depth) {
    if (depth > kMaxMsgpackDepth) throw Malformed("nested deeper than " + std::to_string(kMaxMsgpackDepth));
    if (++values_ > kMaxMsgpackValues) throw Malformed("more than " + std::to_string(kMaxMsgpackValues) + " values");
    const auto tag = static_cast<std::uint8_t>(number(1));
    if (tag <= 0x7f || tag >= 0xe0) return;
    if (tag <= 0x8f) return map(tag & 0x0f, depth);
    if (tag <= 0x9f) return array(tag & 0x0f, depth);
    if (tag <= 0xbf) return void(raw(tag & 0x1f));
    switch (tag) {
      case 0xc0: case 0xc2: case 0xc3: return;
      case 0xc4: case 0xc5: case 0xc6: return void(raw(number(std::size_t{1} << (tag - 0xc4))));
      case 0xc7: case 0xc8: case 0xc9: return void(raw(number(std::size_t{1} << (tag - 0xc7)) + 1));
      case 0xca: return finite(std::bit_cast<float>(static_cast<std::uint32_t>(number(4))));
      case 0xcb: return finite(std::bit_cast<double>(number(8)));
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return void(number(std::size_t{1} << (tag - 0xcc)));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return void(number(std::size_t{1} << (tag - 0xd0)));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return void(raw((std::uint64_t{1} << (tag - 0xd4)) + 1));
      case 0xd9: case 0xda: case 0xdb: return void(raw(number(std::size_t{1} << (tag - 0xd9))));
      case 0xdc: case 0xdd: return array(number(std::size_t{2} << (tag - 0xdc)), depth);
      case 0xde: case 0xdf: return map(number(std::size_t{2} << (tag - 0xde)), depth);
      default: throw Malformed("byte " + std::to_string(tag) + " begins no value");
    }
  }

  static void finite(double value) {
    if (!std::isfinite(value)) throw Malformed("a number is not finite");
  }

  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::size_t values_ = 0;
};

// Length of the UTF-8 sequence at text[i], 0 if there is none.
std::size_t utf8_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(text[k]); };
  const unsigned char lead = byte(i);
  std::size_t length = 0;
  std::uint32_t code = 0;
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) { length = 2; code = lead & 0x1f; }
  else if (lead >= 0xe0 && lead <= 0xef) { length = 3; code = lead & 0x0f; }
  else if (lead >= 0xf0 && lead <= 0xf4) { length = 4; code = lead & 0x07; }
  else return 0;
  if (text.size() - i < length) return 0;
  for (std::size_t k = 1; k < length; ++k) {
    if ((byte(i + k) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i + k) & 0x3f);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  return overlong || surrogate || code > 0x10ffff ? 0 : length;
}

}  // namespace

bool msgpack_well_formed(std::span<const std::byte> bytes, std::string* why) {
  try {
    Walker(bytes).walk();
    return true;
  } catch (const Malformed& error) {
    if (why) *why = error.what();
    return false;
  }
}

bool is_clean_text(std::string_view text, bool lines) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text, i);
    if (length == 0) return false;
    const auto first = static_cast<unsigned char>(text[i]);
    const bool control = first < 0x20 || first == 0x7f ||
                         (first == 0xc2 && static_cast<unsigned char>(text[i + 1]) < 0xa0);
    if (control && !(lines && (first == '\n' || first == '\t'))) return false;
    i += length;
  }
  return true;
}

}  // namespace diloco
