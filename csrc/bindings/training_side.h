// What the bindings of both learners share: how parameters come in, log lines go out, and a wait hears Python.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "diloco/base/log_level.h"
#include "diloco/torch/parameter_store.h"

namespace diloco::bindings {

// Log lines wait here until Python asks for them: nothing the C++ side holds refers to a Python object, so neither a
// thread nor a destructor ever needs the interpreter.
class LogQueue {
 public:
  void push(LogLevel level, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (lines_.size() < kMost) lines_.emplace_back(level_name(level), text);
  }
  bool empty() {
    const std::lock_guard lock(mutex_);
    return lines_.empty();
  }
  std::vector<std::pair<std::string, std::string>> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  static constexpr std::size_t kMost = 1000;
  std::mutex mutex_;
  std::vector<std::pair<std::string, std::string>> lines_;
};

// Called now and then while the training thread waits; what it raises (KeyboardInterrupt) ends the wait.
inline std::function<void()> callback_with_gil(const py::object& while_waiting) {
  if (while_waiting.is_none()) return {};
  return [callback = while_waiting.ptr()] {  // borrowed: the caller's argument outlives the call
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    py::reinterpret_borrow<py::object>(callback)();
  };
}

// A native learner as Python holds it.
template <class L>
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  ~Held() {
    if (getpid() != pid_) {  // forked child: the threads are the parent's, there is nothing to join
      [[maybe_unused]] const auto* leaked = learner_.release();
      return;
    }
    const py::gil_scoped_release release;
    learner_.reset();
  }
  L& get() { return *learner_; }
  LogQueue& log() { return *log_; }

 protected:
  std::function<void(LogLevel, const std::string&)> into_log() const {
    return [log = log_](LogLevel level, const std::string& text) { log->push(level, text); };
  }
  std::unique_ptr<L> learner_;

 private:
  std::shared_ptr<LogQueue> log_ = std::make_shared<LogQueue>();
  pid_t pid_ = getpid();
};

using PyParameter = std::tuple<std::string, at::Tensor, std::vector<std::string>>;

inline std::vector<NamedParameter> named_parameters(const std::vector<PyParameter>& parameters) {
  std::vector<NamedParameter> named;
  for (const auto& [name, tensor, aliases] : parameters) named.push_back({name, tensor, aliases});
  return named;
}

}  // namespace diloco::bindings
