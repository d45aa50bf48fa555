// Endpoint texts, and what is said about wrong ones.
#include <gtest/gtest.h>

#include "diloco/base/errors.h"
#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

template <typename Error, typename F>
std::string complaint(F call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(nothing thrown)";
}

TEST(Endpoint, CanonicalForm) {
  EXPECT_EQ(parse_endpoint("127.0.0.1:29400"), "tcp://127.0.0.1:29400");
  EXPECT_EQ(parse_endpoint("tcp://127.0.0.1:29400"), "tcp://127.0.0.1:29400");
  EXPECT_EQ(parse_endpoint("node-7.cluster_a.example:1"), "tcp://node-7.cluster_a.example:1");
  EXPECT_EQ(parse_endpoint("*:0"), "tcp://*:0");
  EXPECT_EQ(parse_endpoint("host:65535"), "tcp://host:65535");
}

TEST(Endpoint, MalformedTextsSuggestTheForm) {
  const std::vector<std::string> wrong = {
      "", "localhost", "localhost:", ":29400", "localhost:port", "localhost:65536", "localhost:-1", "localhost:+1",
      "localhost:12345678901234567890", "localhost: 29400", "local host:29400", "localhost:29400 ", "localhost:29400/x",
      "http://localhost:29400", "ipc:///tmp/x", "tcp://", "tcp://localhost", "[::1]:29400", "::1:29400", "a:b:1",
      "local\nhost:1", "höst:1", std::string(300, 'a') + ":1", "**:1"};
  for (const std::string& text : wrong) {
    const std::string said = complaint<ConfigError>([&] { parse_endpoint(text); });
    EXPECT_NE(said.find("expected HOST:PORT, for example 127.0.0.1:29400"), std::string::npos) << text << ": " << said;
    EXPECT_NE(said.find("got '" + text + "'"), std::string::npos) << said;
  }
  EXPECT_NE(complaint<ConfigError>([] { parse_endpoint("localhost"); }).find("the port is missing"), std::string::npos);
  EXPECT_THROW(parse_endpoint(std::string("local\0host:1", 12)), ConfigError);
  EXPECT_NE(complaint<ConfigError>([] { parse_endpoint("[::1]:1"); }).find("IPv6"), std::string::npos);
}

TEST(Endpoint, Loopback) {
  EXPECT_TRUE(is_loopback_endpoint("tcp://127.0.0.1:1"));
  EXPECT_TRUE(is_loopback_endpoint("tcp://127.8.9.10:1"));
  EXPECT_TRUE(is_loopback_endpoint("tcp://localhost:1"));
  EXPECT_FALSE(is_loopback_endpoint("tcp://*:1"));
  EXPECT_FALSE(is_loopback_endpoint("tcp://0.0.0.0:1"));
  EXPECT_FALSE(is_loopback_endpoint("tcp://10.0.0.1:1"));
  EXPECT_FALSE(is_loopback_endpoint("tcp://no-such-host.invalid:1"));
}

TEST_P(Transport, WrongEndpointsAreRefusedAtOnce) {
  for (const char* text : {"localhost", "*:29400", "0.0.0.0:29400", "127.0.0.1:0"}) {
    EXPECT_NE(complaint<ConfigError>([&] { world.client(text); }).find("expected HOST:PORT"), std::string::npos) << text;
  }
  EXPECT_NE(complaint<ConfigError>([&] { world.server()->bind("127.0.0.1"); }).find("expected HOST:PORT"),
            std::string::npos);
}

TEST_P(Transport, BindsByNameAndConnectsByName) {
  ServerNode server(world, {}, "localhost:0");
  EXPECT_EQ(server.endpoint.rfind("tcp://127.", 0), 0u) << server.endpoint;
  ClientNode client(world, "localhost:" + server.endpoint.substr(server.endpoint.rfind(':') + 1));
  join(server, client, Channel::kControl, 1);
}

TEST_P(Transport, BindsTheWildcard) {
  ServerNode server(world, {}, "*:0");
  ClientNode client(world, "127.0.0.1:" + server.endpoint.substr(server.endpoint.rfind(':') + 1));
  join(server, client, Channel::kControl, 1);
}

TEST(Endpoint, UnresolvableNameAndForeignAddress) {
  World world(Kind::kZmq);
  const std::string client = complaint<TransportError>([&] { world.client("no-such-host.invalid:29400"); });
  EXPECT_NE(client.find("cannot resolve host name 'no-such-host.invalid'"), std::string::npos) << client;
  const std::string server = complaint<TransportError>([&] { world.server()->bind("no-such-host.invalid:0"); });
  EXPECT_NE(server.find("cannot resolve host name"), std::string::npos) << server;
  const std::string foreign = complaint<TransportError>([&] { world.server()->bind("192.0.2.1:0"); });
  EXPECT_NE(foreign.find("192.0.2.1 is not an address of this machine"), std::string::npos) << foreign;
}

TEST(Endpoint, UnreachableAddressIsAnEventThatNamesIt) {
  World world(Kind::kZmq);
  ClientNode client(world, "192.0.2.1:29400");  // TEST-NET-1: nobody is there
  client->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&client}, [&] { return !client.disconnected.empty(); }));
  EXPECT_NE(client.disconnected[0].why.find("192.0.2.1:29400"), std::string::npos) << client.disconnected[0].why;
}

}  // namespace
}  // namespace diloco::transport_test
