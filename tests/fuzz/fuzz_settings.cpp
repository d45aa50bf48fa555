// Setting names and values as text: whatever is accepted must read back as itself.
#include <cstdlib>
#include <string>

#include "diloco/base/errors.h"
#include "diloco/base/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto cut = text.find('=');
  if (cut == std::string::npos) return 0;
  diloco::Settings settings;
  try {
    settings.set(text.substr(0, cut), text.substr(cut + 1));
    settings.validate();
  } catch (const diloco::ConfigError&) {
    return 0;
  }
  diloco::Settings again;
  for (const auto& [name, value] : settings.to_map()) again.set(name, value);
  if (again.to_map() != settings.to_map()) std::abort();
  return 0;
}
