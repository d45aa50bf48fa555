// Random numbers of a simulation, without state shared between purposes: every draw is a hash of the seed, its purpose
// and what counts there (the learner, its life, the step, ...). So taking something out of a scenario does not change what
// the rest of it draws.
#pragma once

#include <cstdint>

namespace diloco::sim {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;

constexpr std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

enum class Purpose : std::uint64_t {
  kIncarnation, kParameters, kStepTime, kWalk, kTokens, kLearnerCore, kSyncerCore, kDelay, kFate, kScenario, kFault
};

template <class... Keys>
constexpr std::uint64_t draw(std::uint64_t seed, Purpose purpose, Keys... keys) {
  std::uint64_t hash = mix(seed + kGolden * (static_cast<std::uint64_t>(purpose) + 1));
  ((hash = mix(hash + kGolden * (static_cast<std::uint64_t>(keys) + 1))), ...);
  return hash;
}

constexpr double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }  // [0, 1)

// A sequence under one key.
class Stream {
 public:
  explicit Stream(std::uint64_t key) : key_(key) {}
  std::uint64_t operator()() { return mix(key_ + kGolden * ++count_); }
  std::uint64_t below(std::uint64_t n) { return (*this)() % n; }
  double uniform(double low, double high) { return low + (high - low) * unit((*this)()); }
  bool chance(double probability) { return unit((*this)()) < probability; }

 private:
  std::uint64_t key_;
  std::uint64_t count_ = 0;
};

}  // namespace diloco::sim
