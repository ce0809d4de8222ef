// Programs, handles and plans of a real cluster: the same bits as Lookup and ApplyGradients, every
// update once, nothing left behind.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "client/cpp/model_codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/program_cluster.h"

namespace emberd::testing {
namespace programs_test {

using v1::ElementwiseOutput;
using v1::ProgramSpec;

TEST_F(ProgramsTest, ManyWhoCompileTheSameWaitForOneCompilation) {
  std::vector<uint64_t> handles(64);
  std::vector<std::thread> threads;
  for (uint64_t& handle : handles) {
    threads.emplace_back([&] { handle = Compile(Spec(ProgramSpec::LOOKUP)); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(handles[0], 0u);
  EXPECT_EQ(handles, std::vector<uint64_t>(64, handles[0]));
  EXPECT_EQ(Metric("emberd_program_compilations_total"), 1);
  // Each success was a reference.
  EXPECT_TRUE(api_->Release(handles).ok());
  EXPECT_EQ(api_->Release({handles[0]}).message(),
            absl::StrCat("No cache entry found for uid ", handles[0]));
}

TEST_F(ProgramsTest, ExecuteGivesTheBitsOfLookupAndApplyGradients) {
  const client::Model plain = Declare("plain");
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const std::vector<v1::NamedTensor> expected = PlainLookup(plain.id, seed, nullptr);
    const uint64_t batch = Prepare(lookup, Batch(seed)).handle();
    const auto found = api_->Execute(lookup, {batch});
    ASSERT_TRUE(found.ok()) << found.status();
    const uint64_t result = found->results(0).handle();
    const auto activations = api_->Read(result);
    ASSERT_TRUE(activations.ok()) << activations.status();
    ExpectSameTensors(activations->values(), expected);
    // Prepared batches can be run again.
    const auto again = api_->Execute(lookup, {batch});
    ASSERT_TRUE(again.ok()) << again.status();
    const auto last = api_->Read(again->results(0).handle(), 8);
    ASSERT_TRUE(last.ok()) << last.status();
    EXPECT_EQ(last->values(0).SerializeAsString(), expected[7].SerializeAsString());

    const uint64_t gradients = Prepare(update, GradientLiteral(expected)).handle();
    v1::ExecutionConfig config;
    config.set_release_input_handles(true);
    SetKey(seed, &config);
    const auto updated = api_->Execute(update, {result, gradients}, config);
    ASSERT_TRUE(updated.ok()) << updated.status();
    EXPECT_GT(updated->updates(0).rows_updated(), 0);
    EXPECT_EQ(updated->updates(0).op_index(), 0);  // it is no chain
    EXPECT_EQ(api_->Read(result).status().message(),
              absl::StrCat("memory handle not found: ", result));
    // A repeat, as after an answer that was lost, is answered from the record, though its handles
    // are gone, released by it or with a coordinator; an update of another key is not.
    for (const bool releases : {true, false}) {
      config.set_release_input_handles(releases);
      const auto repeated = api_->Execute(update, {result, gradients}, config);
      ASSERT_TRUE(repeated.ok()) << repeated.status();
      EXPECT_TRUE(repeated->updates(0).replayed());
      EXPECT_EQ(repeated->updates(0).rows_updated(), updated->updates(0).rows_updated());
      EXPECT_EQ(repeated->updates(0).op_index(), updated->updates(0).op_index());
    }
    SetKey(seed + 100, &config);
    EXPECT_EQ(api_->Execute(update, {result, gradients}, config).status().code(),
              absl::StatusCode::kNotFound);
    PlainStep(plain, seed);
  }
  EXPECT_EQ(DigestOf(model_), DigestOf(plain));
}

// Would catch: NOT_FOUND for an update that was made, because it has given back its program, too.
TEST_F(ProgramsTest, AnUpdateThatReleasesItsProgramIsAnsweredFromTheRecord) {
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const auto found = api_->Execute(lookup, {Prepare(lookup, Batch(1)).handle()});
  ASSERT_TRUE(found.ok()) << found.status();
  const uint64_t result = found->results(0).handle();
  const auto activations = api_->Read(result);
  ASSERT_TRUE(activations.ok()) << activations.status();
  const uint64_t gradients = Prepare(update, GradientLiteral(activations->values())).handle();
  v1::ExecutionConfig config;
  config.set_release_input_handles(true);
  config.set_release_program_handle(true);
  SetKey(1, &config);
  for (const bool replayed : {false, true}) {
    const auto updated = api_->Execute(update, {result, gradients}, config);
    ASSERT_TRUE(updated.ok()) << updated.status();
    EXPECT_EQ(updated->updates(0).replayed(), replayed);
  }
  SetKey(2, &config);
  EXPECT_EQ(api_->Execute(update, {result, gradients}, config).status().code(),
            absl::StatusCode::kNotFound);
}

// Models whose updates differ in nothing but the seed of their roundings.
TEST_F(ProgramsTest, ASeedKeysTheRoundingsOfAnUpdate) {
  const auto declare = [&](const std::string& name) {
    auto config = client::EncodeModel(MixedModel(name));
    EXPECT_TRUE(config.ok()) << config.status();
    for (v1::TableConfig& table : *config->mutable_tables()) {
      table.set_storage_dtype(v1::BFLOAT16);
      table.set_update_rounding(v1::STOCHASTIC);
    }
    auto model = client_->DeclareModel(config->DebugString());
    EXPECT_TRUE(model.ok()) << model.status();
    return model.value_or(client::Model());
  };
  const auto plain = [&](const std::string& name, uint64_t rng_seed) {
    const client::Model model = declare(name);
    PlainStep(model, /*seed=*/1, rng_seed);
    return DigestOf(model);
  };
  const std::string seeded = plain("plain", 5);
  EXPECT_EQ(plain("twin", 5), seeded);
  EXPECT_NE(plain("other", 6), seeded);
  EXPECT_NE(plain("without", 0), seeded);

  const client::Model model = declare("program");
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP, "program"));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE, "program"));
  const std::vector<v1::NamedTensor> found = PlainLookup(model.id, 1, nullptr);
  const auto looked_up = api_->Execute(lookup, {Prepare(lookup, Batch(1)).handle()});
  ASSERT_TRUE(looked_up.ok()) << looked_up.status();
  v1::ExecutionConfig config;
  config.set_rng_seed(5);
  const auto updated = api_->Execute(
      update, {looked_up->results(0).handle(), Prepare(update, GradientLiteral(found)).handle()},
      config);
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(DigestOf(model), seeded);
}

TEST_F(ProgramsTest, AProgramOfSomeFeaturesLooksUpThese) {
  ProgramSpec spec = Spec(ProgramSpec::LOOKUP);
  spec.mutable_inputs()->DeleteSubrange(2, 6);
  v1::Literal batch = Batch(3);
  batch.mutable_features()->DeleteSubrange(2, 6);
  std::vector<v1::NamedTensor> expected = PlainLookup(model_.id, 3, nullptr);
  expected.resize(2);
  v1::ExecuteRequest request;
  request.set_program_handle(Compile(spec));
  *request.add_arguments()->mutable_literal() = batch;
  request.mutable_config()->set_return_values(true);
  const auto found = api_->Execute(request);
  ASSERT_TRUE(found.ok()) << found.status();
  ExpectSameTensors(found->results(0).values(), expected);
}

// A program's bounds count positions, whatever the shape of their ids.
TEST_F(ProgramsTest, IdsMayHaveTheShapeOfTheActivation) {
  const auto model = client_->DeclareModel(R"(name: "shaped"
      tables { name: "t" vocabulary_size: 64 embedding_dim: 4 optimizer { sgd {} } }
      features { name: "x" table: "t" output_shape: [5, 3] })");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto batch = [](const std::vector<int64_t>& shape) {
    v1::Literal literal;
    v1::FeatureIds* feature = literal.add_features();
    feature->set_feature("x");
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    std::vector<int64_t> ids(count);
    for (int64_t i = 0; i < count; ++i) ids[i] = i;
    *feature->mutable_dense()->mutable_ids() = MakeTensor(shape, ids);
    return literal;
  };
  ProgramSpec spec;
  spec.set_kind(ProgramSpec::LOOKUP);
  spec.set_model("shaped");
  spec.set_inference(true);
  spec.add_inputs()->set_feature("x");
  spec.mutable_inputs(0)->set_max_samples(12);
  spec.mutable_inputs(0)->set_max_ids(24);
  const uint64_t lookup = Compile(spec);
  const auto found = [&](const std::vector<int64_t>& shape) {
    v1::ExecuteRequest request;
    request.set_program_handle(lookup);
    *request.add_arguments()->mutable_literal() = batch(shape);
    request.mutable_config()->set_return_values(true);
    return api_->Execute(request);
  };
  const std::vector<std::vector<int64_t>> right = {{12}, {4, 3}, {4, 3, 1}, {4, 3, 2}};
  for (const std::vector<int64_t>& shape : right) {
    v1::LookupRequest request;
    request.set_model_id(model->id);
    request.set_inference(true);
    *request.mutable_features() = batch(shape).features();
    // The same, a sample for each position.
    std::vector<int64_t> splits = {0};
    v1::RaggedIds ragged;
    *ragged.mutable_values() = request.features(0).dense().ids();
    const int64_t k = shape.size() == 3 ? shape[2] : 1;
    for (int64_t i = 1; i <= 12; ++i) splits.push_back(i * k);
    ragged.mutable_values()->clear_shape();
    ragged.mutable_values()->add_shape(12 * k);
    *ragged.mutable_row_splits() = MakeVector(splits);
    *request.mutable_features(0)->mutable_ragged() = ragged;
    v1::LookupResponse expected;
    const grpc::Status status =
        Call(&v1::EmbeddingService::Stub::Lookup, api_->api(), request, &expected);
    ASSERT_TRUE(status.ok()) << status.error_message();
    const auto result = found(shape);
    ASSERT_TRUE(result.ok()) << result.status();
    const v1::Tensor& tensor = result->results(0).values(0).tensor();
    EXPECT_EQ(absl::MakeConstSpan(tensor.shape()), (std::vector<int64_t>{4, 3, 4}));
    EXPECT_EQ(tensor.data(), expected.activations(0).activation().data());
  }
  const std::pair<std::vector<int64_t>, std::string> wrong[] = {
      {{3, 4}, "feature 'x'.dense.ids.shape is [3, 4]; it must be [samples], [any, 3] or "},
      {{12, 1}, "feature 'x'.dense.ids.shape is [12, 1]; it must be [samples], [any, 3] or "},
      {{3, 3}, "Expected [12 samples, <=24 ids]; got DENSE [9 samples, 9 ids] unweighted"},
      {{4, 3, 3}, "Expected [12 samples, <=24 ids]; got DENSE [12 samples, 36 ids] unweighted"}};
  for (const auto& [shape, message] : wrong) {
    const absl::Status status = found(shape).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(message));
  }
}

// Update k and lookup k + 1 in one call.
v1::ExecuteChainedRequest TrainingPlan(uint64_t lookup, uint64_t update, uint64_t found,
                                       const v1::Literal& gradients, const v1::Literal& next) {
  v1::ExecuteChainedRequest plan;
  const int batch = AddData(&plan, found);
  const int values = AddLiteral(&plan, gradients);
  AddProgram(&plan, update, {batch, values});
  AddProgram(&plan, lookup, {AddLiteral(&plan, next)}, /*result=*/0);
  plan.mutable_config()->set_return_values(true);
  return plan;
}

TEST_F(ProgramsTest, AChainGivesTheBitsOfItsSteps) {
  const client::Model plain = Declare("plain");
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const double before = Metric("emberd_program_handles");
  v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    v1::ExecuteChainedRequest plan = TrainingPlan(lookup, update, found.handle(),
                                                  GradientLiteral(found.values()), Batch(seed + 1));
    SetKey(seed, plan.mutable_config());
    plan.mutable_config()->set_core_index_in_replica(static_cast<int32_t>(seed));  // says nothing
    const auto ran = api_->Chain(plan);
    ASSERT_TRUE(ran.ok()) << ran.status();
    ASSERT_EQ(ran->updates_size(), 1);
    EXPECT_EQ(ran->updates(0).op_index(), 2);
    EXPECT_FALSE(ran->updates(0).replayed());
    ASSERT_TRUE(api_->Release({}, {found.handle()}).ok());
    found = ran->results(0);
    PlainStep(plain, seed);
    ExpectSameTensors(found.values(), PlainLookup(plain.id, seed + 1, nullptr));
  }
  EXPECT_EQ(DigestOf(model_), DigestOf(plain));
  ASSERT_TRUE(api_->Release({}, {found.handle()}).ok());
  EXPECT_EQ(Metric("emberd_program_handles"), before);
}

TEST_F(ProgramsTest, AChainDonatesArgumentsWhenAllOfItWentWell) {
  ProgramSpec spec;
  spec.set_kind(ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("tuple");
  ElementwiseOutput* output = spec.add_outputs();
  output->set_operation(ElementwiseOutput::ADD);
  output->mutable_a()->set_output_index(1);
  output->mutable_b()->set_output_index(2);
  spec.add_aliases();  // the first tensor
  const uint64_t sum = Compile(spec);
  const uint64_t failing = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  AddTensor("y", MakeVector<float>({3, 4}), &values);
  const uint64_t donated = Prepare(sum, values).handle();
  v1::ExecuteChainedRequest plan;
  const int data = AddData(&plan, donated);
  AddProgram(&plan, sum, {data}, /*result=*/0);
  AddProgram(&plan, sum, {data}, /*result=*/1);  // reads what the first has left
  plan.mutable_config()->set_return_values(true);
  v1::ExecuteChainedRequest wrong = plan;
  v1::Literal other;
  AddTensor("x", MakeVector<float>({1}), &other);
  AddProgram(&wrong, failing, {AddLiteral(&wrong, other), 1});
  const auto now = [&] {
    const auto read = api_->Read(donated);
    EXPECT_TRUE(read.ok()) << read.status();
    return std::vector{Floats(read->values(0).tensor()), Floats(read->values(1).tensor())};
  };
  EXPECT_FALSE(api_->Chain(wrong).ok());
  EXPECT_EQ(now(), (std::vector<std::vector<float>>{{1, 2}, {3, 4}}));
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  EXPECT_EQ(Floats(ran->results(0).values(0).tensor()), (std::vector<float>{4, 6}));
  EXPECT_EQ(Floats(ran->results(1).values(0).tensor()), (std::vector<float>{7, 10}));
  EXPECT_EQ(now(), (std::vector<std::vector<float>>{{7, 10}, {3, 4}}));
}

TEST_F(ProgramsTest, AllThatNamesADonatedHandleReadsItsNewValue) {
  ProgramSpec spec;  // a[0] += b[1], b[1] += a[0]
  spec.set_kind(ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("a");
  spec.add_inputs()->set_feature("b");
  for (int i = 0; i < 2; ++i) {
    ElementwiseOutput* output = spec.add_outputs();
    output->set_operation(ElementwiseOutput::ADD);
    output->mutable_a()->set_output_index(1);
    output->mutable_b()->set_argument(1);
    output->mutable_b()->set_output_index(2);
    v1::ProgramAlias* alias = spec.add_aliases();
    alias->set_output(i);
    alias->set_argument(i);
    alias->set_tensor(i);
  }
  const uint64_t sums = Compile(spec);
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1}), &values);
  AddTensor("y", MakeVector<float>({2}), &values);
  const uint64_t handle = Prepare(sums, values).handle();
  v1::ExecuteChainedRequest plan;
  const int first = AddData(&plan, handle), second = AddData(&plan, handle);
  AddProgram(&plan, sums, {first, second});
  const int third = AddData(&plan, handle);
  AddProgram(&plan, sums, {third, first});
  AddProgram(&plan, sums, {second, second}, /*result=*/0);
  plan.mutable_config()->set_return_values(true);
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  EXPECT_EQ(Floats(ran->results(0).values(0).tensor()), std::vector<float>{12});
  const auto now = api_->Read(handle);
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(Floats(now->values(0).tensor()), std::vector<float>{12});
  EXPECT_EQ(Floats(now->values(1).tensor()), std::vector<float>{12});
}

TEST_F(ProgramsTest, AnAnswerThatIsTooLargeIsRefusedBeforeAnyUpdate) {
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
  v1::Literal values;
  AddTensor("x", MakeVector<float>(std::vector<float>(2'500'000)), &values);
  const uint64_t large = Prepare(sum, values).handle();
  v1::ExecuteChainedRequest plan;
  const int batch = AddData(&plan, found.handle());
  AddProgram(&plan, update, {batch, AddLiteral(&plan, GradientLiteral(found.values()))});
  const int data = AddData(&plan, large);
  const int last = AddProgram(&plan, sum, {data, data});
  for (int i = 0; i < 110; ++i) plan.mutable_ops(last)->add_outputs()->set_result_index(i);
  plan.mutable_config()->set_return_values(true);
  SetKey(1, plan.mutable_config());
  const std::string before = TableDigest();
  const absl::Status refused = api_->Chain(plan).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("budgets.max_message_bytes is 1073741824"));
  EXPECT_EQ(TableDigest(), before);
}

// Would catch: a chain of minutes that goes on, with its memory, though nobody waits for it.
TEST_F(ProgramsTest, AChainWhoseCallerIsGoneEnds) {
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  v1::Literal values;
  AddTensor("x", MakeVector<float>(std::vector<float>(5'000'000)), &values);
  const uint64_t large = Prepare(sum, values).handle();
  const auto kept = client_->GetStatus();
  ASSERT_TRUE(kept.ok()) << kept.status();
  v1::ExecuteChainedRequest plan;
  int last = AddData(&plan, large);
  for (int i = 0; i < 10'000; ++i) last = AddProgram(&plan, sum, {last, last});
  EXPECT_EQ(api_->Chain(plan, absl::Milliseconds(500)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Eventually([&] {
    const auto now = client_->GetStatus();
    return now.ok() && now->batch_bytes == kept->batch_bytes;
  }));
}

TEST_F(ProgramsTest, CallsOfTheClientThatAreWrong) {
  client::Programs& programs = client_->programs();
  const std::string tensor = "batch { tensors { tensor { dtype: INT32 shape: 1 data: '1' } } }";
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"Fly", "method: 'Fly' is not allowed; it must be one of AdminService or ProgramService"},
      {"PrepareBatch", "tensors: the data of a tensor is at place '1'; 1 are given"},
      {"Compile", "request: it is no text proto of its message"}};
  for (const auto& [method, message] : wrong) {
    EXPECT_EQ(programs.Call(method, tensor, {"abcd"}).status(),
              absl::InvalidArgumentError(message));
  }
}

TEST_F(ProgramsTest, AChainThatIsRepeatedUpdatesOnce) {
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
  const v1::Literal gradients = GradientLiteral(found.values());
  v1::ExecuteChainedRequest plan =
      TrainingPlan(lookup, update, found.handle(), gradients, Batch(2));
  SetKey(1, plan.mutable_config());

  // Its last step cannot run: the shapes of the sum differ.
  v1::ExecuteChainedRequest failing = plan;
  v1::Literal other;
  for (int i = 0; i < 8; ++i) AddTensor("x", MakeVector<float>({1}), &other);
  AddProgram(&failing, Compile(SumProgram(ElementwiseOutput::ADD, 1)),
             {4, AddLiteral(&failing, other)}, /*result=*/1);
  const double handles = Metric("emberd_program_handles");
  const absl::Status failed = api_->Chain(failing).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(failed.message(),
            "op 6: outputs[0]: a is FLOAT32[24, 16], b is FLOAT32[1]; they must be equal; updates "
            "that were applied before it: op 2; a repeat with the same execution_instance_key "
            "applies the others, each exactly once");
  EXPECT_EQ(Metric("emberd_program_handles"), handles);
  const std::string once = TableDigest();

  const auto repeated = api_->Chain(plan);
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->updates(0).replayed());
  EXPECT_EQ(TableDigest(), once);

  // Another coordinator has other handles: the batch is looked up again there.
  ProgramApi other_api(cluster_->address(1));
  const uint64_t other_lookup = Compile(Spec(ProgramSpec::LOOKUP), &other_api);
  const uint64_t other_update = Compile(Spec(ProgramSpec::UPDATE), &other_api);
  EXPECT_NE(other_lookup >> 52, lookup >> 52);
  v1::ExecuteChainedRequest there =
      TrainingPlan(other_lookup, other_update, LookUp(&other_api, other_lookup, 1).handle(),
                   gradients, Batch(2));
  SetKey(1, there.mutable_config());
  const auto moved = other_api.Chain(there);
  ASSERT_TRUE(moved.ok()) << moved.status();
  EXPECT_TRUE(moved->updates(0).replayed());
  EXPECT_EQ(TableDigest(), once);
  ExpectSameTensors(moved->results(0).values(),
                    {repeated->results(0).values().begin(), repeated->results(0).values().end()});
}

TEST_F(ProgramsTest, PlansAreCheckedBeforeTheirFirstStep) {
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
  const std::string before = TableDigest();
  // Each begins with an update that would go well.
  const auto refused = [&](auto add) -> std::string {
    v1::ExecuteChainedRequest plan =
        TrainingPlan(lookup, update, found.handle(), GradientLiteral(found.values()), Batch(2));
    add(&plan);
    const absl::Status status = api_->Chain(plan).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  using Plan = v1::ExecuteChainedRequest;
  EXPECT_EQ(refused([&](Plan* plan) {
              AddProgram(plan, sum, {1, 7});
            }),
            "Input index 7 is above the current position: 5");
  EXPECT_EQ(refused([](Plan* plan) { plan->add_ops(); }),
            "Undefined operation kind at post-order position 5");
  EXPECT_EQ(refused([&](Plan* plan) { AddProgram(plan, sum, {1}); }),
            "op 5: Number of inputs does not match executable proto input shapes: 1 vs. 2");
  EXPECT_EQ(refused([&](Plan* plan) { AddProgram(plan, 17, {1}); }),
            "op 5: No executable found for uid 17");
  EXPECT_EQ(refused([](Plan* plan) { AddData(plan, 18); }), "op 5: memory handle not found: 18");
  EXPECT_EQ(refused([&](Plan* plan) {
              AddProgram(plan, update, {0, 1});
            }),
            "op 5: the batch of op 0 is updated by op 2 already; a batch is updated only once");
  EXPECT_EQ(refused([&](Plan* plan) { AddProgram(plan, lookup, {4}); }),
            "op 5: argument[0] of a LOOKUP is not a batch; PrepareBatch makes one");
  EXPECT_EQ(
      refused([](Plan* plan) { plan->mutable_ops(4)->mutable_outputs(0)->set_output_index(9); }),
      "op 4: output_index 9 of op 4; allowed: [0, 8]");
  // What would be left out in silence: the update would be made with other rates than were meant.
  for (const int op : {1, 4}) {
    EXPECT_EQ(refused([op](Plan* plan) {
                plan->mutable_ops(op)->mutable_update()->add_hyperparameters();
              }),
              absl::StrCat("op ", op, ": update.hyperparameters is set; only an UPDATE has any"));
  }
  EXPECT_EQ(refused([](Plan* plan) { plan->mutable_ops(3)->mutable_literal()->add_elements(); }),
            "op 4: a batch of a LOOKUP has features, no tensors or elements");
  EXPECT_EQ(TableDigest(), before);
}

TEST_F(ProgramsTest, RepeatedResultsAndGapsOfAChain) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  v1::ExecuteChainedRequest plan;
  AddLiteral(&plan, values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  AddProgram(&plan, sum, {0, 0}, /*result=*/3);
  AddProgram(&plan, sum, {1, 1}, /*result=*/3);
  const double handles = Metric("emberd_program_handles");
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  ASSERT_EQ(ran->results_size(), 4);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ran->results(i).handle(), 0u);
  EXPECT_EQ(Metric("emberd_program_handles"), handles + 1);
  const auto read = api_->Read(ran->results(3).handle());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Floats(read->values(0).tensor()), (std::vector<float>{4, 8}));
}

TEST_F(ProgramsTest, WhatDoesNotFitIsRefused) {
  ProgramSpec spec = Spec(ProgramSpec::LOOKUP);
  const uint64_t lookup = Compile(spec);
  // More samples than the bound.
  EXPECT_EQ(api_->Prepare(lookup, BatchLiteral(MixedBatch(1, 65))).status().message(),
            "Run-time shape mismatch for argument[0] (user). Expected [<=64 samples]; got DENSE "
            "[65 samples, 65 ids] unweighted");
  // More ids than the buffers hold: room for one of each sample.
  spec.set_max_ids_per_chip_per_sample(1);
  const absl::Status full = api_->Prepare(Compile(spec), BatchLiteral(MixedBatch(1, 64))).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(
      absl::StrContains(full.message(), "whose capacity is 256 (max_ids_per_chip_per_sample 1 x "))
      << full;
  spec.set_allow_id_dropping(true);
  const v1::PrepareBatchResponse dropping = Prepare(Compile(spec), BatchLiteral(MixedBatch(1, 64)));
  int64_t dropped = 0;
  for (const v1::StackStatistics& stack : dropping.statistics().stacks()) {
    dropped += stack.dropped_ids();
    EXPECT_LE(stack.required_buffer_size(), 256);
  }
  EXPECT_GT(dropped, 0);
  // What is known beforehand is refused when it is compiled.
  spec.set_allow_id_dropping(false);
  spec.mutable_inputs(1)->set_max_ids(10000);
  const absl::Status beforehand = api_->Compile(spec).status();
  EXPECT_EQ(beforehand.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(beforehand.message(),
                                "10000 ids together; the capacity of its "
                                "buffer of ids is 256"))
      << beforehand;
  // What was prepared for another program.
  v1::ExecuteRequest request;
  request.set_program_handle(lookup);
  request.add_arguments()->set_handle(dropping.handle());
  request.mutable_config()->set_release_input_handles(true);
  EXPECT_EQ(api_->Execute(request).status().message(),
            "argument[0] is a batch that was prepared for another program; prepare it for this "
            "one");
  EXPECT_TRUE(api_->Read(dropping.handle()).ok());  // a call that fails releases nothing
}

// Under UndefinedBehaviorSanitizer, a product that overflows on the way to zero ends the test.
TEST_F(ProgramsTest, TensorsWithoutElementsMayHaveLongExtents) {
  constexpr int64_t kLong = int64_t{1} << 62;
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  v1::Literal empty, uncounted;
  AddTensor("x", MakeTensor<float>({kLong, 0, kLong}, {}), &empty);
  AddTensor("x", MakeTensor<float>({kLong, kLong, 0}, {}), &uncounted);
  const uint64_t handle = Prepare(sum, empty).handle();
  const auto added = api_->Execute(sum, {handle, handle});
  ASSERT_TRUE(added.ok()) << added.status();
  const auto read = api_->Read(added->results(0).handle());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->values(0).SerializeAsString(), empty.tensors(0).SerializeAsString());
  const absl::Status refused = api_->Prepare(sum, uncounted).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "tensors[0] 'x'.data has 0 bytes; shape ["))
      << refused;
}

TEST_F(ProgramsTest, ALiveModelTakesNewLimits) {
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const client::Model plain = Declare("plain");
  uint64_t sequence = 0;
  for (const int limit : {0, 24, 16}) {
    ProgramSpec spec = Spec(ProgramSpec::LOOKUP);
    const auto unlimited = api_->Compile(spec);
    ASSERT_TRUE(unlimited.ok()) << unlimited.status();
    for (const v1::StackProgram& stack : unlimited->stacks()) {
      v1::ProgramLimits* limits = spec.add_limits();
      limits->set_stack(stack.stack());
      limits->set_max_ids_per_partition(limit);
    }
    const std::string before = TableDigest();
    const uint64_t lookup = Compile(spec);
    EXPECT_EQ(TableDigest(), before);
    const v1::ProgramResult found = LookUp(api_.get(), lookup, ++sequence);
    EXPECT_EQ(found.statistics().stacks(0).limit_ids_per_partition(), limit);
    EXPECT_EQ(found.statistics().num_minibatches() > 1, limit > 0) << limit;
    ExpectSameTensors(found.values(), PlainLookup(plain.id, sequence, nullptr));
    v1::ExecuteRequest request;
    request.set_program_handle(update);
    request.add_arguments()->set_handle(found.handle());
    *request.add_arguments()->mutable_literal() = GradientLiteral(found.values());
    const auto updated = api_->Execute(request);
    ASSERT_TRUE(updated.ok()) << updated.status();
    PlainStep(plain, sequence);
  }
  EXPECT_EQ(DigestOf(model_), DigestOf(plain));
}

TEST_F(ProgramsTest, AProgramOfAPlanThatHasChangedIsRefused) {
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t batch = Prepare(lookup, Batch(1)).handle();
  ASSERT_TRUE(client_->DropModel("mixed").ok());
  client::ModelDescription other = MixedModel("mixed");
  other.seed = 12;
  ASSERT_TRUE(client_->DeclareModel(other).ok());
  const absl::Status refused = api_->Execute(lookup, {batch}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(),
            "the plan of model 'mixed' has changed since the program was compiled; compile it "
            "again");
}

// Would catch: a step that is lost with its handles, which no other coordinator knows.
TEST_F(ProgramsTest, WhatWasLookedUpIsFinishedWhileTheCoordinatorDrains) {
  const client::Model plain = Declare("plain");
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const uint64_t kept = Prepare(lookup, Batch(2)).handle();
  const v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
  PlainStep(plain, 1);
  const auto drain = [&](bool undo) {
    v1::DrainRequest request;
    request.set_undo(undo);
    v1::DrainResponse left;
    const grpc::Status status = Call(&v1::AdminService::Stub::Drain, api_->api(), request, &left);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return left;
  };
  EXPECT_EQ(drain(/*undo=*/false).batches(), 1);

  v1::ExecuteChainedRequest plan;
  const int batch = AddData(&plan, found.handle());
  AddProgram(&plan, update, {batch, AddLiteral(&plan, GradientLiteral(found.values()))});
  v1::ExecuteChainedRequest with_lookup = plan;
  AddProgram(&with_lookup, lookup, {AddData(&with_lookup, kept)}, 0);
  for (const absl::Status& refused :
       {api_->Execute(lookup, {kept}).status(), api_->Chain(with_lookup).status(),
        api_->Prepare(lookup, Batch(2)).status(),
        api_->Compile(Spec(ProgramSpec::LOOKUP)).status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
    EXPECT_THAT(std::string(refused.message()),
                ::testing::HasSubstr("the coordinator is draining"));
  }
  EXPECT_TRUE(api_->Read(kept).ok());
  const auto updated = api_->Chain(plan);
  ASSERT_TRUE(updated.ok()) << updated.status();
  const absl::Status released = api_->Release({lookup, update}, {found.handle(), kept});
  EXPECT_TRUE(released.ok()) << released;
  EXPECT_EQ(drain(/*undo=*/true).batches(), 0);
  EXPECT_EQ(DigestOf(model_), DigestOf(plain));
}

TEST_F(ProgramsTest, MetricsTellHowLongCallsTook) {
  const auto metrics = [&](const std::string& regex) {
    v1::GetMetricsRequest request;
    request.set_regex(regex);
    v1::GetMetricsResponse response;
    const grpc::Status status =
        Call(&v1::AdminService::Stub::GetMetrics, api_->api(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  EXPECT_EQ(metrics("").metrics_size(), 0);
  const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP));
  for (int i = 0; i < 3; ++i) LookUp(api_.get(), lookup, 1);
  EXPECT_FALSE(api_->Release({17}).ok());  // what fails is no sample
  EXPECT_EQ(metrics("").metrics_size(), 2);
  const v1::GetMetricsResponse execute = metrics("exec.*");
  ASSERT_EQ(execute.metrics_size(), 1);
  const v1::SampledMetric& metric = execute.metrics(0);
  EXPECT_EQ(metric.name(), "execute");
  EXPECT_EQ(metric.count(), 3);
  EXPECT_GT(metric.min(), 0);
  ASSERT_EQ(metric.percentiles_size(), 6);
  EXPECT_EQ(metric.percentiles(0).value(), metric.min());
  EXPECT_EQ(metric.percentiles(5).value(), metric.max());
}

}  // namespace programs_test
}  // namespace emberd::testing
