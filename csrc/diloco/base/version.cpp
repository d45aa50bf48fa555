#include "diloco/base/version.h"

namespace diloco {

const char* const kVersion = DILOCO_VERSION;

}  // namespace diloco
