// What `diloco bench` times: named pieces of work, and yardsticks for them. Torch-free; whoever times them makes them in turn,
// so that all see the same machine.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "diloco/base/parallel.h"

namespace diloco::bench {

struct Workload {
  std::string name;
  std::uint64_t bytes = 0;  // that one run must move at least
  std::function<void()> run;
};

// What memory gives, on arrays of `megabytes` each: read (sum), copy, triad (a = b + s c), as STREAM counts them: bytes read
// and bytes written, not what a store reads of its line first.
std::vector<Workload> memory_workloads(std::uint64_t megabytes, const Parallel& parallel);

struct MergeShape {
  std::uint64_t elements = 16'000'000;
  std::uint64_t tensor = 1'000'000;  // elements of one tensor; the last one may be smaller
  unsigned members = 8;
  bool bf16 = false;                 // contributions and image; else both f32
};
// "mean": weighted mean, Nesterov, image. "rda": the same with RDA, norms known as after arrival. "rda from memory": norms
// too. Their bytes: each payload once per pass, theta and momentum read and written once, the image written once. The
// payloads are shared, each has states of its own: about elements * (4 * members + 80) bytes in all, at most.
std::vector<Workload> merge_workloads(const MergeShape& shape, const Parallel& parallel);

}  // namespace diloco::bench
