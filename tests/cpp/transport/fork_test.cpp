// A forked child (a DataLoader worker) must not touch its parent's sockets.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

// Exit status of a child that runs `body`; -1 if a signal ended it.
int in_child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

template <typename F>
bool refuses(F call) {
  try {
    call();
    return false;
  } catch (const std::logic_error& error) {
    return std::string(error.what()).find("fork") != std::string::npos;
  }
}

TEST(ZmqFork, ChildIsRefusedAndParentUndisturbed) {
  World world(Kind::kZmq);
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  client->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&server, &client}, [&] { return !client.connected.empty(); }));
  ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHello, "", 1)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.peer(1) != 0; }));
  for (int worker = 0; worker < 4; ++worker) {
    EXPECT_EQ(in_child([&] {
      std::vector<TransportEvent> events;
      int refused = 0;
      refused += refuses([&] { client->connect(Channel::kControl); });
      refused += refuses([&] { client->disconnect(Channel::kControl); });
      refused += refuses([&] { client->poll(0, &events); });
      refused += refuses([&] { client->send(Channel::kControl, frame(MessageType::kHeartbeat)); });
      refused += refuses([&] { client->wake(); });
      refused += refuses([&] { client->counters(); });
      refused += refuses([&] { server->bind("127.0.0.1:0"); });
      refused += refuses([&] { server->poll(0, &events); });
      refused += refuses([&] { server->send(1, frame(MessageType::kHeartbeat)); });
      refused += refuses([&] { server->cut(1, "child"); });
      refused += refuses([&] { server->wake(); });
      refused += refuses([&] { server->counters(); });
      client->close();  // nothing
      server->close();
      client.transport.reset();  // nothing
      server.transport.reset();
      return refused;
    }), 12);
    ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 1)));
    ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kHeartbeat)));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return client.frames.size() == static_cast<std::size_t>(worker) + 1; }));
  }
  EXPECT_TRUE(server.gone.empty());
  EXPECT_TRUE(client.disconnected.empty());
}

TEST(ZmqFork, ChildMayMakeItsOwn) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizers do not let a child of a threaded process start threads";
#endif
  World world(Kind::kZmq);
  ServerNode server(world);
  EXPECT_EQ(in_child([] {
    World own(Kind::kZmq);
    ServerNode child_server(own);
    ClientNode client(own, child_server.endpoint);
    client->connect(Channel::kControl);
    return run_until({&child_server, &client}, [&] { return !client.connected.empty(); }) ? 0 : 1;
  }), 0);
}

TEST(ZmqVersion, IsPrintable) {
  const std::string text = zmq_version_text();
  EXPECT_NE(text.find('.'), std::string::npos);
  EXPECT_NE(text.find("curve"), std::string::npos);
}

}  // namespace
}  // namespace diloco::transport_test
