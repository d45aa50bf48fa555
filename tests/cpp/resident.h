// Whether resident memory says anything: sanitizers keep what was freed, and notes of their own.
#pragma once

#include "diloco/syncer/report.h"  // resident_bytes()

namespace diloco {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kResidentTells = false;
#else
constexpr bool kResidentTells = true;
#endif

}  // namespace diloco
