// Whole clusters, as a user starts them: the real binary in both modes. Catches a mode that does
// not come up, a process without /metrics, a metric that is documented but never exposed by a
// working cluster, a dead shard that does not come back to its address, and, above all, processes
// or files left behind after an orderly stop or a kill -9 of the launcher.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/child_process.h"
#include "base/file_descriptor.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "base/testing/http_get.h"
#include "base/testing/paths.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/launcher/files.h"
#include "server/ops/catalogue.h"
#include "tests/testing/testing_program.h"

namespace emberd::testing {
namespace up_test {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

std::vector<std::string> Emberd(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), BuildPath("bin/emberd"));
  return arguments;
}

std::vector<std::string> Up(const std::vector<std::string>& more) {
  std::vector<std::string> arguments =
      Emberd({"up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// key=value,value fields of a ready line.
std::map<std::string, std::vector<std::string>> Fields(const std::string& line) {
  std::map<std::string, std::vector<std::string>> fields;
  for (absl::string_view word : absl::StrSplit(line, ' ')) {
    const std::vector<std::string> pair = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (pair.size() == 2) fields[pair[0]] = absl::StrSplit(pair[1], ',');
  }
  return fields;
}

std::vector<pid_t> Pids(const std::vector<std::string>& texts) {
  std::vector<pid_t> pids;
  for (const std::string& text : texts) {
    if (!absl::SimpleAtoi(text, &pids.emplace_back())) ADD_FAILURE() << "not a pid: " << text;
  }
  return pids;
}

std::string Get(const std::string& address, const std::string& path) {
  int port = 0;
  const std::vector<std::string> parts = absl::StrSplit(address, ':');
  EXPECT_TRUE(absl::SimpleAtoi(parts.back(), &port)) << address;
  return HttpGet(port, path);
}

std::string Scrape(const std::string& address) { return Get(address, "/metrics"); }

bool Exists(pid_t pid) { return kill(pid, 0) == 0; }

v1::Tensor MakeTensor(v1::DataType dtype, std::vector<int64_t> shape, const void* data,
                      size_t size) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(data, size);
  return tensor;
}

// One step of a model with one table; the test fails if it does not work.
void Train(const std::string& address) {
  auto stub = v1::EmbeddingService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::DeclareModelRequest declare;
  v1::ModelConfig& model = *declare.mutable_config();
  model.set_name("m");
  v1::TableConfig* const table = model.add_tables();
  table->set_name("t");
  table->set_vocabulary_size(100);
  table->set_embedding_dim(8);
  v1::FeatureConfig* const feature = model.add_features();
  feature->set_name("f");
  feature->set_table("t");
  feature->set_batch_size(4);
  model.mutable_optimizer()->set_learning_rate(0.1f);
  model.mutable_optimizer()->mutable_sgd();
  v1::DeclareModelResponse declared;
  // A shard that came back is reached when the coordinator's next try to connect is due.
  grpc::Status status = Await([&] {
    grpc::ClientContext context;
    return stub->DeclareModel(&context, declare, &declared);
  });
  ASSERT_TRUE(status.ok()) << status.error_message();

  const int32_t ids[] = {1, 2, 3, 1};
  v1::LookupRequest lookup;
  lookup.set_model_id(declared.model_id());
  v1::FeatureIds* const input = lookup.add_features();
  input->set_feature("f");
  *input->mutable_dense()->mutable_ids() = MakeTensor(v1::INT32, {4}, ids, sizeof(ids));
  v1::LookupResponse found;
  grpc::ClientContext lookup_context;
  status = stub->Lookup(&lookup_context, lookup, &found);
  ASSERT_TRUE(status.ok()) << status.error_message();

  const std::vector<float> ones(4 * 8, 1.0f);
  v1::ApplyGradientsRequest apply;
  apply.set_model_id(declared.model_id());
  apply.set_batch_handle(found.batch_handle());
  apply.mutable_mutation()->set_client_id("test");
  apply.mutable_mutation()->set_sequence(1);
  v1::FeatureGradient* const gradient = apply.add_gradients();
  gradient->set_feature("f");
  *gradient->mutable_gradient() =
      MakeTensor(v1::FLOAT32, {4, 8}, ones.data(), ones.size() * sizeof(float));
  v1::ApplyGradientsResponse applied;
  grpc::ClientContext apply_context;
  status = stub->ApplyGradients(&apply_context, apply, &applied);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(applied.rows_updated(), 3);
}

// Every metric of the catalogue but those in `absent`, with at least one sample. There are no
// training groups here: theirs are looked for where groups train.
void ExpectAllMetrics(const std::string& page, const std::vector<std::string>& absent) {
  for (const ops::MetricInfo& metric : ops::MetricCatalogue()) {
    const std::string name(metric.name);
    if (name.starts_with("emberd_group_")) continue;
    const std::string sample = name + (metric.type == ops::MetricType::kHistogram ? "_count" : "") +
                               (metric.LabelNames().empty() ? " " : "{");
    const bool expected = std::find(absent.begin(), absent.end(), name) == absent.end();
    EXPECT_EQ(page.find("\n" + sample) != std::string::npos, expected) << name;
  }
}

TEST(UpTest, EmbeddedClusterTrainsAndShowsItsMetrics) {
  TestingProgram up(Up({"--sparsecores", "1"}));
  const std::string line = up.WaitForLine("emberd: ready coordinator=127.0.0.1:");
  ASSERT_NE(line, "") << up.Err();
  auto fields = Fields(line);
  EXPECT_THAT(fields["pids"], ::testing::ElementsAre(std::to_string(up.pid())));
  EXPECT_EQ(fields["shards"][0], "2");
  EXPECT_THAT(up.Err(), HasSubstr(absl::StrCat("kill ", up.pid())));
  Train(fields["coordinator"][0]);
  const std::string page = Scrape(fields["http"][0]);
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200"));
  ExpectAllMetrics(page, {});
  EXPECT_THAT(Get(fields["http"][0], "/"), HasSubstr("Tables and stacks"));
  EXPECT_THAT(Get(fields["http"][0], "/status.json"), HasSubstr("\"name\":\"up\""));
  EXPECT_THAT(Get(fields["http"][0], "/models.json"), HasSubstr("\"name\":\"m\""));
  up.Signal(SIGTERM);
  EXPECT_EQ(up.Wait(), 0) << up.Err();
}

// A log collector that dies, or `| head`, takes no rows along.
TEST(UpTest, GoesOnWhenNobodyReadsItsLog) {
  const TempDir directory = TempDir::Create().value();
  for (const bool processes : {false, true}) {
    SCOPED_TRACE(processes);
    const std::string path = directory.Path(processes ? "processes" : "embedded");
    const FileDescriptor out(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    FileDescriptor reader(ends[0]), writer(ends[1]);
    const auto started = ChildProcess::Start(
        Up(processes ? std::vector<std::string>{"--processes"} : std::vector<std::string>{}),
        {.output = out.get(), .error = writer.get()});
    ASSERT_TRUE(started.ok()) << started.status();
    ChildProcess& up = **started;
    std::string ready;
    ASSERT_TRUE(Eventually([&] {
      std::ifstream file(path);
      return (std::getline(file, ready) && !file.eof()) || !up.Running();
    }));
    auto fields = Fields(ready);
    ASSERT_THAT(fields["coordinator"], SizeIs(1)) << ready;
    reader.Close();
    ASSERT_NO_FATAL_FAILURE(Train(fields["coordinator"][0]));  // logs the new model
    up.Signal(SIGTERM);
    ASSERT_TRUE(up.WaitFor(kPatience));
    EXPECT_EQ(up.exit_status(), 0) << up.End();
  }
}

// So that a service manager does not start it again: what only its processes find wrong, too.
TEST(UpTest, AWrongConfigurationEndsItWithTwo) {
  std::vector<std::string> arguments = {"--span-file", "/no/such/folder/spans"};
  for (const bool processes : {false, true}) {
    if (processes) arguments.emplace_back("--processes");
    TestingProgram up(Up(arguments));
    EXPECT_EQ(up.Wait(), 2) << processes;
    EXPECT_THAT(up.Err(), HasSubstr("'/no/such/folder/spans' cannot be opened")) << processes;
  }
}

TEST(UpTest, AClosedTerminalStopsItCleanly) {
  for (const bool processes : {false, true}) {
    SCOPED_TRACE(processes);
    const auto before = signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
    TestingProgram up(
        Up(processes ? std::vector<std::string>{"--processes"} : std::vector<std::string>{}));
    signal(SIGHUP, before);
    ASSERT_NE(up.WaitForLine("emberd: ready"), "") << up.Err();
    up.Signal(SIGHUP);
    EXPECT_EQ(up.Wait(), 0) << up.Err();
    EXPECT_THAT(up.Err(), HasSubstr("stopping signal=SIGHUP"));
    if (processes) EXPECT_TRUE(std::filesystem::is_empty(up.directory() + "/tmp"));
  }
}

TEST(UpTest, UnderNohupAClosedTerminalStopsNothing) {
  const auto before = signal(SIGHUP, SIG_IGN);
  TestingProgram up(Up({}));
  signal(SIGHUP, before);
  auto fields = Fields(up.WaitForLine("emberd: ready"));
  ASSERT_THAT(fields["coordinator"], SizeIs(1)) << up.Err();
  up.Signal(SIGHUP);
  Train(fields["coordinator"][0]);
  up.Signal(SIGTERM);
  EXPECT_EQ(up.Wait(), 0) << up.Err();
}

class ProcessesTest : public ::testing::Test {
 protected:
  void StartUp(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--processes"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    up_ = std::make_unique<TestingProgram>(Up(arguments));
    const std::string line = up_->WaitForLine("emberd: ready coordinator=127.0.0.1:");
    ASSERT_NE(line, "") << up_->Err();
    fields_ = Fields(line);
    pids_ = Pids(fields_["pids"]);
    ASSERT_THAT(pids_, SizeIs(3));  // the coordinator, then the shards
    ASSERT_THAT(fields_["shard_http"], SizeIs(2));
  }
  bool WaitForLog(const std::string& text) {
    return Eventually([&] { return up_->Err().find(text) != std::string::npos; });
  }

  std::unique_ptr<TestingProgram> up_;
  std::map<std::string, std::vector<std::string>> fields_;
  std::vector<pid_t> pids_;
};

TEST_F(ProcessesTest, TrainAndShowTheirMetricsAndLeaveNothingBehind) {
  ASSERT_NO_FATAL_FAILURE(StartUp());
  for (const pid_t pid : pids_) EXPECT_TRUE(Exists(pid));
  Train(fields_["coordinator"][0]);
  std::string pages = Scrape(fields_["http"][0]);
  EXPECT_THAT(pages, HasSubstr("emberd_shard_reachable{shard=\"1\"} 1"));
  EXPECT_THAT(pages, HasSubstr("role=\"coordinator\""));
  EXPECT_THAT(Get(fields_["http"][0], "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get(fields_["http"][0], "/status.json"), HasSubstr("\"name\":\"coordinator-0\""));
  for (const std::string& address : fields_["shard_http"]) {
    const std::string page = Scrape(address);
    EXPECT_THAT(Get(address, "/"), HasSubstr(": shard-"));
    EXPECT_THAT(Get(address, "/healthz"), StartsWith("HTTP/1.1 200"));
    EXPECT_THAT(page, HasSubstr("role=\"shard\""));
    EXPECT_THAT(page, HasSubstr("emberd_rpcs_total{code=\"OK\",method=\"ShardService/Gather\"}"));
    pages += page;
  }
  ExpectAllMetrics(pages, {});

  up_->Signal(SIGTERM);
  EXPECT_EQ(up_->Wait(), 0) << up_->Err();
  for (const pid_t pid : pids_) EXPECT_FALSE(Exists(pid)) << pid;
  EXPECT_TRUE(std::filesystem::is_empty(up_->directory() + "/tmp"));
}

TEST_F(ProcessesTest, NothingOutlivesALauncherThatIsKilled) {
  ASSERT_NO_FATAL_FAILURE(StartUp());
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans come to this process
  up_->Signal(SIGKILL);
  EXPECT_EQ(up_->Wait(), 128 + SIGKILL);
  for (const pid_t pid : pids_) {
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST_F(ProcessesTest, ADeadShardComesBackToItsAddress) {
  ASSERT_NO_FATAL_FAILURE(StartUp({"--log-format", "json"}));
  kill(pids_[2], SIGKILL);
  ASSERT_TRUE(WaitForLog("\"listens again\",\"child\":\"shard-1\",\"grpc\":\"" +
                         fields_["shard_grpc"][1] + "\""))
      << up_->Err();
  EXPECT_THAT(up_->Err(), HasSubstr("was killed by signal 9 (Killed)"));
  EXPECT_THAT(Scrape(fields_["shard_http"][1]), StartsWith("HTTP/1.1 200"));
  Train(fields_["coordinator"][0]);
  up_->Signal(SIGINT);
  EXPECT_EQ(up_->Wait(), 0) << up_->Err();
}

TEST_F(ProcessesTest, SighupLetsTheLogGoOnInANewFile) {
  const TempDir directory = TempDir::Create().value();
  const std::string path = directory.path() + "/log";
  const auto reopens = [&](TestingProgram* up, const std::vector<std::string>& names) {
    std::filesystem::rename(path, path + ".1");
    up->Signal(SIGHUP);
    for (const std::string& name : names) {
      const std::string line = " I " + name + " the log goes on in a file that was opened anew";
      ASSERT_TRUE(Eventually([&] {
        std::ifstream file(path);
        const std::string text((std::istreambuf_iterator<char>(file)), {});
        return text.find(line) != std::string::npos;
      })) << line
          << up->Err();
    }
    up->Signal(SIGTERM);
    EXPECT_EQ(up->Wait(), 0) << up->Err();
  };
  ASSERT_NO_FATAL_FAILURE(StartUp({"--log-file", path}));
  reopens(up_.get(), {"up", "shard-0", "shard-1", "coordinator-0"});
  TestingProgram embedded(Up({"--log-file", path}));
  ASSERT_NE(embedded.WaitForLine("emberd: ready"), "");
  reopens(&embedded, {"up"});
}

TEST_F(ProcessesTest, SighupLetsSpansGoOnInANewFile) {
  const TempDir directory = TempDir::Create().value();
  const std::string path = directory.path() + "/spans";
  const auto reopens = [&](TestingProgram* up) {
    std::filesystem::rename(path, path + ".1");
    up->Signal(SIGHUP);
    EXPECT_TRUE(Eventually([&] { return std::filesystem::exists(path); })) << up->Err();
    up->Signal(SIGTERM);
    EXPECT_EQ(up->Wait(), 0) << up->Err();
  };
  ASSERT_NO_FATAL_FAILURE(StartUp({"--span-file", path}));
  reopens(up_.get());
  TestingProgram embedded(Up({"--span-file", path}));
  ASSERT_NE(embedded.WaitForLine("emberd: ready"), "");
  reopens(&embedded);
}

TEST_F(ProcessesTest, ADeadShardStaysDeadIfAskedTo) {
  ASSERT_NO_FATAL_FAILURE(StartUp({"--no-restart"}));
  kill(pids_[1], SIGKILL);
  ASSERT_TRUE(WaitForLog("a process died child=shard-0")) << up_->Err();
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_EQ(up_->Err().find("restarted"), std::string::npos);
  EXPECT_TRUE(Exists(pids_[0]) && Exists(pids_[2]));
  up_->Signal(SIGTERM);
  EXPECT_EQ(up_->Wait(), 0) << up_->Err();
}

// Would catch: status 0 although nobody was there to save, as while a coordinator that has died
// waits for its next start.
TEST_F(ProcessesTest, SaysThatNobodyWasThereToSave) {
  const TempDir data = *TempDir::Create();
  ASSERT_NO_FATAL_FAILURE(StartUp({"--no-restart", "--data", data.path()}));
  kill(pids_[0], SIGKILL);
  ASSERT_TRUE(WaitForLog("a process died child=coordinator-0")) << up_->Err();
  up_->Signal(SIGTERM);
  EXPECT_EQ(up_->Wait(), 1);
  EXPECT_THAT(up_->Err(), HasSubstr("no coordinator was there to save"));
}

TEST_F(ProcessesTest, TheSecondSignalEndsAllAtOnce) {
  ASSERT_NO_FATAL_FAILURE(StartUp());
  kill(pids_[0], SIGSTOP);  // so that an orderly end cannot be
  up_->Signal(SIGTERM);
  ASSERT_TRUE(WaitForLog("stopping signal=SIGTERM"));
  up_->Signal(SIGTERM);
  EXPECT_EQ(up_->Wait(), 1);
  for (const pid_t pid : pids_) {
    EXPECT_TRUE(Eventually([&] { return !Exists(pid); })) << pid;
  }
}

class ServerProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(Config()) << "shards { address: '127.0.0.1:0' http_address: '127.0.0.1:0' }\n"
                               "coordinators { address: '127.0.0.1:0' }\n";
  }
  std::string Config() const { return directory_.path() + "/cluster.textproto"; }

  const TempDir directory_ = TempDir::Create().value();
};

// Would catch: a script that goes on as if all had been saved.
TEST_F(ServerProcessTest, UpFailsIfItHasToKillAProcess) {
  std::ofstream(Config(), std::ios::app) << "timeouts { drain_ms: 1 }\n";
  TestingProgram up(Emberd({"up", "--config", Config(), "--processes"}));
  auto fields = Fields(up.WaitForLine("emberd: ready coordinator="));
  ASSERT_THAT(fields["pids"], SizeIs(2)) << up.Err();
  kill(Pids(fields["pids"])[1], SIGSTOP);
  up.Signal(SIGTERM);
  EXPECT_EQ(up.Wait(), 1);
  EXPECT_THAT(up.Err(), HasSubstr("shard-0 was killed, as it did not end in time; what was not "
                                  "saved may be lost"));
}

TEST_F(ServerProcessTest, WritesItsReadyFileWhenItServes) {
  const std::string ready_file = directory_.path() + "/ready";
  TestingProgram shard(Emberd({"shard", "--config", Config(), "--ready-file", ready_file}));
  const auto ready = Await([&] { return launcher::ReadReadyFile(ready_file); });
  ASSERT_TRUE(ready.ok()) << ready.status() << shard.Err();
  EXPECT_EQ(ready->pid, shard.pid());
  EXPECT_THAT(Scrape(ready->http), HasSubstr("role=\"shard\""));
  EXPECT_EQ(shard.Out(), "");
  shard.Signal(SIGTERM);
  EXPECT_EQ(shard.Wait(), 0) << shard.Err();
}

TEST_F(ServerProcessTest, AShardSaysThatItServesOnlyOnceItHasItsLog) {
  std::ofstream(Config(), std::ios::app)
      << "storage { directory: '" << directory_.path() << "' durability: LOG }";
  std::filesystem::create_directory(directory_.path() + "/shard-0000");
  // As an earlier process that is ending.
  FileDescriptor lock(
      open((directory_.path() + "/shard-0000/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  TestingProgram shard(Emberd({"shard", "--config", Config()}));
  const auto says = [&](const char* text) {
    return Eventually([&] { return shard.Err().find(text) != std::string::npos; });
  };
  ASSERT_TRUE(says("listening, but not serving yet")) << shard.Err();
  EXPECT_THAT(shard.Err(), Not(HasSubstr(" serving grpc=")));
  EXPECT_THAT(shard.Err(), Not(HasSubstr("serves now")));
  auto fields = Fields(shard.WaitForLine("emberd: ready shard-0 grpc="));
  EXPECT_THAT(Get(fields["http"][0], "/healthz"), StartsWith("HTTP/1.1 503"));
  lock = FileDescriptor();
  EXPECT_TRUE(says("serves now grpc=")) << shard.Err();
  EXPECT_THAT(Get(fields["http"][0], "/healthz"), StartsWith("HTTP/1.1 200"));
}

TEST_F(ServerProcessTest, ALogOfAnotherNumberOfShardsSaysWhatToDo) {
  std::ofstream(Config(), std::ios::app)
      << "storage { directory: '" << directory_.path() << "' durability: LOG }\n";
  {
    TestingProgram shard(Emberd({"shard", "--config", Config()}));
    auto fields = Fields(shard.WaitForLine("emberd: ready shard-0 grpc="));
    const auto serves = [&] {
      return absl::StartsWith(Get(fields["http"][0], "/healthz"), "HTTP/1.1 200");
    };
    ASSERT_TRUE(Eventually(serves)) << shard.Err();
    shard.Signal(SIGTERM);
    EXPECT_EQ(shard.Wait(), 0) << shard.Err();
  }
  std::ofstream(Config(), std::ios::app) << "shards { address: '127.0.0.1:0' }\n";
  TestingProgram shard(Emberd({"shard", "--config", Config()}));
  const auto refuses = [&] {
    return absl::StrContains(shard.Err(), "move the folders shard-NNNN away");
  };
  EXPECT_TRUE(Eventually(refuses)) << shard.Err();
  EXPECT_THAT(shard.Err(), HasSubstr("is the log of shard 0 of 1, not of 0 of 2"));
}

TEST_F(ServerProcessTest, FlagsGoOverTheConfiguration) {
  TestingProgram shard(Emberd({"shard", "--config", Config(), "--address", "0.0.0.0:0",
                               "--http-address", "", "--insecure", "--log-level", "WARNING",
                               "--log-format", "json", "--log-file", directory_.path() + "/log"}));
  auto fields = Fields(shard.WaitForLine("emberd: ready shard-0 grpc=0.0.0.0:"));
  EXPECT_EQ(fields["http"][0], "");
  std::ifstream log(directory_.path() + "/log");
  std::string line;
  std::getline(log, line);
  EXPECT_THAT(line, HasSubstr("\"level\":\"warning\""));
  EXPECT_THAT(line, HasSubstr("insecure: plain text, open to the network"));
  EXPECT_EQ(shard.Err(), "");
  shard.Signal(SIGTERM);
  EXPECT_EQ(shard.Wait(), 0);
}

TEST_F(ServerProcessTest, AnAddressInUseEndsItWithOne) {
  TestingProgram first(Emberd({"shard", "--config", Config()}));
  auto fields = Fields(first.WaitForLine("emberd: ready shard-0"));
  ASSERT_THAT(fields["grpc"], SizeIs(1)) << first.Err();
  for (const auto& [flag, address] :
       {std::pair<std::string, std::string>("--address", fields["grpc"][0]),
        {"--http-address", fields["http"][0]}}) {
    TestingProgram second(Emberd({"shard", "--config", Config(), flag, address}));
    EXPECT_EQ(second.Wait(), 1) << flag;
    EXPECT_THAT(second.Err(), HasSubstr(address)) << flag;
  }
  TestingProgram logs_to_file(Emberd({"shard", "--config", Config(), "--address", fields["grpc"][0],
                                      "--log-file", directory_.path() + "/log"}));
  EXPECT_EQ(logs_to_file.Wait(), 1);
  EXPECT_THAT(logs_to_file.Err(), HasSubstr("is in use by another process"));
}

}  // namespace up_test
}  // namespace emberd::testing
