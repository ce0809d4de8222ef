// A cluster whose programs are run, beside plain calls that make the same steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/program_api.h"
#include "tests/testing/training.h"

namespace emberd::testing {

class ProgramsTest : public ClusterFixture {
 protected:
  static constexpr int64_t kSamples = 24;

  void SetUp() override {
    StartCluster({.coordinators = 2, .config = "budgets { batch_bytes: 100000000 }"},
                 MixedModel("mixed"));
    if (HasFatalFailure()) return;
    api_ = std::make_unique<ProgramApi>(cluster_->address());
  }

  uint64_t Compile(const v1::ProgramSpec& spec, ProgramApi* api = nullptr) {
    const auto compiled = (api == nullptr ? api_.get() : api)->Compile(spec);
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return compiled.ok() ? compiled->program_handle() : 0;
  }
  static v1::ProgramSpec Spec(v1::ProgramSpec::Kind kind, const std::string& model = "mixed") {
    return ModelProgram(kind, model, MixedBatch(1, kSamples), 64);
  }
  v1::PrepareBatchResponse Prepare(uint64_t program, const v1::Literal& batch) {
    auto prepared = api_->Prepare(program, batch);
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    return prepared.ok() ? *prepared : v1::PrepareBatchResponse();
  }
  static v1::Literal Batch(uint64_t seed) { return BatchLiteral(MixedBatch(seed, kSamples)); }
  // What EmbeddingService finds.
  std::vector<v1::NamedTensor> PlainLookup(uint64_t model_id, uint64_t seed, uint64_t* handle) {
    v1::LookupRequest request;
    request.set_model_id(model_id);
    *request.mutable_features() = Batch(seed).features();
    request.set_inference(handle == nullptr);
    v1::LookupResponse response;
    const grpc::Status status =
        Call(&v1::EmbeddingService::Stub::Lookup, api_->api(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (handle != nullptr) *handle = response.batch_handle();
    std::vector<v1::NamedTensor> found;
    for (const v1::FeatureActivation& activation : response.activations()) {
      found.emplace_back().set_name(activation.feature());
      *found.back().mutable_tensor() = activation.activation();
    }
    return found;
  }
  void PlainStep(const client::Model& model, uint64_t seed, uint64_t rng_seed = 0) {
    v1::ApplyGradientsRequest request;
    uint64_t handle = 0;
    const v1::Literal gradients = GradientLiteral(PlainLookup(model.id, seed, &handle));
    request.set_model_id(model.id);
    request.set_batch_handle(handle);
    request.mutable_mutation()->set_client_id(absl::StrCat("plain-", model.id));
    request.mutable_mutation()->set_sequence(seed);
    request.set_rng_seed(rng_seed);
    for (const v1::NamedTensor& gradient : gradients.tensors()) {
      v1::FeatureGradient* to = request.add_gradients();
      to->set_feature(gradient.name());
      *to->mutable_gradient() = gradient.tensor();
    }
    v1::ApplyGradientsResponse response;
    const grpc::Status status =
        Call(&v1::EmbeddingService::Stub::ApplyGradients, api_->api(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  template <typename List>
  static void ExpectSameTensors(const List& got, const std::vector<v1::NamedTensor>& expected) {
    ASSERT_EQ(static_cast<size_t>(got.size()), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(got.Get(static_cast<int>(i)).SerializeAsString(), expected[i].SerializeAsString())
          << expected[i].name();
    }
  }
  client::Model Declare(const std::string& name) {
    auto declared = client_->DeclareModel(MixedModel(name));
    EXPECT_TRUE(declared.ok()) << declared.status();
    return declared.value_or(client::Model());
  }
  std::string DigestOf(const client::Model& model) {
    const auto digest = Digest(*client_, model);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or("none");
  }
  double Metric(const std::string& name) {
    return MetricSum(FetchMetrics(cluster_->http_address()), name);
  }
  // The batch of `seed` looked up with its handle, as plans go on from it.
  v1::ProgramResult LookUp(ProgramApi* api, uint64_t program, uint64_t seed) {
    v1::ExecuteRequest request;
    request.set_program_handle(program);
    *request.add_arguments()->mutable_literal() = Batch(seed);
    request.mutable_config()->set_return_values(true);
    const auto found = api->Execute(request);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->results(0) : v1::ProgramResult();
  }
  static void SetKey(uint64_t sequence, v1::ExecutionConfig* config) {
    config->mutable_execution_instance_key()->set_client_id("trainer");
    config->mutable_execution_instance_key()->set_sequence(sequence);
  }

  std::unique_ptr<ProgramApi> api_;
};

}  // namespace emberd::testing
