// The leader of an island: what all ranks are to do at the next boundary, and its own part of doing it.
#include <algorithm>

#include "diloco/core/learner_impl.h"

namespace diloco {

// Payloads of what this process holds: its part of an island, else everything.
void LearnerCore::Impl::make_payloads() {
  const Part part = island() ? in_order_of(layout, options.layout, options.island->part) : Part{};
  payloads = payload_layouts(part.empty() ? layout : layout_of_part(layout, part), *plan, settings);
}

void LearnerCore::Impl::on_island_planned(const IslandPlanned& event) {
  planned = event.plan;
  for (FragmentId p = 0; p < planned->orders.fragments.size(); ++p) {
    if (!planned->orders.fragments[p].stage) continue;
    stage(p);
    fragments[p].staged_step = steps;
    // The other ranks have a new copy now; an older one of this rank must not be sent.
    if (!fragments[p].staging) fragments[p].staged.reset();
  }
}

void LearnerCore::Impl::adopt_planned() {
  const auto plan_now = std::exchange(planned, nullptr);
  for (FragmentId p = 0; p < plan_now->orders.fragments.size(); ++p) {
    const auto how = std::exchange(fragments[p].ordered, std::nullopt);
    if (!how || !plan_now->go(p)) continue;
    if (how->back) {
      readopt(p);
    } else {
      const ReadyImage image = *std::exchange(fragments[p].pending, std::nullopt);
      adopt(p, image, *how);
    }
  }
}

IslandOrders LearnerCore::Impl::orders(bool plan_known) {
  IslandOrders out;
  const ShardLink& link = links.front();
  out.incarnation = options.incarnation;
  out.session = link.session;
  out.lane_token = link.session == 0 ? 0 : link.lane_token;
  if (!plan_known || !plan) return out;
  out.fragments.resize(fragments.size());
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    LearnerFragment& fragment = fragments[p];
    FragmentOrder& order = out.fragments[p];
    if (fragment.ready && (!fragment.pending || fragment.ready->version > fragment.pending->version)) {
      fragment.pending = *std::exchange(fragment.ready, std::nullopt);
    }
    order.stage = wants_staging(p);
    // Back first, whatever has arrived: a version may not be at all ranks yet, and what stays poisoned in one fragment is
    // in all of them after the next step.
    if (!fragment.readopt && wants_adoption(p)) {
      fragment.ordered = adoption_of(p, *fragment.pending);
      order.adopt = fragment.pending->version;
    } else if (fragment.readopt && !fragment.anchor_sending) {
      fragment.ordered = AdoptPlan{AdoptFormula::kOverwrite, {}, fragment.readopt, true, true};
      order.back = true;
    }
    if (const auto& how = fragment.ordered) {
      order.formula = how->formula;
      order.sent_step = how->merged ? how->merged->steps_at_to : 0;
      order.dropped = how->drop.has_value();
      order.reset_inner_state = how->reset;
    }
    std::size_t kept = 0;
    for (auto image = fragment.sent.rbegin(); image != fragment.sent.rend() && kept < kCopiesKept; ++image) {
      order.kept[kept++] = image->steps_at_to;
    }
  }
  return out;
}

IslandReport LearnerCore::Impl::report() const {
  IslandReport out;
  for (const LearnerFragment& fragment : fragments) {
    const bool here = fragment.pending && !fragment.anchor_sending;
    out.ready.push_back(here ? fragment.pending->version : Version{});
    out.arrived.emplace_back(fragment.pending ? fragment.pending->version : Version{});
  }
  return out;
}

bool LearnerCore::busy() const {
  for (FragmentId p = 0; p < impl_->fragments.size(); ++p) {
    const LearnerFragment& fragment = impl_->fragments[p];
    if (impl_->wants_staging(p) || impl_->wants_adoption(p) || fragment.ready || fragment.readopt) return true;
  }
  return false;
}
IslandOrders LearnerCore::orders(bool plan_known) { return impl_->orders(plan_known); }
IslandReport LearnerCore::report() const { return impl_->report(); }
const std::string& LearnerCore::welcome() const { return impl_->welcome_body; }
ConstBufferPtr LearnerCore::arrived(FragmentId p, const Version& version) const {
  const auto& pending = impl_->fragments.at(p).pending;
  return pending && pending->version == version ? pending->bytes : nullptr;
}

}  // namespace diloco
