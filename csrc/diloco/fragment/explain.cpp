#include "diloco/fragment/explain.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

namespace diloco {
namespace {

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; bytes >= 1024.0 && unit < 4; ++unit) bytes /= 1024.0;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, units[unit]);
}

Clock first_sync(FragmentId p, const Settings& settings, std::uint32_t fragments) {
  if (settings.mode == Mode::kDecoupled) return first_due(p, settings.sync_every, fragments);
  Clock at = lockstep_adoption(p, 0, settings, fragments);
  while (!lockstep_adopts_at(p, at, settings, fragments)) at += settings.sync_every;
  return at;
}

std::string tensors_text(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  if (names.size() <= kShown) return fmt::format("{}", fmt::join(names, ", "));
  const std::vector<std::string> shown(names.begin(), names.begin() + kShown);
  return fmt::format("{}, and {} more", fmt::join(shown, ", "), names.size() - kShown);
}

}  // namespace

PlanExplained explain(const Layout& layout, const Settings& settings) {
  settings.validate();
  const Plan plan = make_plan(layout, settings.fragmenter, settings.num_fragments);
  PlanExplained out;
  out.numel = layout.numel();
  out.asked_fragments = settings.num_fragments;
  std::map<Clock, std::uint64_t> due_bytes;  // by clock within a period
  std::map<Clock, std::uint64_t> due_fragments;
  std::uint64_t all_bytes = 0;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    FragmentExplained fragment;
    fragment.fragment = p;
    for (const auto tensor : plan.fragments[p].tensors) fragment.tensors.push_back(layout.tensors[tensor].name);
    fragment.numel = plan.fragments[p].numel;
    fragment.up_bytes = payload_layout(layout, plan, p, PayloadKind::kContribution, settings).bytes;
    fragment.down_bytes = payload_layout(layout, plan, p, PayloadKind::kImage, settings).bytes;
    fragment.due = first_sync(p, settings, plan.size());
    due_bytes[fragment.due % settings.sync_every] += fragment.up_bytes;
    ++due_fragments[fragment.due % settings.sync_every];
    all_bytes += fragment.up_bytes;
    out.fragments.push_back(std::move(fragment));
  }
  for (const auto& [clock, bytes] : due_bytes) {
    out.peak_up_bytes = std::max(out.peak_up_bytes, bytes);
    const double even = static_cast<double>(all_bytes) / plan.size() * static_cast<double>(due_fragments[clock]);
    out.ideal_peak_up_bytes = std::max(out.ideal_peak_up_bytes, even);
  }
  for (const auto& tensor : layout.tensors) {
    // numel > total / P without losing the remainder.
    if (plan.size() > 1 && tensor.numel() > out.numel / plan.size()) out.oversized.push_back(tensor.name);
  }
  return out;
}

std::string to_text(const PlanExplained& plan, const Settings& settings) {
  std::string text = fmt::format("{} elements in {} fragments ({}), each synced every {} steps\n", plan.numel,
                                 plan.fragments.size(), settings.get("fragmenter"), settings.sync_every);
  if (settings.fragmenter != Fragmenter::kStrided && plan.asked_fragments > plan.fragments.size()) {
    text += fmt::format("num_fragments = {} was asked for; there are {} tensors, and a tensor is never split\n",
                        plan.asked_fragments, plan.fragments.size());
  }
  text += fmt::format("{:>8}  {:>8}  {:>12}  {:>10}  {:>10}  {}\n", "fragment", "due step", "elements", "up", "down", "tensors");
  for (const auto& fragment : plan.fragments) {
    text += fmt::format("{:>8}  {:>8}  {:>12}  {:>10}  {:>10}  {}\n", fragment.fragment, fragment.due, fragment.numel,
                        bytes_text(static_cast<double>(fragment.up_bytes)),
                        bytes_text(static_cast<double>(fragment.down_bytes)), tensors_text(fragment.tensors));
  }
  const double ratio =
      plan.ideal_peak_up_bytes > 0.0 ? static_cast<double>(plan.peak_up_bytes) / plan.ideal_peak_up_bytes : 1.0;
  text += fmt::format("peak: {} become due in one step, {:.2f} times what equal fragments would ({})",
                      bytes_text(static_cast<double>(plan.peak_up_bytes)), ratio, bytes_text(plan.ideal_peak_up_bytes));
  if (!plan.oversized.empty()) {
    text += fmt::format("\nlarger than an equal share of the model: {}; the peak cannot be lower, more fragments do not help",
                        tensors_text(plan.oversized));
  }
  return text;
}

}  // namespace diloco
