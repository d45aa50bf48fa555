// The version of this package, from version.txt.
#pragma once

namespace diloco {

extern const char* const kVersion;  // "0.1.0"

}  // namespace diloco
