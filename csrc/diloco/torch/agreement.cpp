#include "diloco/torch/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "diloco/base/errors.h"
#include "diloco/base/version.h"
#include "diloco/wire/messages.h"

namespace diloco {
namespace {

constexpr char kProblem = '!';
constexpr const char* kPlace = "numbers";  // beside the settings: where they are merged

std::vector<at::Tensor> rows_like(const at::Tensor& tensor, int ranks) {
  std::vector<at::Tensor> rows;
  for (int rank = 0; rank < ranks; ++rank) rows.push_back(at::zeros(tensor.sizes(), tensor.options()));
  return rows;
}

// The greeting of a learner to a syncer says all that must agree.
std::string greeting(const Layout& layout, const Settings& settings, bool on_device, int rank) {
  Hello hello;
  hello.learner_id = "rank " + std::to_string(rank);
  hello.software = std::string("diloco ") + kVersion;
  hello.layout = layout;
  hello.settings = settings.to_map();
  hello.settings.erase("preset");  // only gives the others their values
  hello.settings[kPlace] = on_device ? "on the device" : "in host memory";
  return encode(hello);
}

std::string advice() { return "; give every rank the same model and the same settings"; }

}  // namespace

std::vector<std::string> exchange_texts(const Collectives& group, const std::string& mine) {
  at::Tensor length = at::empty({1}, at::kLong);
  *static_cast<std::int64_t*>(length.data_ptr()) = static_cast<std::int64_t>(mine.size());
  const std::vector<at::Tensor> lengths = rows_like(length, group.size());
  group.all_gather(lengths, length);
  std::int64_t longest = 1;
  for (const auto& one : lengths) longest = std::max(longest, *static_cast<std::int64_t*>(one.data_ptr()));

  at::Tensor text = at::zeros({longest}, at::kByte);
  std::memcpy(text.data_ptr(), mine.data(), mine.size());
  const std::vector<at::Tensor> texts = rows_like(text, group.size());
  group.all_gather(texts, text);
  std::vector<std::string> out;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    out.emplace_back(static_cast<const char*>(texts[rank].data_ptr()),
                     static_cast<std::size_t>(*static_cast<std::int64_t*>(lengths[rank].data_ptr())));
  }
  return out;
}

void agree(const Collectives& group, const Layout& layout, const Settings& settings, bool on_device,
           const std::string& problem) {
  const auto texts = exchange_texts(
      group, problem.empty() ? greeting(layout, settings, on_device, group.rank()) : kProblem + problem);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with(kProblem)) {
      throw ConfigError("rank " + std::to_string(rank) + ": " + texts[rank].substr(1));
    }
  }
  std::optional<Hello> first;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::string why;
    const auto hello = decode_hello(std::as_bytes(std::span(texts[rank])), &why);
    if (!hello) throw ConfigError("rank " + std::to_string(rank) + " sent no greeting of this package: " + why + advice());
    if (!first) first = hello;
    if (hello->software != first->software) {
      throw ConfigError("rank " + std::to_string(rank) + " runs " + hello->software + ", rank 0 runs " +
                        first->software + "; install the same version everywhere");
    }
    const std::string difference =
        first_difference(hello->layout, hello->settings, static_cast<int>(rank), first->layout, first->settings);
    if (!difference.empty()) throw ConfigError(difference + advice());
  }
}

}  // namespace diloco
