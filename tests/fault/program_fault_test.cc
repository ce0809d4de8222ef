// A shard that dies in the middle of a chained call: nothing of the call stays, and its repeat,
// under the same key, makes the update once.
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/program_api.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace program_fault_test {

constexpr int64_t kSamples = 24;

class ProgramFaultTest : public ClusterFixture {
 protected:
  void Start(const std::string& failpoint) {
    StartCluster({.config = absl::StrCat("storage { directory: \"", storage_.path(),
                                         "\" durability: LOG fsync: ALWAYS }"),
                  .failpoints = {{"coordinator-0", failpoint}}},
                 MixedModel("mixed"));
    if (HasFatalFailure()) return;
    api_ = std::make_unique<ProgramApi>(cluster_->address());
  }
  uint64_t Compile(v1::ProgramSpec::Kind kind, const std::string& model) {
    const auto compiled =
        api_->Compile(ModelProgram(kind, model, MixedBatch(1, kSamples), kSamples));
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return compiled.ok() ? compiled->program_handle() : 0;
  }
  v1::ProgramResult LookUp(uint64_t program) {
    v1::ExecuteRequest request;
    request.set_program_handle(program);
    *request.add_arguments()->mutable_literal() = BatchLiteral(MixedBatch(1, kSamples));
    request.mutable_config()->set_return_values(true);
    const auto found = Await([&] { return api_->Execute(request); });
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->results(0) : v1::ProgramResult();
  }
  // Of the batch, under one key, and a lookup behind it.
  v1::ExecuteChainedRequest Plan(uint64_t lookup, uint64_t update, uint64_t found,
                                 const v1::Literal& gradients) {
    v1::ExecuteChainedRequest plan;
    const int batch = AddData(&plan, found);
    const int values = AddLiteral(&plan, gradients);
    AddProgram(&plan, update, {batch, values});
    AddProgram(&plan, lookup, {AddLiteral(&plan, BatchLiteral(MixedBatch(2, kSamples)))}, 0);
    plan.mutable_config()->mutable_execution_instance_key()->set_client_id("trainer");
    plan.mutable_config()->mutable_execution_instance_key()->set_sequence(1);
    return plan;
  }
  double Handles() {
    return MetricSum(FetchMetrics(cluster_->http_address()), "emberd_program_handles");
  }

  const TempDir storage_ = *TempDir::Create();
  std::unique_ptr<ProgramApi> api_;
};

TEST_F(ProgramFaultTest, AShardKilledInAChainAndARepeatMakeOneUpdate) {
  // Every shard holds the update, and its word is next.
  Start("update.votes_are_in=stop");
  ASSERT_FALSE(HasFatalFailure());
  const uint64_t lookup = Compile(v1::ProgramSpec::LOOKUP, "mixed");
  const uint64_t update = Compile(v1::ProgramSpec::UPDATE, "mixed");
  const v1::ProgramResult found = LookUp(lookup);
  const v1::Literal gradients = GradientLiteral(found.values());
  const double handles = Handles();

  absl::Status failed;
  std::thread caller(
      [&] { failed = api_->Chain(Plan(lookup, update, found.handle(), gradients)).status(); });
  EXPECT_TRUE(cluster_->AwaitStandstill(0));
  cluster_->KillShard(1);
  cluster_->ResumeCoordinator(0);
  caller.join();
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(Handles(), handles);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());

  const auto repeated =
      Await([&] { return api_->Chain(Plan(lookup, update, found.handle(), gradients)); });
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  const std::string once = TableDigest();
  const auto again = api_->Chain(Plan(lookup, update, found.handle(), gradients));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->updates(0).replayed());
  EXPECT_EQ(TableDigest(), once);
  ASSERT_TRUE(api_->Release({}, {repeated->results(0).handle(), again->results(0).handle()}).ok());
  EXPECT_EQ(Handles(), handles);

  // The same update of a model that nobody disturbs.
  const auto plain = client_->DeclareModel(MixedModel("plain"));
  ASSERT_TRUE(plain.ok()) << plain.status();
  const v1::ProgramResult calm = LookUp(Compile(v1::ProgramSpec::LOOKUP, "plain"));
  v1::ExecuteRequest request;
  request.set_program_handle(Compile(v1::ProgramSpec::UPDATE, "plain"));
  request.add_arguments()->set_handle(calm.handle());
  *request.add_arguments()->mutable_literal() = gradients;
  const auto updated = api_->Execute(request);
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(once, Digest(*client_, *plain).value_or("none"));
}

}  // namespace program_fault_test
}  // namespace emberd::testing
