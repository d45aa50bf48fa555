// The smallest training that can go wrong: every learner descends its own quadratic bowl, 0.5 * |w - target|^2.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "diloco/base/clock.h"
#include "diloco/learner/learner.h"
#include "diloco/syncer/syncer.h"
#include "diloco/transport/inproc.h"
#include "learner/array_store.h"

namespace diloco::testing {

inline std::vector<NamedShape> bowl_shapes() { return {{"a.weight", {4, 8}}, {"b.bias", {7}}, {"c.weight", {3, 5}}, {"d", {}}}; }

struct Bowl {
  explicit Bowl(float target_value, std::vector<NamedShape> shapes = bowl_shapes(), float start = 0.0f)
      : store(std::make_shared<ArrayStore>(shapes, start)), target(target_value) {}

  void step(float lr) {
    for (auto& tensor : store->values) {
      for (float& w : tensor) w -= lr * (w - target);
    }
  }
  double distance_to(float value) const {
    double worst = 0;
    for (const auto& tensor : store->values) {
      for (const float w : tensor) worst = std::max(worst, std::abs(static_cast<double>(w) - value));
    }
    return worst;
  }

  std::shared_ptr<ArrayStore> store;
  float target;
};

// A network for one test: in process, or ZeroMQ on loopback.
class Net {
 public:
  explicit Net(bool inproc) : inproc_(inproc ? InprocNetwork::make() : nullptr) {}

  std::unique_ptr<Syncer> syncer(SyncerOptions options) {
    TransportLimits limits;
    limits.chunk_bytes = options.settings.chunk_bytes;
    if (!options.log) options.log = [](LogLevel, const std::string&) {};
    auto transport = inproc_ ? inproc_->server(limits) : nullptr;
    return std::make_unique<Syncer>(std::move(options), std::move(transport));
  }
  std::unique_ptr<Learner> learner(const std::string& endpoint, LearnerOptions options,
                                   std::shared_ptr<ParameterStore> store) {
    TransportLimits limits;
    limits.linger_s = options.linger_s;
    options.syncer = endpoint;
    if (!options.log) options.log = [](LogLevel, const std::string&) {};
    auto transport = inproc_ ? inproc_->client(endpoint, limits) : nullptr;
    return std::make_unique<Learner>(std::move(options), std::move(store), std::move(transport));
  }
  // Bare ends, to say what no shell says.
  std::unique_ptr<ClientTransport> client(const std::string& endpoint) {
    return inproc_ ? inproc_->client(endpoint, {}) : make_zmq_client(endpoint, {});
  }
  std::unique_ptr<ServerTransport> server() { return inproc_ ? inproc_->server({}) : make_zmq_server({}); }
  InprocNetwork* inproc() { return inproc_.get(); }

 private:
  std::shared_ptr<InprocNetwork> inproc_;
};

inline LearnerOptions named(const std::string& id) {
  LearnerOptions options;
  options.learner_id = id;
  return options;
}

// Stands for the time a step computes. Not a synchronisation: tests end on conditions.
inline void compute() { std::this_thread::sleep_for(std::chrono::microseconds(500)); }

// Trains until `done` holds; false if that took longer than `limit_s`.
inline bool train_until(Learner& learner, Bowl& bowl, float lr, const std::function<bool()>& done, Seconds limit_s = 30) {
  const TimePoint deadline = monotonic_now() + limit_s;
  while (monotonic_now() < deadline) {
    if (done()) return true;
    bowl.step(lr);
    compute();
    learner.boundary({1});
  }
  return done();
}

inline bool wait_until(const std::function<bool()>& done, Seconds limit_s = 30) {
  const TimePoint deadline = monotonic_now() + limit_s;
  while (!done()) {
    if (monotonic_now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline Settings small_settings() {
  Settings settings;
  settings.sync_every = 8;
  settings.num_fragments = 2;
  settings.overlap_steps = 1;
  settings.heartbeat_interval_s = 0.1;
  settings.heartbeat_timeout_s = 2.0;
  return settings;
}

}  // namespace diloco::testing
