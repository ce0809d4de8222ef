// The cases that TensorFlow's runtime for TPUs (XRT) tests its compiled programs, handles and plans
// with, through ProgramService: the same numbers come out.
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/testing/paths.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/program_api.h"

namespace emberd::testing {
namespace golden_programs_test {

using nlohmann::json;
using v1::ElementwiseOutput;

void Flatten(const json& from, std::vector<float>* values, std::vector<int64_t>* shape,
             size_t depth = 0) {
  if (!from.is_array()) {
    values->push_back(from.get<float>());
    return;
  }
  if (shape->size() == depth) shape->push_back(static_cast<int64_t>(from.size()));
  for (const json& element : from) Flatten(element, values, shape, depth + 1);
}

v1::Tensor TensorOf(const json& from) {
  std::vector<float> values;
  std::vector<int64_t> shape;
  Flatten(from, &values, &shape);
  return MakeTensor(shape, values);
}

v1::Literal TupleOf(const std::vector<json>& tensors) {
  v1::Literal literal;
  for (const json& tensor : tensors) AddTensor("", TensorOf(tensor), &literal);
  return literal;
}

template <typename T>
std::vector<T> ValuesOf(const v1::Tensor& tensor) {
  std::vector<T> values(tensor.data().size() / sizeof(T));
  std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(T));
  return values;
}

class GoldenProgramsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto cluster = Cluster::Start({.shards = 1, .embedded = true});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = cluster->release();
    std::ifstream file(SourcePath("tests/golden/tf/14_xrt_object_model.json"));
    const json golden = json::parse(file);
    for (const json& one : golden.at("cases")) cases_[one.at("name")] = one;
    ASSERT_EQ(cases_.size(), 15u);
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(cluster_, nullptr); }

  uint64_t Compile(const v1::ProgramSpec& spec) {
    const auto compiled = api_->Compile(spec);
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return compiled.ok() ? compiled->program_handle() : 0;
  }
  uint64_t Put(const std::vector<json>& tensors) {
    const auto put =
        api_->Prepare(Compile(SumProgram(ElementwiseOutput::ADD, 1)), TupleOf(tensors));
    EXPECT_TRUE(put.ok()) << put.status();
    return put.ok() ? put->handle() : 0;
  }
  // One handle.
  uint64_t Run(uint64_t program, const std::vector<uint64_t>& arguments) {
    const auto ran = api_->Execute(program, arguments);
    EXPECT_TRUE(ran.ok()) << ran.status();
    if (!ran.ok() || ran->results_size() != 1) return 0;
    return ran->results(0).handle();
  }
  void ExpectTensor(const json& expected, const v1::Tensor& got) {
    const v1::Tensor want = TensorOf(expected);
    EXPECT_EQ(absl::MakeConstSpan(want.shape()), absl::MakeConstSpan(got.shape()));
    const std::vector<float> a = Floats(want), b = Floats(got);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-6 * std::abs(a[i]));
  }
  void ExpectHolds(uint64_t handle, const std::vector<json>& expected, int output_index = 0) {
    const auto read = api_->Read(handle, output_index);
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(read->values_size(), static_cast<int>(expected.size()));
    for (size_t i = 0; i < expected.size(); ++i) {
      ExpectTensor(expected[i], read->values(static_cast<int>(i)).tensor());
    }
  }
  // Adds an output to a program of one argument or two.
  static ElementwiseOutput* AddOutput(v1::ProgramSpec* spec, ElementwiseOutput::Operation operation,
                                      v1::Operand a = {}, v1::Operand b = {}) {
    ElementwiseOutput* output = spec->add_outputs();
    output->set_operation(operation);
    *output->mutable_a() = a;
    *output->mutable_b() = b;
    return output;
  }
  static v1::Operand At(int argument, int output_index = 0) {
    v1::Operand operand;
    operand.set_argument(argument);
    operand.set_output_index(output_index);
    return operand;
  }

  static Cluster* cluster_;
  static std::map<std::string, json> cases_;
  const std::unique_ptr<ProgramApi> api_ = std::make_unique<ProgramApi>(cluster_->address());
};
Cluster* GoldenProgramsTest::cluster_ = nullptr;
std::map<std::string, json> GoldenProgramsTest::cases_;

TEST_F(GoldenProgramsTest, CompileAndExecute) {
  const json& one = cases_["CompileAndExecute"];
  const uint64_t add = Compile(SumProgram(ElementwiseOutput::ADD, 3));
  ExpectHolds(Run(add, {Put({one["p0"]}), Put({one["p1"]})}), {one["expected"]});
}

TEST_F(GoldenProgramsTest, ExecuteChained) {
  const json& one = cases_["ExecuteChained"];
  const std::map<std::string, uint64_t> programs = {
      {"add_scale", Compile(SumProgram(ElementwiseOutput::ADD, 3))},
      {"sub_scale", Compile(SumProgram(ElementwiseOutput::SUBTRACT, 11))}};
  v1::ExecuteChainedRequest plan;
  for (const json& op : one["plan"]) {
    if (op["op"] == "data") {
      AddData(&plan, Put({one[op["ref"].get<std::string>()]}));
      continue;
    }
    AddProgram(&plan, programs.at(op["op"]), op["inputs"].get<std::vector<int>>());
    if (!op.contains("outputs")) continue;
    for (const json& output : op["outputs"]) {
      v1::ChainedOutput* added = plan.mutable_ops(plan.ops_size() - 1)->add_outputs();
      added->set_output_index(output["output_index"]);
      added->set_result_index(output["result_index"]);
    }
  }
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  ASSERT_EQ(ran->results_size(), 1);
  ExpectHolds(ran->results(0).handle(), {one["expected_results"][0]});
}

TEST_F(GoldenProgramsTest, ExecuteChainedOpByOp) {
  const json& numbers = cases_["ExecuteChained"];
  const uint64_t a = Put({numbers["p0"]}), b = Put({numbers["p1"]});
  const uint64_t add = Compile(SumProgram(ElementwiseOutput::ADD, 3));
  const uint64_t subtract = Compile(SumProgram(ElementwiseOutput::SUBTRACT, 11));
  const uint64_t last = Run(add, {Run(add, {a, b}), Run(subtract, {a, b})});
  ExpectHolds(last, {cases_["ExecuteChainedOpByOp"]["expected"]});
  ExpectHolds(a, {numbers["p0"]});  // inputs were not released
}

TEST_F(GoldenProgramsTest, CompileAndExecuteReturnTuple) {
  const json& one = cases_["CompileAndExecuteReturnTuple"];
  const uint64_t add = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  ExpectHolds(Run(add, {Put({one["p0"]}), Put({one["p1"]})}), {one["expected"][0]}, 1);
}

TEST_F(GoldenProgramsTest, CompileAndExecuteReturnExplodedTuple) {
  const json& one = cases_["CompileAndExecuteReturnExplodedTuple"];
  v1::ProgramSpec spec = SumProgram(ElementwiseOutput::ADD, 1);
  AddOutput(&spec, ElementwiseOutput::SUBTRACT, At(0), At(1));
  v1::ExecutionConfig config;
  config.set_return_exploded(one["return_exploded_tuple"]);
  const auto ran = api_->Execute(Compile(spec), {Put({one["p0"]}), Put({one["p1"]})}, config);
  ASSERT_TRUE(ran.ok()) << ran.status();
  ASSERT_EQ(ran->results_size(), one["expected_num_handles"]);
  for (int i = 0; i < 2; ++i) ExpectHolds(ran->results(i).handle(), {one["expected"][i]});
}

TEST_F(GoldenProgramsTest, CompileAndExecuteWithReusedBuffers) {
  const json& one = cases_["CompileAndExecuteWithReusedBuffers"];
  v1::ProgramSpec spec;
  spec.set_kind(v1::ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("tuple");
  AddOutput(&spec, ElementwiseOutput::ADD, At(0, 1), At(0, 2));
  AddOutput(&spec, ElementwiseOutput::SUBTRACT, At(0, 1), At(0, 2));
  AddOutput(&spec, ElementwiseOutput::COPY, At(0, 1));
  AddOutput(&spec, ElementwiseOutput::COPY, At(0, 2));
  for (int output = 0; output < 2; ++output) {
    v1::ProgramAlias* alias = spec.add_aliases();
    alias->set_output(output);
    alias->set_tensor(1 - output);
  }
  const json& input = one["input_tuple"];
  const uint64_t handle = Put({input[0], input[1]});
  const uint64_t result = Run(Compile(spec), {handle});
  ExpectHolds(result, {one["expected_result_parts_2_3"][0]}, 3);
  ExpectHolds(result, {one["expected_result_parts_2_3"][1]}, 4);
  const json& after = one["expected_input_handle_after"];
  ExpectHolds(handle, {after[0], after[1]});
}

TEST_F(GoldenProgramsTest, CompileAndExecuteWithS64Argument) {
  const json& one = cases_["CompileAndExecuteWithS64Argument"];
  v1::ExecuteRequest request;
  request.set_program_handle(Compile(SumProgram(ElementwiseOutput::ADD, 1)));
  for (const char* name : {"p0", "p1"}) {
    AddTensor(name, MakeTensor<int64_t>({}, {one[name].get<int64_t>()}),
              request.add_arguments()->mutable_literal());
  }
  const auto ran = api_->Execute(request);
  ASSERT_TRUE(ran.ok()) << ran.status();
  const auto read = api_->Read(ran->results(0).handle());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->values(0).tensor().data(),
            MakeTensor<int64_t>({}, {one["expected"].get<int64_t>()}).data());
}

TEST_F(GoldenProgramsTest, ResultsHaveTheirRealSizes) {
  for (const char* name : {"DynamicR1Test", "DynamicR2Test", "DynamicR1TupleTest"}) {
    const json& one = cases_[name];
    v1::ProgramSpec spec = SumProgram(ElementwiseOutput::ADD, 1);
    spec.add_inputs()->set_feature("n");
    *spec.mutable_outputs(0)->mutable_size() = At(2);
    const bool tuple = one["expected"].size() == 3;
    if (tuple) {
      AddOutput(&spec, ElementwiseOutput::ADD, At(0), At(1));
      ElementwiseOutput* last = AddOutput(&spec, ElementwiseOutput::SUBTRACT, At(0), At(1));
      *last->mutable_size() = At(2);
      last->set_size_offset(1);
    }
    v1::ExecuteRequest request;
    request.set_program_handle(Compile(spec));
    *request.add_arguments()->mutable_literal() = TupleOf({one["p0"]});
    *request.add_arguments()->mutable_literal() = TupleOf({one["p1"]});
    AddTensor("n", MakeTensor<int32_t>({}, {one["n"].get<int32_t>()}),
              request.add_arguments()->mutable_literal());
    const auto ran = api_->Execute(request);
    ASSERT_TRUE(ran.ok()) << name << ": " << ran.status();
    std::vector<json> expected = {one["expected"]};
    if (tuple) expected = one["expected"].get<std::vector<json>>();
    ExpectHolds(ran->results(0).handle(), expected);
  }
}

TEST_F(GoldenProgramsTest, DynamicArgumentsTakeWhateverFitsTheirBound) {
  for (const char* name : {"AcceptDynamicR1Test", "AcceptDynamicR2Test"}) {
    const json& one = cases_[name];
    v1::ProgramSpec spec = SumProgram(ElementwiseOutput::ADD, 1);
    std::vector<uint64_t> arguments = {Put({one["p0"]})};
    if (one.contains("p1")) {
      arguments.push_back(Put({one["p1"]}));
    } else {
      spec.mutable_inputs()->RemoveLast();
      spec.clear_outputs();
      AddOutput(&spec, ElementwiseOutput::COPY, At(0))->set_scale(-1);
    }
    for (v1::ProgramInput& input : *spec.mutable_inputs()) {
      v1::TensorBound* bound = input.add_tensors();
      bound->set_dtype(v1::FLOAT32);
      for (const json& extent : one["param_bound"]) bound->add_shape(extent);
      input.set_dynamic(true);
    }
    ExpectHolds(Run(Compile(spec), arguments), {one["expected"]});

    // Without it, only their own shape.
    for (v1::ProgramInput& input : *spec.mutable_inputs()) input.set_dynamic(false);
    const auto refused = api_->Execute(Compile(spec), arguments);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused.status().message().find(
                  "Run-time shape mismatch for argument[0] (a). Expected (FLOAT32["),
              0u)
        << refused.status();
  }
}

// A batch that was prepared, in the arrays of TensorFlow.
TEST_F(GoldenProgramsTest, CsrOfABatch) {
  std::ifstream file(SourcePath("tests/golden/tf/91_derived_minibatch.json"));
  const json golden = json::parse(file);
  json one;
  for (const json& c : golden.at("cases")) {
    if (c.at("name") == "unique_limit_only") one = c;  // of 1 chip with 2 SparseCores, as here
  }
  const auto client = cluster_->Connect();
  const auto model =
      client->DeclareModel(R"(name: "csr" plan { rules: TENSORFLOW } optimizer { sgd {} }
      tables { name: "t" vocabulary_size: 256 embedding_dim: 8 combiner: SUM max_ids_per_partition: 64
               max_unique_ids_per_partition: 5 }
      features { name: "f" table: "t" batch_size: 8 })");
  ASSERT_TRUE(model.ok()) << model.status();
  v1::ProgramSpec spec;
  spec.set_kind(v1::ProgramSpec::LOOKUP);
  spec.set_model("csr");
  OwnedIds ids;
  ids.feature = "f";
  one.at("col_ids").get_to(ids.wide);
  ids.samples = 8;
  for (const json& row : one.at("row_ids")) {
    ids.indices.insert(ids.indices.end(), {row.get<int64_t>(), 0});
  }
  const auto batch = api_->Prepare(Compile(spec), BatchLiteral({ids}));
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(api_->Read(batch->handle())->values_size(), 0);
  const auto read = api_->Read(batch->handle(), 0, /*csr=*/true);
  ASSERT_TRUE(read.ok()) << read.status();
  json found;
  for (const v1::NamedTensor& array : read->values()) {
    const v1::Tensor& tensor = array.tensor();
    if (tensor.dtype() == v1::INT32) found[array.name()] = ValuesOf<int32_t>(tensor);
    if (tensor.dtype() == v1::INT64) found[array.name()] = ValuesOf<int64_t>(tensor);
    if (tensor.dtype() == v1::FLOAT32) found[array.name()] = ValuesOf<float>(tensor);
  }
  const json& csr = one.at("expected_csr");
  EXPECT_EQ(found, (json{{"splits", json::array({one.at("expected_splits").at("splits")})},
                         {"t/row_pointers", csr.at("row_pointers")},
                         {"t/sorted_sample_ids", csr.at("sorted_sample_ids")},
                         {"t/sorted_token_ids", csr.at("sorted_token_ids")},
                         {"t/sorted_gains", csr.at("sorted_gains")}}));
  EXPECT_EQ(read->statistics().num_minibatches(), csr.at("num_minibatches_per_sc").get<int>());
  EXPECT_EQ(read->values(4).tensor().shape_size(), 0);

  const uint64_t tuple = Put({json::array({1, 2})});
  const absl::Status refused = api_->Read(tuple, 0, /*csr=*/true).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(),
            absl::StrCat("csr: handle ", tuple, " is no batch that was prepared"));
}

TEST_F(GoldenProgramsTest, AllocAndClearAll) {
  const uint64_t handle = Put({json::array({1, 2})});
  ASSERT_TRUE(api_->ReleaseAll().ok());
  const absl::Status gone = api_->Read(handle).status();
  EXPECT_EQ(absl::StatusCodeToString(gone.code()),
            cases_["AllocAndClearAll"]["expected_code"].get<std::string>());
  EXPECT_EQ(gone.message(), absl::StrCat("memory handle not found: ", handle));
}

TEST_F(GoldenProgramsTest, ReleaseCompilationHandleVector) {
  const uint64_t a = Compile(SumProgram(ElementwiseOutput::ADD, 101));
  const uint64_t b = Compile(SumProgram(ElementwiseOutput::ADD, 102));
  EXPECT_TRUE(api_->Release({a, b}).ok());
  const absl::Status again = api_->Release({a, b});
  EXPECT_EQ(again.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(again.message(), absl::StrCat("No cache entry found for uid ", a));
}

TEST_F(GoldenProgramsTest, SubBuffer) {
  const std::vector<json> parts = {json::array({1, 2}), json::array({5, 9, 3})};
  v1::ExecuteChainedRequest plan;
  v1::ChainedOp* data = plan.add_ops();
  data->set_data_handle(Put(parts));
  for (int k = 0; k <= 2; ++k) {
    v1::ChainedOutput* output = data->add_outputs();
    output->set_output_index(k);
    output->set_result_index(k);
  }
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  ASSERT_EQ(ran->results_size(), 3);
  // What was taken out of it outlives the whole.
  ASSERT_TRUE(api_->Release({}, {ran->results(0).handle(), plan.ops(0).data_handle()}).ok());
  for (int k = 0; k < 2; ++k) ExpectHolds(ran->results(k + 1).handle(), {parts[k]});
}

}  // namespace golden_programs_test
}  // namespace emberd::testing
