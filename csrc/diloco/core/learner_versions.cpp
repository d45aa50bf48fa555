// What a learner says when it comes back to a syncer that is not where it left it. What is done about it is done
// elsewhere: a version that differs is adopted, and only work on top of the adopted one is ever sent.
#include <fmt/format.h>

#include "diloco/core/learner_impl.h"

namespace diloco {

void LearnerCore::Impl::say_versions(const ShardLink& link, const Welcome& welcome) {
  struct Found {
    std::uint32_t count = 0;
    std::string first;
    void add(FragmentId p, const Version& here, const Version& there) {
      if (count++ == 0) {
        first = there.none() ? fmt::format("fragment {}: {} here", p, to_string(here))
                             : fmt::format("fragment {}: {} here, {} there", p, to_string(here), to_string(there));
      }
    }
  } missing, rolled_back, gone_on;
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    if (!serves(link, p)) continue;
    const Version here = fragments[p].adopted, there = welcome.versions[p];
    if (here.none() || here == there) continue;
    // The same n in a later epoch: these very weights, which a syncer without state has had back from somebody.
    if (there.none()) missing.add(p, here, there);
    else if (there.n < here.n) rolled_back.add(p, here, there);
    else if (there.n > here.n) gone_on.add(p, here, there);
  }
  if (missing.count > 0) {
    log(LogLevel::kInfo, fmt::format("the {} has no weights of {} fragment(s) ({}): the newest that any learner holds will "
                                     "be taken", name_of(link), missing.count, missing.first));
  }
  if (rolled_back.count > 0) {
    log(LogLevel::kWarning, fmt::format("the {} is at earlier versions of {} fragment(s) than this learner ({}): it was rolled "
                                        "back. Its weights are taken; what was merged between is lost, and work done here "
                                        "counts from them on", name_of(link), rolled_back.count, rolled_back.first));
  }
  if (gone_on.count > 0) {
    log(LogLevel::kInfo, fmt::format("the {} has gone on with {} fragment(s) ({}): they are adopted as they arrive",
                                     name_of(link), gone_on.count, gone_on.first));
  }
}

}  // namespace diloco
