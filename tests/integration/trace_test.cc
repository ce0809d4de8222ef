// One request can be followed through all processes: the trace id that a trainer sends stands in
// the log lines of the coordinator and of the shards, and a slow step says what it waited for.
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/group_training.h"
#include "tests/testing/metrics.h"
#include "tests/testing/program_api.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace trace_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kTraceId[] = "4bf92f3577b34da6a3ce929d0e0e4736";
// Large enough that every process works on it for more than a millisecond.
constexpr char kModel[] = R"(
  name: "wide" tables { name: "t" vocabulary_size: 50000 embedding_dim: 64 }
  features { name: "f" table: "t" batch_size: 1024 })";
constexpr int64_t kSamples = 200'000;

TEST(TraceTest, ATraceIdReachesTheLogsOfAllProcesses) {
  auto cluster = Cluster::Start({.config = "logging { slow_step_ms: 1 }"});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DeclareModel(kModel);
  ASSERT_TRUE(model.ok()) << model.status();

  std::vector<int32_t> ids(kSamples);
  for (int64_t i = 0; i < kSamples; ++i) ids[i] = static_cast<int32_t>(i * 7919 % 50000);
  v1::LookupRequest request;
  request.set_model_id(model->id);
  request.set_inference(true);
  request.add_features()->set_feature("f");
  *request.mutable_features(0)->mutable_dense()->mutable_ids() = MakeVector(ids);
  const Api api((*cluster)->address());
  grpc::ClientContext context;
  context.AddMetadata("traceparent", std::string("00-") + kTraceId + "-00f067aa0ba902b7-01");
  v1::LookupResponse response;
  const grpc::Status status = api.embedding->Lookup(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();

  EXPECT_THAT(
      (*cluster)->CoordinatorLog(),
      AllOf(HasSubstr("slow call"), HasSubstr("EmbeddingService/Lookup"), HasSubstr(kTraceId)));
  for (int shard = 0; shard < 2; ++shard) {
    EXPECT_THAT(
        (*cluster)->ShardLog(shard),
        AllOf(HasSubstr("slow call"), HasSubstr("ShardService/Gather"), HasSubstr(kTraceId)));
  }
}

TEST(TraceTest, ASlowStepSaysWhomItWaitedForAndMetricsKnowTheGroup) {
  auto cluster = Cluster::Start({.config = "logging { slow_step_ms: 1 }"});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DeclareModel(GroupModel("m", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  const absl::Status status =
      TrainGroup(**cluster, *model, {.group = "night run", .size = 2}, 1, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;  // no blanks in a name
  const absl::Status trained =
      TrainGroup(**cluster, *model, {.group = "night-run", .size = 2}, 1, 20);
  ASSERT_TRUE(trained.ok()) << trained;
  EXPECT_THAT((*cluster)->CoordinatorLog(),
              AllOf(HasSubstr("slow step"), HasSubstr("group=night-run"), HasSubstr("step="),
                    HasSubstr("slowest_rank="), HasSubstr("trace=")));
  // The two members are told of their end a moment before the group knows it.
  auto stream = Await([&] { return client->Train(*model, {.group = "night-run", .size = 1}); });
  ASSERT_TRUE(stream.ok()) << stream.status();
  Share share = MakeShare((*stream)->next_step(), 0, 1);
  share.ids[0][0] = -1;
  ASSERT_TRUE((*stream)->SendLookup((*stream)->next_step(), share.Features()).ok());
  EXPECT_EQ((*stream)->ReceiveLookup().status().code(), absl::StatusCode::kOutOfRange);

  const std::string page = FetchMetrics((*cluster)->http_address());
  const std::string group = "group=\"night-run\"";
  EXPECT_EQ(MetricSum(page, "emberd_group_steps_total", group), 40);
  EXPECT_GT(MetricSum(page, "emberd_group_last_arrivals_total", group), 0);
  EXPECT_EQ(MetricSum(page, "emberd_group_failures_total", "code=\"OUT_OF_RANGE\"," + group), 1);
  for (const char* stage : {"preprocess", "wait_for_ranks", "gather", "combine", "apply"}) {
    EXPECT_GT(MetricSum(page, "emberd_group_stage_duration_seconds_count",
                        group + ",model=\"m\",stage=\"" + stage + "\""),
              0)
        << stage;
  }
}

// Spans of a chained call: one tree, whose root is under the trainer's own span and whose leaves
// are what the shards did.
TEST(TraceTest, AChainedCallIsOneTreeOfSpans) {
  const TempDir directory = *TempDir::Create();
  const std::string path = directory.path() + "/spans.jsonl";
  auto cluster = Cluster::Start({.config = absl::StrCat("logging { span_file: \"", path, "\" }")});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  ASSERT_TRUE(client->DeclareModel(MixedModel("mixed")).ok());
  ProgramApi api((*cluster)->address());
  const auto batch = MixedBatch(1, 8);
  const auto lookup = api.Compile(ModelProgram(v1::ProgramSpec::LOOKUP, "mixed", batch, 8));
  const auto update = api.Compile(ModelProgram(v1::ProgramSpec::UPDATE, "mixed", batch, 8));
  ASSERT_TRUE(lookup.ok() && update.ok());
  v1::ExecuteRequest request;
  request.set_program_handle(lookup->program_handle());
  *request.add_arguments()->mutable_literal() = BatchLiteral(batch);
  request.mutable_config()->set_return_values(true);
  const auto found = api.Execute(request);
  ASSERT_TRUE(found.ok()) << found.status();

  v1::ExecuteChainedRequest plan;
  AddData(&plan, found->results(0).handle());
  AddLiteral(&plan, GradientLiteral(found->results(0).values()));
  AddProgram(&plan, update->program_handle(), {0, 1});
  AddProgram(&plan, lookup->program_handle(), {AddLiteral(&plan, BatchLiteral(batch))}, 0);
  plan.mutable_ops(2)->mutable_update()->set_step(5);
  plan.mutable_config()->set_client_id("tracer");
  grpc::ClientContext context;
  context.AddMetadata("traceparent", std::string("00-") + kTraceId + "-00f067aa0ba902b7-01");
  v1::ExecuteChainedResponse response;
  const auto stub = v1::ProgramService::NewStub(api.api().channel);
  const grpc::Status status = stub->ExecuteChained(&context, plan, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();

  ASSERT_TRUE((*cluster)->Stop(absl::Minutes(2)).ok());  // all spans are written
  std::map<std::string, nlohmann::json> spans;           // of this call, by id
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto parsed = nlohmann::json::parse(line);
    const auto& span = parsed.at("resourceSpans").at(0).at("scopeSpans").at(0).at("spans").at(0);
    if (span.at("traceId") == kTraceId) spans[span.at("spanId")] = span;
  }
  std::multiset<std::string> paths;
  for (const auto& [id, span] : spans) {
    std::string path_of_names = span.at("name");
    std::string parent = span.at("parentSpanId");
    for (; spans.contains(parent); parent = spans[parent].at("parentSpanId")) {
      path_of_names =
          absl::StrCat(spans[parent].at("name").get<std::string>(), " > ", path_of_names);
    }
    EXPECT_EQ(parent, "00f067aa0ba902b7") << path_of_names;
    paths.insert(path_of_names);
    if (span.at("name") != "UPDATE") continue;
    const std::string attributes = span.at("attributes").dump();
    for (const std::string& value : {std::string("5"), absl::StrCat(update->program_handle())}) {
      EXPECT_TRUE(absl::StrContains(attributes, absl::StrCat("\"", value, "\""))) << attributes;
    }
  }
  const std::string root = "ProgramService/ExecuteChained";
  for (const char* once : {"", " > set_up", " > set_up > prepare_batch", " > run",
                           " > run > LOOKUP", " > run > UPDATE"}) {
    EXPECT_EQ(paths.count(root + once), 1u) << once;
  }
  EXPECT_EQ(paths.count(root + " > set_up > find_program"), 2u);
  EXPECT_EQ(paths.count(root + " > run > free"), 2u);
  EXPECT_EQ(paths.count(root + " > run > LOOKUP > ShardService/Gather"), 2u);  // of both shards
  EXPECT_GE(paths.count(root + " > run > UPDATE > ShardService/Apply"), 2u);
}

}  // namespace trace_test
}  // namespace emberd::testing
