#include "client/emberctl/emberctl.h"

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/file_descriptor.h"
#include "base/testing/held_port.h"
#include "base/testing/paths.h"
#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {
namespace emberctl_test {

using ::emberd::client::testing::FakeService;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Outcome {
  int code = -1;
  std::string out, err;
};

Outcome Emberctl(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "emberctl");
  std::ostringstream out, err;
  Outcome outcome;
  outcome.code = Run(static_cast<int>(arguments.size()), arguments.data(), out, err);
  outcome.out = out.str();
  outcome.err = err.str();
  return outcome;
}

std::string WriteFile(const std::string& name, const std::string& text) {
  const std::string path = TempPath(name);
  std::ofstream(path) << text;
  return path;
}

constexpr char kModel[] = R"(# comment: shards
name: "m"
tables { name: "t" vocabulary_size: 10 embedding_dim: 2 }
features { name: "x" table: "t" })";

class EmberctlTest : public ::testing::Test {
 protected:
  Outcome Call(std::vector<const char*> arguments) {
    arguments.insert(arguments.end(), {"--address", service_.address().c_str()});
    return Emberctl(std::move(arguments));
  }
  void Declare(const char* model = kModel) {
    const std::string path = WriteFile("model.textproto", model);
    const Outcome declared = Call({"declare", path.c_str()});
    ASSERT_EQ(declared.code, kOk) << declared.err;
    EXPECT_THAT(declared.out, StartsWith("m: created, id 000000000000002a, 1 table in 1 stack"));
  }

  FakeService service_;
};

TEST_F(EmberctlTest, StatusTellsThatAShardIsDown) {
  const Outcome status = Call({"status"});
  EXPECT_EQ(status.code, kUnreachable);
  EXPECT_THAT(status.out, HasSubstr("emberd 0.0-fake, up 0s, 3 batches"));
  EXPECT_THAT(status.out, HasSubstr("1      127.0.0.1:1  DOWN\n"));
  EXPECT_THAT(status.err, HasSubstr("shard 1 (127.0.0.1:1) does not answer: not there"));
}

TEST_F(EmberctlTest, StatusTellsThatACoordinatorDrains) {
  EXPECT_FALSE(Json::parse(Call({"status", "--json"}).out)["draining"]);
  service_.draining = true;
  EXPECT_THAT(Call({"status"}).out, HasSubstr("emberd 0.0-fake, up 0s, DRAINING, 3 batches"));
  EXPECT_TRUE(Json::parse(Call({"status", "--json"}).out)["draining"]);
}

TEST_F(EmberctlTest, DescribesModels) {
  Declare();
  const Outcome described = Emberctl({"describe", "-a", service_.address().c_str(), "m"});
  EXPECT_EQ(described.code, kOk) << described.err;
  EXPECT_THAT(described.out, StartsWith("m: id 000000000000002a"));
  EXPECT_THAT(described.out, HasSubstr("m      t      10          2    MEAN"));
  for (const Outcome& tables : {Call({"tables"}), Call({"tables", "m"})}) {
    EXPECT_EQ(tables.code, kOk) << tables.err;
    EXPECT_THAT(tables.out, StartsWith("MODEL  TABLE"));
    EXPECT_THAT(tables.out, HasSubstr("m      t "));
  }
  const Json json = Json::parse(Call({"tables", "--json"}).out);
  EXPECT_EQ(json[0]["vocabulary_size"], 10);
  EXPECT_EQ(json[0]["slots"][0], "accumulator");
  EXPECT_FALSE(json[0].contains("resource"));
}

TEST_F(EmberctlTest, TablesSayWhatTheyAreSharedAs) {
  Declare(R"(name: "m" enable_variable_deduplication: true
      tables {
        name: "t" vocabulary_size: 10 embedding_dim: 2 resource { container: "ctr" name: "users" }
      }
      features { name: "f" table: "t" })");
  EXPECT_THAT(Call({"tables"}).out, HasSubstr("SHARED AS\nm      t "));
  EXPECT_THAT(Call({"tables"}).out, HasSubstr(" ctr/users\n"));
  EXPECT_EQ(Json::parse(Call({"tables", "--json"}).out)[0]["resource"], "ctr/users");
}

TEST_F(EmberctlTest, ReadsWhatItHasWritten) {
  Declare();
  Outcome rows = Call({"rows", "get", "m", "t", "7", "3"});
  EXPECT_EQ(rows.code, kOk) << rows.err;
  EXPECT_EQ(rows.out, "7=7,7.01\n3=3,3.01\n");
  rows = Call({"rows", "set", "m", "t", "3=0.1,-2e-7", "4=1,2"});
  EXPECT_EQ(rows.code, kOk) << rows.err;
  EXPECT_EQ(rows.out, "2 rows written\n");
  EXPECT_EQ(Call({"rows", "get", "m", "t", "3"}).out, "3=0.1,-2e-07\n");
  EXPECT_THAT(Call({"rows", "get", "m", "t", "9223372036854775807"}).out,
              HasSubstr("9223372036854775807="));
  const Json json = Json::parse(Call({"--json", "rows", "get", "m", "t", "4"}).out);
  EXPECT_EQ(json["rows"][0]["id"], 4);
  EXPECT_EQ(json["rows"][0]["values"][1], 2.0f);
  rows = Call({"rows", "set", "m", "t", "3=1,2", "4=1"});
  EXPECT_EQ(rows.code, kUsage);
  EXPECT_THAT(rows.err, HasSubstr("row 4 has 1 values, but the first row has 2"));
  rows = Call({"rows", "get", "m", "t", "1-600000", "1-600000"});
  EXPECT_EQ(rows.code, kUsage);
  EXPECT_THAT(rows.err, HasSubstr("\"1-600000\": more than 1000000 ids are not allowed"));
}

TEST_F(EmberctlTest, SaysWhatTheServerSaid) {
  Outcome described = Call({"describe", "other"});
  EXPECT_EQ(described.code, kRefused);
  EXPECT_EQ(described.err, "emberctl: NOT_FOUND: name: there is no model \"other\"\n");
  described = Call({"describe", "other", "--json"});
  EXPECT_EQ(described.code, kRefused);
  EXPECT_EQ(Json::parse(described.err)["error"]["code"], "NOT_FOUND");
  EXPECT_THAT(described.out, IsEmpty());
}

// Would catch: the end of the client's own wait, which names nobody and nothing to look at.
TEST_F(EmberctlTest, ACallThatIsNotAnsweredInTimeSaysWhoAndWhatToDo) {
  service_.AddFault({.delay = absl::Minutes(2)});
  const Outcome described = Call({"describe", "m", "--timeout", "5"});
  EXPECT_EQ(described.code, kUnreachable);
  EXPECT_EQ(
      described.err,
      "emberctl: DEADLINE_EXCEEDED: Deadline Exceeded. " + service_.address() +
          " did not answer within the --timeout of 5 s. If a shard is silent, `emberctl status "
          "--timeout 10` names it; else wait longer\n");
  // What a server says of a wait of its own is all there is to say.
  service_.AddFault({grpc::Status(grpc::DEADLINE_EXCEEDED, "shard 1 is silent")});
  EXPECT_EQ(Call({"describe", "m"}).err, "emberctl: DEADLINE_EXCEEDED: shard 1 is silent\n");
}

// What is typed and what a server says need not be UTF-8, but JSON is.
TEST_F(EmberctlTest, JsonIsUtf8WhateverIsTyped) {
  for (const Outcome& outcome : {Call({"--json", "describe", "\xff"}), Emberctl({"--json", "\xff"}),
                                 Emberctl({"--json", "validate", "/no/\xff"})}) {
    EXPECT_NE(outcome.code, kOk);
    EXPECT_TRUE(Json::parse(outcome.err)["error"].contains("message"));
  }
  const std::string path = WriteFile("bytes.textproto", std::string(kModel) +
                                                            " features {\n"
                                                            " name: \"y\\377\" table: \"t\" }");
  const Outcome outcome = Emberctl({"--json", "validate", path.c_str()});
  EXPECT_TRUE(Json::accept(outcome.code == kOk ? outcome.out : outcome.err)) << outcome.err;
}

TEST(EmberctlExitCodeTest, NobodyThere) {
  const auto port = *HeldPort::Take();
  const std::string& gone = port->address();
  const Outcome status = Emberctl({"status", "-a", gone.c_str(), "--timeout", "0.2"});
  EXPECT_EQ(status.code, kUnreachable);
  EXPECT_THAT(status.err, HasSubstr(gone));
}

// Would catch: a coordinator that is stopped, or has too much to do, is said not to speak gRPC.
TEST(EmberctlExitCodeTest, SomebodyThereWhoIsSilent) {
  const FileDescriptor silent(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(listen(silent.get(), 8), 0);  // the system picks a port
  sockaddr_in place = {};
  socklen_t size = sizeof(place);
  ASSERT_EQ(getsockname(silent.get(), reinterpret_cast<sockaddr*>(&place), &size), 0);
  const std::string address = "127.0.0.1:" + std::to_string(ntohs(place.sin_port));
  const Outcome status = Emberctl({"status", "-a", address.c_str(), "--timeout", "0.2"});
  EXPECT_EQ(status.code, kUnreachable);
  EXPECT_THAT(status.err, HasSubstr("no coordinator accepted a connection within"));
}

TEST(EmberctlExitCodeTest, WrongCommandLines) {
  const std::vector<std::vector<const char*>> wrong = {
      {},
      {"fly"},
      {"describe"},
      {"rows"},
      {"rows", "get", "m", "t"},
      {"rows", "get", "m", "t", "x"},
      {"rows", "set", "m", "t", ""},
      {"rows", "set", "m", "t", "7"},
      {"rows", "set", "m", "t", "=1"},
      {"rows", "set", "m", "t", "x=1"},
      {"rows", "set", "m", "t", "7="},
      {"rows", "set", "m", "t", "7=1,"},
      {"rows", "set", "m", "t", "7=1,a"},
      {"rows", "set", "m", "t", "7=1=2"},
      {"rows", "set", "m", "t", "7=nan"},
      {"status", "--timeout", "-1"},
      {"validate", "f", "--kind", "bird"},
  };
  for (const std::vector<const char*>& arguments : wrong) {
    const Outcome outcome = Emberctl(arguments);
    EXPECT_EQ(outcome.code, kUsage) << outcome.err;
    EXPECT_THAT(outcome.out, IsEmpty());
    EXPECT_FALSE(outcome.err.empty());
  }
}

// These are told apart from the flags above when they are used.
TEST(EmberctlExitCodeTest, WrongAddresses) {
  for (const char* address : {"", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "http://a:1"}) {
    const Outcome outcome = Emberctl({"status", "-a", address});
    EXPECT_EQ(outcome.code, kUsage) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(std::string("--address: \"") + address));
  }
}

TEST(EmberctlExitCodeTest, Help) {
  const Outcome help = Emberctl({"--help"});
  EXPECT_EQ(help.code, kOk);
  EXPECT_THAT(help.out, HasSubstr("emberctl rows get my_model users 7 8"));
  EXPECT_THAT(help.out, HasSubstr("Exit status:"));
}

TEST(ValidateTest, TellsModelsFromClusters) {
  const std::string model = WriteFile("a.textproto", kModel);
  Outcome outcome = Emberctl({"validate", model.c_str()});
  EXPECT_EQ(outcome.code, kOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("valid model \"m\": 1 table, 1 feature, 20 weights"));
  const std::string cluster = WriteFile(
      "b.json", R"({"shards": [{"address": "a:1"}], "coordinators": [{"address": "a:2"}]})");
  outcome = Emberctl({"validate", cluster.c_str()});
  EXPECT_EQ(outcome.code, kOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("valid cluster: 1 shard x 2 SparseCores, 1 coordinator"));
  // Defaults are filled in.
  outcome = Emberctl({"validate", cluster.c_str(), "--json"});
  EXPECT_EQ(Json::parse(outcome.out)["sparsecores_per_shard"], 2);
}

TEST(ValidateTest, NamesTheField) {
  const std::string path = WriteFile("c.textproto", R"(name: "m"
      tables { name: "t" vocabulary_size: 0 embedding_dim: 2 } features { name: "x" table: "t" })");
  Outcome outcome = Emberctl({"validate", path.c_str()});
  EXPECT_EQ(outcome.code, kRefused);
  EXPECT_THAT(outcome.err, HasSubstr("tables[0].vocabulary_size"));
  outcome = Emberctl({"validate", "/does/not/exist"});
  EXPECT_EQ(outcome.code, kRefused);
  EXPECT_THAT(outcome.err, HasSubstr("/does/not/exist"));
}

TEST(OutputTest, SizesTimesAndFloats) {
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
  EXPECT_EQ(Bytes(int64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(Uptime(59'999), "59s");
  EXPECT_EQ(Uptime(192'000), "3m 12s");
  EXPECT_EQ(Uptime(7'380'000), "2h 3m");
  EXPECT_EQ(Float(0.1f), "0.1");
  EXPECT_EQ(Float(16777216.0f), "16777216");
}

}  // namespace emberctl_test
}  // namespace emberd::emberctl
