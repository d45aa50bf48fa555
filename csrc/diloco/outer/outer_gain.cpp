#include <fmt/format.h>

#include "diloco/outer/outer.h"

namespace diloco {

OuterGain outer_gain(const OuterOptions& o) {
  const double lr = o.lr, mu = o.momentum;
  switch (o.kind) {
    case OuterKind::kSgd: return {lr, lr};
    case OuterKind::kNesterov: return {lr * (1.0 + mu), lr / (1.0 - mu)};
    case OuterKind::kAdam: return {};
    case OuterKind::kDelayedNesterov: break;
  }
  // N gradients, each divided by N, make one step of Nesterov.
  return {o.delay == 1 ? lr * (1.0 + mu) : lr / o.delay, lr / (1.0 - mu) / o.delay};
}

std::vector<std::string> outer_warnings(const Settings& s) {
  std::vector<std::string> warnings;
  const OuterGain gain = outer_gain(outer_options(s));
  if (gain.first >= 2.0) {
    warnings.push_back(fmt::format("the first outer step goes {:.3g} times as far as the learners went; from 2 on an outer "
                                   "step that all learners agree on makes things worse; lower outer_lr", gain.first));
  }
  if (s.outer_optimizer == OuterKind::kNesterov && s.trigger == Trigger::kArrival) {
    warnings.push_back("outer_optimizer = nesterov with trigger = arrival applies the momentum once per learner: it "
                       "overshoots (Async Local-SGD, section 4); use delayed_nesterov, or sgd");
  }
  // Changes of few steps point the same way again and again, and the momentum multiplies them.
  if (gain.long_run > 2.0 && s.sync_every < 16 && s.trigger == Trigger::kDue) {
    warnings.push_back(fmt::format("changes made in {} steps point the same way from round to round, and the outer optimizer "
                                   "multiplies those by up to {:.3g}: known to overshoot; lower outer_lr or outer_momentum, or "
                                   "raise sync_every", s.sync_every, gain.long_run));
  }
  return warnings;
}

}  // namespace diloco
