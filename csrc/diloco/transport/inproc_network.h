// State of the in-process network: links between clients and servers, and the frames under way on them. Everything is
// guarded by one mutex; one condition variable wakes every poll(). Private to inproc*.cpp.
#pragma once

#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>

#include "diloco/base/clock.h"
#include "diloco/transport/inproc.h"

namespace diloco::inproc {

constexpr TimePoint kNever = std::numeric_limits<double>::infinity();
constexpr Seconds kConnectTimeout = 5.0;
constexpr Seconds kCutGrace = 1.0;
constexpr std::size_t kFramesPerPoll = 512;

// One thing under way: a frame, the answer to connect(), or the end of the connection.
struct Item {
  enum class Kind { kFrame, kConnected, kEnd } kind = Kind::kFrame;
  TimePoint at = 0;   // when it arrives
  std::string head;   // encoded header, or a stranger's bytes
  std::span<const std::byte> payload;
  std::shared_ptr<void> keep_alive;
  std::string why;    // kEnd
  std::uint64_t cost = 0;  // bytes it takes while under way
};

struct Pipe {  // one direction of a link
  std::deque<Item> items;  // in order of arrival
  TimePoint busy_until = 0, last_at = 0;
  TimePoint expires = kNever;  // frames that would arrive later are lost: the sender has closed and lingered
  bool heard = true;           // somebody still listens at the far end
  std::uint64_t unsent = 0;    // cost of the items
  void pop() {
    unsent -= items.front().cost;
    items.pop_front();
  }
  void clear() {
    unsent = 0;
    items.clear();
  }
};

struct Script {
  Seconds delay = 0;
  double bandwidth = 0;
  bool partitioned = false;
};

struct Link {
  std::string client_name;
  Channel channel = Channel::kControl;
  PeerId peer = 0;
  Pipe up, down;  // up: client to server
  TimePoint opened_at = 0;
  bool connected = false;  // the client has been told
  bool greeted = false;    // the server has seen a valid frame
};
using LinkPtr = std::shared_ptr<Link>;

struct ServerState {
  TransportLimits limits;
  TransportCounters counters;
  std::map<PeerId, LinkPtr> links;
  PeerId next_peer = 1;
  bool woken = false;
};

struct ClientState {
  std::string name;
  TransportLimits limits;
  TransportCounters counters;
  LinkPtr links[2];
  bool woken = false;
};

class Network : public InprocNetwork {
 public:
  std::unique_ptr<ServerTransport> server(const TransportLimits& limits) override;
  std::unique_ptr<ClientTransport> client(const std::string& endpoint, const TransportLimits& limits) override;
  void name_next_client(const std::string& name) override;
  void set_delay(const std::string& client_name, Seconds one_way) override;
  void set_bandwidth(const std::string& client_name, double bytes_per_s) override;
  void partition(const std::string& client_name, bool cut_off) override;
  void reset(const std::string& client_name) override;
  void inject_raw(const std::string& endpoint, std::string bytes) override;

  // What follows is called with `mutex` held.
  Script& script(const std::string& client_name);
  // Puts an item on its way under the script's delay and bandwidth.
  void push(Link& link, Pipe& pipe, Item item, std::size_t bytes);
  void push_frame(Link& link, Pipe& pipe, OutFrame frame, TransportCounters& counters);
  // The last thing the receiver hears; frames under way have until `expires`.
  void push_end(Link& link, Pipe& pipe, const std::string& why, TimePoint expires);
  // The receiver of `pipe` is told at once; what is under way is lost.
  void end_now(Pipe& pipe, const std::string& why);
  // First item if it has arrived, null otherwise; lowers `next` to when it will.
  Item* arrived(Link& link, Pipe& pipe, TimePoint now, TimePoint& next);
  // Opens a link to the server at `port`, or one that ends in a refusal.
  LinkPtr open_link(const std::string& client_name, Channel channel, std::uint16_t port);
  // Waits for news until `until`.
  void wait(std::unique_lock<std::mutex>& lock, TimePoint until);

  std::mutex mutex;
  std::condition_variable news;
  std::map<std::uint16_t, ServerState*> bound;
  std::vector<std::weak_ptr<Link>> links;
  std::uint16_t next_port = 40000;

 private:
  template <typename F>
  void each_link(const std::string& client_name, F apply);
  template <typename F>
  void each_script(const std::string& client_name, F apply);
  std::map<std::string, Script> scripts_;
  Script default_script_;
  std::string next_name_;
  int unnamed_ = 0;
};

std::unique_ptr<ServerTransport> make_server(std::shared_ptr<Network> network, const TransportLimits& limits);
std::unique_ptr<ClientTransport> make_client(std::shared_ptr<Network> network, const std::string& name,
                                             std::uint16_t port, const TransportLimits& limits);

}  // namespace diloco::inproc
