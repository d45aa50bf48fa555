#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "diloco/base/errors.h"
#include "diloco/base/log_line.h"
#include "diloco/base/version.h"
#include "diloco/syncer/syncer.h"
#include "diloco/wire/header.h"

extern char** environ;

namespace diloco {
namespace {

constexpr int kBadArguments = 2;
constexpr int kTroubleAtStart = 1;

// Variables of this project that are no settings.
const std::vector<std::string> kOtherVariables = {
    "DILOCO_BUILD_DIR", "DILOCO_LEARNER_ID", "DILOCO_LEDGER_DIR", "DILOCO_LOG_LEVEL",
    "DILOCO_SANITIZE",  "DILOCO_SOAK",       "DILOCO_SYNCER"};
const std::vector<std::string> kLevels = {"debug", "info", "warning", "error"};

struct Arguments {
  SyncerOptions syncer;
  std::map<std::string, std::string> settings;  // as given on the command line
  std::string config;
  std::string log_level;
  bool die_with_parent = false;
};

// ---- signals: a handler may only write to a pipe ----

std::atomic<int> signal_pipe{-1};
std::atomic<int> signals_seen{0};

void on_signal(int number) {
  const int before = signals_seen.fetch_add(1);
  if (before > 0) ::_exit(128 + number);
  const int saved = errno;
  const char byte = static_cast<char>(number);
  [[maybe_unused]] const auto written = ::write(signal_pipe.load(), &byte, 1);
  errno = saved;
}

// Installs the handlers for its lifetime; wait() returns the signal that came.
class SignalGuard {
 public:
  SignalGuard() {
    if (::pipe2(fds_, O_CLOEXEC) != 0) throw TransportError("cannot make a pipe for signals");
    signal_pipe = fds_[1];
    signals_seen = 0;
    struct sigaction action {};
    action.sa_handler = on_signal;
    ::sigaction(SIGTERM, &action, &old_term_);
    ::sigaction(SIGINT, &action, &old_int_);
    action.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &action, &old_pipe_);
  }
  ~SignalGuard() {
    ::sigaction(SIGTERM, &old_term_, nullptr);
    ::sigaction(SIGINT, &old_int_, nullptr);
    ::sigaction(SIGPIPE, &old_pipe_, nullptr);
    ::close(fds_[0]);
    ::close(fds_[1]);
  }
  int wait() const {
    char byte = 0;
    while (::read(fds_[0], &byte, 1) < 0 && errno == EINTR) {
    }
    return byte;
  }
  void raise_now(int number) const {
    const char byte = static_cast<char>(number);
    [[maybe_unused]] const auto written = ::write(fds_[1], &byte, 1);
  }

 private:
  int fds_[2] = {-1, -1};
  struct sigaction old_term_ {}, old_int_ {}, old_pipe_ {};
};

// ---- arguments ----

std::string option_name(const std::string& setting) {
  std::string name = "--" + setting;
  for (char& c : name) {
    if (c == '_') c = '-';
  }
  return name;
}

void add_setting_options(CLI::App& app, Arguments& arguments) {
  for (const SettingInfo& info : settings_table()) {
    std::string kind = info.unit.empty() ? info.type : info.unit;
    if (!info.choices.empty()) kind = fmt::format("{}", fmt::join(info.choices, "|"));
    const std::string shown = info.default_value.empty() ? "none" : info.default_value;
    app.add_option_function<std::string>(
           option_name(info.name), [&arguments, name = info.name](const std::string& v) { arguments.settings[name] = v; },
           fmt::format("{} [default {}]", info.help, shown))
        ->type_name(kind)
        ->group("Settings of the run (each also as DILOCO_<NAME> or in the --config file)");
  }
}

void describe(CLI::App& app, Arguments& arguments) {
  SyncerOptions& syncer = arguments.syncer;
  syncer.bind = "127.0.0.1:29400";
  app.add_option("--bind", syncer.bind, "Address to listen on; port 0 lets the kernel choose [default 127.0.0.1:29400]")
      ->type_name("HOST:PORT");
  app.add_flag("--insecure", syncer.insecure, "Allow an address that other machines can reach, without keys");
  app.add_option("--event-log", syncer.event_log, "Append one JSON line per decision to this file [default none]")
      ->type_name("FILE");
  app.add_option("--endpoint-file", syncer.endpoint_file, "Write the real endpoint here once bound [default none]")
      ->type_name("FILE");
  app.add_option("--merge-threads", syncer.merge_threads, "Threads that screen and merge [default 1]")
      ->type_name("COUNT")
      ->check(CLI::Range(1, 256));
  app.add_option("--shutdown-s", syncer.shutdown_s, "After SIGTERM: how long open rounds may finish [default 10]")
      ->type_name("s")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--config", arguments.config, "Settings as `name = value` lines [default none]")->type_name("FILE.toml");
  app.add_option("--log-level", arguments.log_level, "Least important line to print [default info]")
      ->type_name(fmt::format("{}", fmt::join(kLevels, "|")))
      ->check(CLI::IsMember(kLevels));
  app.add_flag("--die-with-parent", arguments.die_with_parent, "End (as after SIGTERM) when the parent process ends");
  app.set_version_flag("--version", fmt::format("diloco {}, protocol {}, libzmq {}", kVersion, kProtocolVersion,
                                                zmq_version_text()),
                       "Print the versions of the package, the protocol and libzmq");
  add_setting_options(app, arguments);
  app.get_formatter()->column_width(40);
  app.allow_extras();  // so that we can say what was probably meant
}

[[noreturn]] void refuse_extra(const CLI::App& app, const std::string& extra) {
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::string wrong = extra.substr(0, extra.find('='));
  const std::string near = suggest(wrong, known);
  throw ConfigError(fmt::format("unknown argument '{}'{}; --help lists every option", wrong,
                                near.empty() ? "" : fmt::format(": did you mean {}?", near)));
}

std::map<std::string, std::string> environment() {
  std::map<std::string, std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) result[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return result;
}

// Argument > environment > file.
void resolve(Arguments& arguments) {
  Settings& settings = arguments.syncer.settings;
  const auto variables = environment();
  if (!arguments.config.empty()) apply_toml_file(settings, arguments.config);
  apply_environment(settings, variables, kOtherVariables);
  for (const auto& [name, value] : arguments.settings) settings.set(name, value);
  settings.validate();
  if (arguments.log_level.empty()) {
    const auto given = variables.find("DILOCO_LOG_LEVEL");
    arguments.log_level = given == variables.end() ? "info" : CLI::detail::to_lower(given->second);
    if (std::find(kLevels.begin(), kLevels.end(), arguments.log_level) == kLevels.end()) {
      throw ConfigError(fmt::format("DILOCO_LOG_LEVEL is '{}'; expected one of {}", given->second,
                                    fmt::join(kLevels, ", ")));
    }
  }
}

std::function<void(LogLevel, const std::string&)> logger(const std::string& level) {
  const auto least = static_cast<LogLevel>(std::find(kLevels.begin(), kLevels.end(), level) - kLevels.begin());
  return [least](LogLevel given, const std::string& text) {
    if (given < least) return;
    std::string name = kLevels[static_cast<std::size_t>(given)];
    for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    write_stderr(log_line(name, "syncer", text));
  };
}

void serve(Arguments arguments) {
  const SignalGuard signals;
  if (arguments.die_with_parent) {
    const pid_t parent = ::getppid();
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) signals.raise_now(SIGTERM);  // it ended before the line above
  }
  const Seconds shutdown_s = arguments.syncer.shutdown_s;
  const auto log = logger(arguments.log_level);
  arguments.syncer.log = log;
  Syncer syncer(std::move(arguments.syncer));
  std::printf("listening on %s\n", syncer.endpoint().c_str());
  std::fflush(stdout);
  const int number = signals.wait();
  log(LogLevel::kInfo, fmt::format("{}: finishing open rounds, at most {:g} s; a second signal ends at once",
                                   number == SIGINT ? "SIGINT" : "SIGTERM", shutdown_s));
  syncer.stop(shutdown_s);
}

}  // namespace

int run_syncer_program(int argc, char** argv) {
  const std::string name = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "diloco-syncer";
  CLI::App app{"Holds the global weights of a Decoupled DiLoCo run, merges what learners send, and sends back the result."};
  app.name(name);
  Arguments arguments;
  try {
    describe(app, arguments);
    app.parse(argc, argv);
    if (!app.remaining().empty()) refuse_extra(app, app.remaining().front());
    resolve(arguments);
    serve(std::move(arguments));
    return 0;
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::Error& error) {
    std::fprintf(stderr, "%s: error: %s; --help lists every option\n", name.c_str(), error.what());
    return kBadArguments;
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "%s: error: %s\n", name.c_str(), error.what());
    return kBadArguments;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: error: %s\n", name.c_str(), error.what());
    return kTroubleAtStart;
  }
}

}  // namespace diloco
