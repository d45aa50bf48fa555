// A real child process with its output in files. Killed if the test ends before it.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "scratch_dir.h"

extern char** environ;

namespace diloco::testing {

class Child {
 public:
  Child(std::vector<std::string> arguments, std::vector<std::string> extra_environment = {}) {
    std::vector<std::string> environment = std::move(extra_environment);
    for (char** entry = environ; *entry != nullptr; ++entry) {
      if (std::string(*entry).rfind("DILOCO_", 0) != 0) environment.push_back(*entry);
    }
    std::vector<char*> argv, envp;
    for (auto& text : arguments) argv.push_back(text.data());
    for (auto& text : environment) envp.push_back(text.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    const std::string out = dir_.path() + "/out", err = dir_.path() + "/err";
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 1);
      ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 2);
      ::execve(argv[0], argv.data(), envp.data());
      ::_exit(127);
    }
  }
  ~Child() {
    if (status_ == kRunning) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status_, 0);
    }
  }
  Child(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  std::string out() const { return read("/out"); }
  std::string err() const { return read("/err"); }

  // Exit status, or -signal, or kRunning if it did not end in time.
  int wait(double limit_s = 30.0) {
    const auto deadline = after(limit_s);
    while (status_ == kRunning) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        status_ = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
      } else if (clock::now() >= deadline) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    }
    return status_;
  }
  // True once stdout (or stderr) contains the text; false if the child ends or the time does.
  bool says(const std::string& text, double limit_s = 30.0) {
    for (const auto deadline = after(limit_s); clock::now() < deadline;) {
      if ((out() + err()).find(text) != std::string::npos) return true;
      if (wait(0.0) != kRunning) return (out() + err()).find(text) != std::string::npos;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }

  static constexpr int kRunning = -1000;

 private:
  using clock = std::chrono::steady_clock;
  static clock::time_point after(double seconds) {
    return clock::now() + std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(seconds));
  }
  std::string read(const char* name) const {
    std::ifstream in(dir_.path() + name);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  ScratchDir dir_;
  pid_t pid_ = -1;
  int status_ = kRunning;
};

}  // namespace diloco::testing
