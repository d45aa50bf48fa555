#include "diloco/base/presets.h"

namespace diloco {

const std::vector<PresetInfo>& presets() {
  static const std::vector<PresetInfo> all = {
      {"decoupled",
       "Decoupled DiLoCo (2026)",
       "Schedule, quorum, grace, weights, merge, anchor and overwriting are the paper's. It publishes no outer learning "
       "rate: 0.4 with momentum 0.9 is our choice, Streaming DiLoCo's value, below DiLoCo's 0.7 because RDA keeps the "
       "norm that averaging loses. gamma 0.8 is our choice too. Contributions travel as bf16.",
       {{"mode", "decoupled"},       {"sync_every", "24"},           {"num_fragments", "24"},
        {"overlap_steps", "2"},      {"min_quorum", "1"},            {"grace", "adaptive"},
        {"fragmenter", "balanced"},  {"weights", "tokens_per_step"}, {"merge", "rda"},
        {"outer_optimizer", "nesterov"}, {"outer_lr", "0.4"},        {"outer_momentum", "0.9"},
        {"anchor", "syncer"},        {"adopt", "overwrite"}}},
      {"streaming",
       "Streaming DiLoCo (2025)",
       "Outer rate 0.4 tuned there at small scale, momentum 0.9, one step of overlap, half of the local weights kept, "
       "interleaved layers. 8 fragments are 3 layers each of its 24-layer model; give num_fragments = layers / 3. Its FP4 "
       "deltas travel as bf16 here.",
       {{"mode", "lockstep"},        {"offsets", "streaming"},       {"sync_every", "100"},
        {"num_fragments", "8"},      {"overlap_steps", "1"},         {"fragmenter", "strided"},
        {"weights", "equal"},        {"merge", "mean"},              {"outer_optimizer", "nesterov"},
        {"outer_lr", "0.4"},         {"outer_momentum", "0.9"},      {"adopt", "blend"},          {"blend_alpha", "0.5"}}},
      {"diloco",
       "DiLoCo (2023)",
       "All weights at once every 500 steps, plain average, Nesterov 0.7 / 0.9, the paper's best of its sweep. Deltas "
       "travel as f32, as there.",
       {{"mode", "lockstep"},        {"sync_every", "500"},          {"num_fragments", "1"},
        {"overlap_steps", "0"},      {"weights", "equal"},           {"merge", "mean"},
        {"outer_optimizer", "nesterov"}, {"outer_lr", "0.7"},        {"outer_momentum", "0.9"},
        {"adopt", "overwrite"},      {"wire_dtype", "f32"}}},
      {"async",
       "Asynchronous Local-SGD (2024)",
       "Each learner is merged alone when it has made its steps, and answered alone. Delayed Nesterov with c = 0; "
       "outer_delay should be the number of learners, 4 in the paper's main runs. Learners train on while the answer is "
       "under way; the paper's wait for it.",
       {{"mode", "decoupled"},       {"trigger", "arrival"},         {"step_counts", "dylu"},
        {"sync_every", "50"},        {"num_fragments", "1"},         {"overlap_steps", "0"},
        {"grace", "none"},           {"weights", "equal"},           {"merge", "mean"},
        {"outer_optimizer", "delayed_nesterov"}, {"outer_lr", "0.7"},
        {"outer_momentum", "0.9"},   {"outer_delay", "4"},           {"outer_delay_c", "0"},
        {"adopt", "overwrite"}}},
      {"finetune",
       "ours",
       "Fine-tuning is short and starts from good weights: an outer momentum would still be gathering speed, or "
       "overshoot, when it ends. So: plain averages (outer step of 1 without momentum), often, nothing thrown away.",
       {{"mode", "decoupled"},       {"sync_every", "16"},           {"num_fragments", "8"},
        {"overlap_steps", "2"},      {"merge", "mean"},              {"outer_optimizer", "sgd"},
        {"outer_lr", "1"},           {"adopt", "rebase"}}},
  };
  return all;
}

}  // namespace diloco
