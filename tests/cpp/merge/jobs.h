// Builds merge jobs and double-precision references for tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "diloco/codec/codec.h"
#include "diloco/merge/merge.h"
#include "fragment/layouts.h"
#include "kernels/arrays.h"

namespace diloco::test {

inline BufferPtr buffer_of(const Floats& values) {
  BufferPtr buffer = Buffer::make(values.size() * 4);
  if (!values.empty()) std::memcpy(buffer->data(), values.data(), values.size() * 4);
  return buffer;
}

inline Floats floats_of(const Buffer& buffer) { return floats_of(buffer.bytes()); }

inline std::shared_ptr<const FragmentState> state_of(const Floats& theta, const Floats& momentum = {}) {
  auto state = std::make_shared<FragmentState>();
  state->version = {1, 7};
  state->theta = buffer_of(theta);
  if (!momentum.empty()) state->outer_state = buffer_of(momentum);
  return state;
}

// A fragment of the whole layout, payloads in f32 unless settings say otherwise.
struct JobBuilder {
  Layout layout;
  Settings settings;
  Plan plan;
  MergeJob job;

  JobBuilder(Layout tensors, const Floats& theta, const Floats& momentum = {},
             WireDtype wire = WireDtype::kF32, WireDtype downlink = WireDtype::kF32)
      : layout(std::move(tensors)) {
    settings.wire_dtype = wire;
    settings.downlink_dtype = downlink;
    plan = make_plan(layout, Fragmenter::kBalanced, 1);
    job.in = payload_layout(layout, plan, 0, PayloadKind::kContribution, settings);
    job.out = payload_layout(layout, plan, 0, PayloadKind::kImage, settings);
    job.use_rda = rda_segments(layout, job.in, settings);
    job.previous = state_of(theta, momentum);
    job.next_version = {1, 8};
  }

  // `base`: theta of the version it started from, with anchor = syncer.
  JobBuilder& add(const Floats& displacement, double weight, const std::string& name = "", const Floats& base = {}) {
    BufferPtr payload = Buffer::make(job.in.bytes);
    encode_payload(job.in, displacement.data(), payload->data());
    ScreenResult screened = screen(job.in, payload->data());
    BufferPtr image;
    if (!base.empty()) {
      image = Buffer::make(job.out.bytes);
      encode_payload(job.out, base.data(), image->data());
    }
    job.members.push_back({name, payload, weight, screened.norms, image});
    return *this;
  }

  JobBuilder& nesterov(float lr, float momentum) {
    job.outer = {OuterKind::kNesterov, lr, momentum};
    return *this;
  }
};

// theta - next: the merged displacement, if the outer optimizer is SGD with lr 1 and theta was 0.
inline Floats merged_from_zero(const JobBuilder& builder) {
  const MergeResult result = run_merge(builder.job);
  EXPECT_TRUE(result.ok);
  Floats merged = floats_of(*result.next->theta);
  for (float& value : merged) value = -value;
  return merged;
}

using Doubles = std::vector<double>;

inline double norm(const Doubles& values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

inline Doubles doubles(const Floats& values) { return {values.begin(), values.end()}; }

inline Doubles reference_mean(const std::vector<Floats>& vectors, const Doubles& weights) {
  double total = 0.0;
  for (const double weight : weights) total += weight;
  Doubles mean(vectors[0].size(), 0.0);
  for (std::size_t m = 0; m < vectors.size(); ++m) {
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += weights[m] / total * vectors[m][i];
  }
  return mean;
}

// The formula as printed: (sum w ||v|| / sum w) * phi(sum w phi(v) / sum w), phi(0) = 0.
inline Doubles reference_rda(const std::vector<Floats>& vectors, const Doubles& weights, double* condition = nullptr) {
  Doubles direction(vectors[0].size(), 0.0);
  double total = 0.0;
  double radius = 0.0;
  for (std::size_t m = 0; m < vectors.size(); ++m) {
    const double length = norm(doubles(vectors[m]));
    total += weights[m];
    radius += weights[m] * length;
    if (length == 0.0) continue;
    for (std::size_t i = 0; i < direction.size(); ++i) direction[i] += weights[m] * vectors[m][i] / length;
  }
  const double length = norm(direction);
  if (condition) *condition = total / length;
  for (double& value : direction) value *= length == 0.0 ? 0.0 : radius / total / length;
  return direction;
}

inline double distance(const Floats& got, const Doubles& expected) {
  Doubles difference(expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) difference[i] = got[i] - expected[i];
  return norm(difference);
}

}  // namespace diloco::test
