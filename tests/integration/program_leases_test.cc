// What handles hold goes when nobody asks for it, and counts against the budgets meanwhile.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/integration/program_cluster.h"

namespace emberd::testing {
namespace program_leases_test {

using v1::ElementwiseOutput;

class ProgramLeasesTest : public ProgramsTest {
 protected:
  void SetUp() override {
    StartCluster({.embedded = true,
                  .config = "timeouts { batch_ttl_ms: 6000 } budgets { batch_bytes: 400000 "
                            "bytes_per_sparsecore: 1000000000 "
                            "client_in_flight_bytes: 500000 }"},
                 MixedModel("mixed"));
    if (HasFatalFailure()) return;
    api_ = std::make_unique<ProgramApi>(cluster_->address());
  }
};

TEST_F(ProgramLeasesTest, HandlesOfASilentClientExpire) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const uint64_t kept = Prepare(sum, values).handle();
  ProgramApi silent(cluster_->address(), "silent");
  const auto left = silent.Prepare(sum, values);
  ASSERT_TRUE(left.ok()) << left.status();
  const auto expired = [&] {
    EXPECT_TRUE(api_->Read(kept).ok());  // this one is heard of
    return Metric("emberd_program_handles_expired_total");
  };
  EXPECT_EQ(Await(expired, [](double count) { return count > 0; }), 1);
  EXPECT_EQ(silent.Read(left->handle()).status().message(),
            absl::StrCat("memory handle not found: ", left->handle()));
  EXPECT_TRUE(api_->Read(kept).ok());
  EXPECT_EQ(Metric("emberd_program_handles"), 1);
}

// A client of ours makes no call of its own, either.
TEST_F(ProgramLeasesTest, AClientKeepsWhatItHasAndGivesItBack) {
  client::Programs& programs = client_->programs();
  auto lookup = programs.Call("Compile",
                              "spec { kind: LOOKUP model: 'mixed' inputs { feature: 'user' "
                              "max_samples: 8 dynamic: true } }");
  ASSERT_TRUE(lookup.ok()) << lookup.status();
  const client::KeptPtr program = lookup->kept.at(0);
  const std::vector<int64_t> ids = {1, 2, 3};
  const std::string_view bytes(reinterpret_cast<const char*>(ids.data()), 24);
  const std::string batch =
      "features { feature: 'user' dense { ids { dtype: INT64 shape: 3 data: '0' } } }";
  auto prepared = programs.Call(
      "PrepareBatch", absl::StrCat("program_handle: ", program->handle, " batch { ", batch, " }"),
      {bytes}, program.get());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ProgramApi silent(cluster_->address(), "silent");
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  ASSERT_TRUE(silent.Prepare(Compile(SumProgram(ElementwiseOutput::ADD, 1)), values).ok());
  EXPECT_EQ(Metric("emberd_program_handles"), 3);
  EXPECT_TRUE(Eventually([&] { return Metric("emberd_program_handles_expired_total") > 0; }));
  EXPECT_EQ(Metric("emberd_program_handles_expired_total"), 1);
  const std::string execute = absl::StrCat("program_handle: ", program->handle,
                                           " arguments { handle: ", prepared->kept.at(0)->handle,
                                           " } config { return_values: true }");
  auto found = programs.Call("Execute", execute, {}, program.get());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->tensors.at(0).size(), 3 * 16 * sizeof(float));
  EXPECT_EQ(Metric("emberd_program_handles"), 3);
  prepared->kept.clear();
  EXPECT_TRUE(Eventually([&] { return Metric("emberd_program_handles") == 2; }));
  EXPECT_EQ(programs.Call("Execute", execute, {}, program.get()).status().code(),
            absl::StatusCode::kNotFound);
  client_ = nullptr;  // what it still has goes with it
  EXPECT_EQ(Metric("emberd_program_handles"), 0);
}

// Would catch: coordinators that are told one after another, so that those that do not answer keep
// the last one waiting until what the client has there expires.
TEST(ProgramLeasesOfManyTest, CoordinatorsThatDoNotAnswerDoNotCostWhatIsKeptOnOthers) {
  auto cluster = Cluster::Start({.coordinators = 3, .config = "timeouts { batch_ttl_ms: 10000 }"});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  auto connected = client::Client::Connect((*cluster)->client_options(/*all_coordinators=*/true));
  ASSERT_TRUE(connected.ok()) << connected.status();
  client::Programs& programs = (*connected)->programs();
  const std::string program =
      "kind: ELEMENTWISE inputs { feature: 'x' } outputs { operation: COPY a { argument: 0 } }";
  std::vector<client::KeptPtr> kept;
  for (const int coordinator : {0, 1, 2}) {
    const client::Kept at = {.coordinator = coordinator};
    const auto compiled = programs.Call("Compile", absl::StrCat("spec { ", program, " }"), {}, &at);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    kept.push_back(compiled->kept.at(0));
    ASSERT_EQ(kept.back()->coordinator, coordinator);
  }
  const auto expired = [&] {
    return MetricSum(FetchMetrics((*cluster)->http_address(2)),
                     "emberd_program_handles_expired_total");
  };
  (*cluster)->SuspendCoordinator(0);
  (*cluster)->SuspendCoordinator(1);
  // One after the other, of clients that are silent: longer than a lease from when it began.
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  for (const int round : {1, 2}) {
    ProgramApi silent((*cluster)->address(2), absl::StrCat("silent ", round));
    const auto compiled = silent.Compile(SumProgram(ElementwiseOutput::ADD, 1));
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    ASSERT_TRUE(silent.Prepare(compiled->program_handle(), values).ok());
    ASSERT_TRUE(Eventually([&] { return expired() >= round; }));
  }
  EXPECT_EQ(expired(), 2);
  EXPECT_TRUE(programs
                  .Call("PrepareBatch",
                        absl::StrCat("program_handle: ", kept[2]->handle, " batch {}"), {},
                        kept[2].get())
                  .ok());
  (*cluster)->ResumeCoordinator(0);
  (*cluster)->ResumeCoordinator(1);
}

TEST_F(ProgramLeasesTest, AProgramIsReleasedByEachClientForItselfHoweverOften) {
  v1::CompileRequest request;
  *request.mutable_spec() = SumProgram(ElementwiseOutput::ADD, 1);
  ProgramApi other(cluster_->address(), "other");
  const auto compile = [&](ProgramApi* api) {
    const auto compiled = api->Compile(request.spec(), api->client());
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return compiled->program_handle();
  };
  const uint64_t mine = compile(api_.get()), theirs = compile(&other);
  EXPECT_NE(mine, theirs);
  EXPECT_EQ(Metric("emberd_program_compilations_total"), 1);
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_TRUE(api_->ReleaseAgain({mine}).ok());
  }
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  EXPECT_TRUE(other.Prepare(theirs, values).ok());
  EXPECT_EQ(api_->Prepare(mine, values).status().message(),
            absl::StrCat("No executable found for uid ", mine));
  EXPECT_EQ(api_->Release({mine}).message(), absl::StrCat("No cache entry found for uid ", mine));
  v1::ExecuteRequest last;
  last.set_program_handle(theirs);
  for (int i = 0; i < 2; ++i) *last.add_arguments()->mutable_literal() = values;
  last.mutable_config()->set_return_values(true);
  last.mutable_config()->set_release_program_handle(true);
  const auto ran = other.Execute(last);
  EXPECT_TRUE(ran.ok()) << ran.status();
  EXPECT_EQ(other.Execute(last).status().message(),
            absl::StrCat("No executable found for uid ", theirs));
}

TEST_F(ProgramLeasesTest, BuffersOfAProgramMustFitASparseCoreBesideTheRows) {
  v1::ProgramSpec spec = Spec(v1::ProgramSpec::LOOKUP);
  const auto fits = api_->Compile(spec);
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_LT(fits->bytes_per_sparsecore(), int64_t{1} << 20);
  for (v1::ProgramInput& input : *spec.mutable_inputs()) input.set_max_samples(1 << 20);
  spec.set_max_ids_per_chip_per_sample(1024);
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = api_->Compile(spec).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "budgets.bytes_per_sparsecore is 1000000000"))
        << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "rows of model 'mixed'")) << refused;
  }
}

TEST_F(ProgramLeasesTest, WhatHandlesHoldCountsAgainstTheBudgetOfBatches) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>(std::vector<float>(75000)), &values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const uint64_t first = Prepare(sum, values).handle();
  const absl::Status full = api_->Prepare(sum, values).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(full.message(), "budgets.batch_bytes = 400000")) << full;
  ASSERT_TRUE(api_->Release({}, {first}).ok());
  EXPECT_TRUE(api_->Prepare(sum, values).ok());
}

// Would catch: millions of handles to one value, none of which counts.
TEST_F(ProgramLeasesTest, EachHandleOfAValueCounts) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  v1::ExecuteChainedRequest plan;
  const uint64_t value = Prepare(sum, values).handle();
  for (int i = 0; i < 100; ++i) {
    plan.mutable_ops(AddData(&plan, value))->add_outputs()->set_result_index(i);
  }
  absl::Status status;
  int more = 0;
  for (; status.ok() && more < 10'000; more += 100) status = api_->Chain(plan).status();
  EXPECT_GT(more, 500);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "budgets.batch_bytes = 400000")) << status;
  ASSERT_TRUE(api_->ReleaseAll().ok());
  const auto now = client_->GetStatus();
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(now->batch_bytes, 0);
}

// Would catch: a few small requests for a large value that take all memory.
TEST_F(ProgramLeasesTest, WhatAHandleReadsCountsAsOtherAnswers) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>(std::vector<float>(70000)), &values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const uint64_t value = Prepare(sum, values).handle();
  const absl::Status refused = api_->Read(value).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(refused.message(), "budgets.client_in_flight_bytes = 500000"))
      << refused;
}

TEST_F(ProgramLeasesTest, WhatSortingTakesCountsAsAnswersDo) {
  v1::ProgramSpec spec;
  spec.set_kind(v1::ProgramSpec::LOOKUP);
  spec.set_model("mixed");
  v1::ProgramInput* const input = spec.add_inputs();
  input->set_feature("user");
  input->set_max_samples(20000);
  input->set_dynamic(true);
  const uint64_t lookup = Compile(spec);
  v1::Literal batch;
  v1::FeatureIds* const ids = batch.add_features();
  ids->set_feature("user");
  *ids->mutable_dense()->mutable_ids() = MakeVector(std::vector<int64_t>(20000, 1));
  const absl::Status refused = api_->Prepare(lookup, batch).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "sorting the ids needs 720000 bytes"))
      << refused;
}

// A call may find that the answer of the one before still has its room of the client's budget, and
// is sent again, as the refusal says. What never came back would refuse it each time.
TEST_F(ProgramLeasesTest, WhatADonationReplacesIsGivenBack) {
  v1::ProgramSpec spec;
  spec.set_kind(v1::ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("x");
  spec.add_outputs()->set_operation(v1::ElementwiseOutput::ADD);
  spec.add_outputs()->set_operation(v1::ElementwiseOutput::COPY);
  for (v1::ElementwiseOutput& output : *spec.mutable_outputs()) {
    output.mutable_a()->set_output_index(1);
  }
  spec.mutable_outputs(0)->mutable_b()->set_output_index(1);
  spec.add_aliases();
  v1::Literal values;
  AddTensor("x", MakeVector<float>(std::vector<float>(20000)), &values);  // of 400000 bytes
  AddTensor("y", MakeVector<float>(std::vector<float>(5000)), &values);
  const uint64_t doubled = Compile(spec);
  const uint64_t handle = Prepare(doubled, values).handle();
  const auto before = api_->Read(handle);
  ASSERT_TRUE(before.ok()) << before.status();
  v1::ExecutionConfig config;
  config.set_return_values(true);
  for (int i = 0; i < 20; ++i) {
    const auto ran = Await([&] { return api_->Execute(doubled, {handle}, config); });
    ASSERT_TRUE(ran.ok()) << i << ": " << ran.status();
  }
  const auto after = Await([&] { return api_->Read(handle); });
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->bytes(), before->bytes());
  // Elements count for themselves, not with the rest of their tuple.
  v1::Literal small;
  for (int i = 0; i < 10; ++i) {
    v1::ProgramArgument* const element = small.add_elements();
    element->set_handle(handle);
    element->set_output_index(2);
  }
  const uint64_t read_of = Prepare(doubled, small).handle();
  const auto read = Await([&] { return api_->Read(read_of); });
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_LT(read->bytes(), 300000);
}

}  // namespace program_leases_test
}  // namespace emberd::testing
