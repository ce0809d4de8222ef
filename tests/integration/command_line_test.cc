// What a script or a service manager relies on: exit statuses, help, and messages that name the
// flag or the field that was wrong. Runs the real binary.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/paths.h"
#include "server/ops/catalogue.h"
#include "tests/testing/testing_program.h"

namespace emberd::testing {
namespace command_line_test {

using ::testing::HasSubstr;

const std::string kEmberd = BuildPath("bin/emberd");

struct Outcome {
  int status;
  std::string out;
  std::string err;
};

Outcome RunEmberd(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), kEmberd);
  TestingProgram program(arguments);
  const int status = program.Wait();
  return {status, program.Out(), program.Err()};
}

TEST(CommandLineTest, VersionHelpAndMetrics) {
  const Outcome version = RunEmberd({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out, "emberd " EMBERD_VERSION "\n");

  EXPECT_THAT(RunEmberd({"--help"}).out, HasSubstr("sparse embedding parameter server"));
  for (const char* command : {"up", "coordinator", "shard"}) {
    const Outcome help = RunEmberd({command, "--help"});
    EXPECT_EQ(help.status, 0) << command;
    EXPECT_THAT(help.out, HasSubstr("Examples:")) << command;
    for (const char* flag : {"--config", "--threads", "--log-level", "--log-format", "--log-file",
                             "--span-file", "--insecure"}) {
      EXPECT_THAT(help.out, HasSubstr(flag)) << command;
    }
  }
  EXPECT_EQ(RunEmberd({"metrics"}).out, ops::MetricReference());
}

TEST(CommandLineTest, HealthSaysByItsExitStatusWhetherAProcessServes) {
  TestingProgram cluster({kEmberd, "up", "--listen", "127.0.0.1:0", "--http", ""});
  const std::string ready = cluster.WaitForLine("emberd: ready coordinator=");
  const size_t begin = ready.find('=') + 1;
  const std::string address = ready.substr(begin, ready.find(' ', begin) - begin);
  const Outcome serving = RunEmberd({"health", "--address", address, "--timeout", "30"});
  EXPECT_EQ(serving.status, 0) << serving.err;
  EXPECT_EQ(serving.out, absl::StrCat("emberd: ", address, " serves\n"));
  cluster.Signal(SIGTERM);
  EXPECT_EQ(cluster.Wait(), 0);
  const Outcome gone = RunEmberd({"health", "--address", address});
  EXPECT_EQ(gone.status, 1);
  EXPECT_THAT(gone.err, HasSubstr(address));
}

TEST(CommandLineTest, MetricsThatCannotBePrintedAreAnError) {
  TestingProgram metrics({"/bin/sh", "-c", absl::StrCat("exec ", kEmberd, " metrics > /dev/full")});
  EXPECT_EQ(metrics.Wait(), 1);
  EXPECT_THAT(metrics.Err(), HasSubstr("the metrics cannot be printed: No space left on device"));
}

// The token is nowhere else.
TEST(CommandLineTest, ATokenThatCannotBePrintedIsNotAdded) {
  for (const char* where : {"> /dev/full", ">&-"}) {
    const TempDir temporary = TempDir::Create().value();  // locked, as is the folder of tokens
    const std::string directory = temporary.path() + "/secrets";
    std::filesystem::create_directory(directory);
    TestingProgram token({"/bin/sh", "-c",
                          absl::StrCat("exec ", kEmberd, " token alice trainer --file ", directory,
                                       "/tokens ", where)});
    EXPECT_EQ(token.Wait(), 1);
    EXPECT_THAT(token.Err(), HasSubstr("the token cannot be printed"));
    EXPECT_TRUE(std::filesystem::is_empty(directory));
  }
}

// It ended with a signal.
TEST(CommandLineTest, ATokenInAFolderThatIsGone) {
  const TempDir directory = TempDir::Create().value();
  const std::string gone = directory.path() + "/gone";
  TestingProgram token({"/bin/sh", "-c",
                        absl::StrCat("mkdir ", gone, " && cd ", gone, " && rmdir ", gone,
                                     " && exec ", kEmberd, " token alice trainer --file tokens")});
  EXPECT_EQ(token.Wait(), 2);
  EXPECT_THAT(token.Err(), HasSubstr("folder '' cannot be opened: No such file"));
  EXPECT_EQ(token.Out(), "");
}

// The fault that this would catch: a cluster that outlives the program that started it.
TEST(CommandLineTest, UpEndsWithItsStandardInputIfAsked) {
  for (const char* processes : {"", "--processes"}) {
    TestingProgram cluster(
        {"/bin/sh", "-c",
         absl::StrCat("sleep 0.2 | ", kEmberd, " up --stop-on-eof --listen 127.0.0.1:0 --http '' ",
                      processes)});
    EXPECT_EQ(cluster.Wait(), 0) << cluster.Err();
    EXPECT_THAT(cluster.Err(), HasSubstr("standard input has ended"));
  }
}

TEST(CommandLineTest, AShardWhoseLogCannotBeReadIsNotStarted) {
  const TempDir directory = TempDir::Create().value();
  const std::string folder = directory.path() + "/shard-0001";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/log") << "no folder";
  const Outcome outcome = RunEmberd({"up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", "",
                                     "--data", directory.path(), "--durability", "log"});
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(folder + "/log cannot be read"));
  EXPECT_EQ(outcome.out, "");
}

// A service manager starts it again, as after 1, and does not after 2.
TEST(CommandLineTest, AFileThatTheMachineCannotReadIsNoWrongUsage) {
  const TempDir directory = TempDir::Create().value();
  const std::string config = directory.path() + "/cluster.textproto";
  std::ofstream(config) << "shards { address: '127.0.0.1:0' }\n"
                           "coordinators { address: '127.0.0.1:0' }\n"
                           "security { tls { certificate_file: '/proc/self/mem' key_file: '/k' "
                           "ca_file: '/c' } }\n";
  const Outcome certificate = RunEmberd({"shard", "--config", config});
  EXPECT_EQ(certificate.status, 1);
  EXPECT_THAT(certificate.err, HasSubstr("security.tls.certificate_file: /proc/self/mem: Input"));
  EXPECT_EQ(RunEmberd({"shard", "--config", "/proc/self/mem"}).status, 1);
}

struct BadCase {
  const char* name;
  std::vector<std::string> arguments;
  const char* message;  // part of standard error
};

class BadCommandLineTest : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadCommandLineTest, ExitsWithTwoAndSaysWhatIsWrong) {
  const TempDir directory = TempDir::Create().value();
  const std::string config = directory.path() + "/cluster.textproto";
  std::ofstream(config) << "shards { address: '127.0.0.1:0' }\n"
                           "coordinators { address: '127.0.0.1:0' }\n"
                           "coordinators { address: '10.1.1.1:0' http_address: '0.0.0.0:0' }\n";
  const std::string broken = directory.path() + "/broken.textproto";
  std::ofstream(broken) << "shards { addres: '127.0.0.1:0' }\n";
  const std::string stored = directory.path() + "/stored.textproto";
  std::ofstream(stored) << "shards { address: '127.0.0.1:0' } storage { directory: '/proc/x' }\n";
  std::vector<std::string> arguments = GetParam().arguments;
  for (std::string& argument : arguments) {
    if (argument == "CONFIG") argument = config;
    if (argument == "BROKEN") argument = broken;
    if (argument == "STORED") argument = stored;
  }
  const Outcome outcome = RunEmberd(arguments);
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(GetParam().message));
  EXPECT_EQ(outcome.out, "");
}

INSTANTIATE_TEST_SUITE_P(
    All, BadCommandLineTest,
    ::testing::ValuesIn(std::vector<BadCase>{
        {"NoCommand", {}, "`emberd` needs a command: up, coordinator"},
        {"UnknownCommand", {"down"}, "there is no command \"down\"; known commands: up"},
        {"UnknownFlag", {"up", "--shard", "2"}, "--shard"},
        {"NotANumber", {"up", "--shards", "two"}, "--shards"},
        {"ShardsNotAPowerOfTwo", {"up", "--shards", "3"}, "shards: a count of 3"},
        {"NoShards", {"up", "--shards", "0"}, "--shards: \"0\" is not a number from 1 to 1024"},
        {"TooManyShards",
         {"up", "--shards", "99999999"},
         "--shards: \"99999999\" is not a number from 1 to 1024"},
        {"TooManyShardsForTheirSparsecores",
         {"up", "--shards", "1024"},
         "shards: a count of 1024 is not allowed; it must be at most 512 with 2 SparseCores"},
        {"SparsecoresOutOfRange",
         {"up", "--sparsecores", "-1"},
         "--sparsecores: \"-1\" is not a number from 1 to 1024"},
        {"ThreadsOutOfRange", {"up", "--threads", "0"}, "--threads"},
        {"LogLevel", {"up", "--log-level", "loud"}, "--log-level"},
        {"LogFormat", {"up", "--log-format", "xml"}, "--log-format"},
        {"LogFile", {"up", "--log-file", "/dev/null/log"}, "logging.file: \"/dev/null/log\""},
        {"SpanFile",
         {"up", "--span-file", "/dev/null/spans"},
         "logging.span_file: '/dev/null/spans' cannot be opened for appending"},
        {"ShardsAndConfig", {"up", "--shards", "2", "--config", "CONFIG"}, "excludes"},
        {"Address", {"up", "--listen", "7400"}, "coordinators[0].address: \"7400\""},
        {"HttpAddress", {"up", "--http", "x"}, "coordinators[0].http_address: \"x\""},
        {"OpenAddress", {"up", "--listen", "0.0.0.0:0"}, "--insecure"},
        {"OpenHttp", {"up", "--listen", "127.0.0.1:0", "--http", "[::]:0"}, "--insecure"},
        {"OpenAddressOfAChild",
         {"up", "--config", "CONFIG", "--processes"},
         "coordinators[1].address: \"10.1.1.1:0\" is not on the loopback interface"},
        {"TwoCoordinatorsInOneProcess", {"up", "--config", "CONFIG"}, "--processes"},
        {"NoRestartInOneProcess", {"up", "--no-restart"}, "--no-restart requires --processes"},
        {"Durability", {"up", "--durability", "disk"}, "--durability"},
        {"DurabilityWithoutData", {"up", "--durability", "checkpoint"}, "--data DIR"},
        {"DataUnderAFile",
         {"up", "--data", "/dev/null/data"},
         "storage.directory (--data): /dev/null/data is no folder that emberd can write to"},
        {"DataIsAFile", {"up", "--data", "CONFIG"}, "storage.directory (--data): "},
        {"DataOfChildren", {"up", "--processes", "--data", "/proc/x"}, "(--data): /proc/x"},
        {"DataOfAShard", {"shard", "--config", "STORED"}, "(--data): /proc/x"},
        {"DataEmpty", {"up", "--data", ""}, "--data: \"\" is not allowed; give a value"},
        {"NoConfig", {"shard"}, "--config"},
        {"ConfigNotThere", {"shard", "--config", "/no/such"}, "/no/such"},
        {"ConfigBroken", {"shard", "--config", "BROKEN"}, "addres"},
        {"HealthAddress", {"health", "--address", "7400"}, "--address: \"7400\""},
        {"HealthTimeout", {"health", "--timeout", "0"}, "--timeout"},
        {"ShardIndex", {"shard", "--config", "CONFIG", "--index", "1"}, "--index: 1"},
        {"CoordinatorIndex",
         {"coordinator", "--config", "CONFIG", "--index", "-1"},
         "--index: \"-1\" is not a number from 0"},
        {"OpenCoordinator",
         {"coordinator", "--config", "CONFIG", "--index", "1"},
         "coordinators[1].address: \"10.1.1.1:0\""},
    }),
    [](const auto& info) { return info.param.name; });

}  // namespace command_line_test
}  // namespace emberd::testing
