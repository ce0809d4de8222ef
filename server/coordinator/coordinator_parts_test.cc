// The pieces of a coordinator that are pure functions: decoding requests, folding partial sums,
// laying out gradients.
#include <cmath>
#include <cstring>
#include <limits>

#include <gmock/gmock.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>

#include "base/regions.h"
#include "base/steady_time.h"
#include "base/testing/await.h"
#include "base/testing/region_ends.h"
#include "config/config.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/testing_shard.h"
#include "server/step/activations.h"
#include "server/step/gradients.h"
#include "server/step/request_reader.h"
#include "server/step/shard_set.h"
#include "server/step/step.h"

namespace emberd::coordinator {
namespace coordinator_parts_test {

using testing::HasSubstr;

constexpr char kModel[] = R"(
  name: "m"
  tables { name: "a" vocabulary_size: 40 embedding_dim: 3 combiner: SUM optimizer { sgd {} } }
  tables { name: "b" vocabulary_size: 40 embedding_dim: 8 combiner: SUM optimizer { sgd {} } }
  features { name: "fa" table: "a" } features { name: "fb" table: "b" } features { name: "fc" table: "b" })";

class CoordinatorPartsTest : public testing::Test {
 protected:
  std::shared_ptr<const step::ServedModel> Model(const char* text, int shards) {
    auto model =
        step::MakeServedModel(*config::ParseModel(text),
                              {.shards = shards, .sparsecores_per_shard = 1}, nullptr, &metrics_);
    EXPECT_TRUE(model.ok()) << model.status();
    return *model;
  }

  static v1::Tensor Ints(std::vector<int64_t> shape, std::vector<int64_t> values) {
    v1::Tensor tensor;
    tensor.set_dtype(v1::INT64);
    for (const int64_t extent : shape) tensor.add_shape(extent);
    tensor.set_data(values.data(), values.size() * sizeof(int64_t));
    return tensor;
  }
  static v1::LookupRequest GoodRequest() {
    v1::LookupRequest request;
    for (const char* name : {"fc", "fa", "fb"}) {
      v1::FeatureIds* feature = request.add_features();
      feature->set_feature(name);
      *feature->mutable_dense()->mutable_ids() = Ints({2}, {0, 1});
    }
    return request;
  }
  std::string Refusal(const v1::LookupRequest& request,
                      absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    const auto status = step::DecodeLookup(request, *Model(kModel, 2), 1000).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  static absl::StatusOr<step::GradientInput> Read(
      const v1::ApplyGradientsRequest& request,
      const std::shared_ptr<const step::KeptBatch>& batch) {
    return step::ReadGradients(request, *batch);
  }

  ops::Metrics metrics_{"test"};
};

TEST_F(CoordinatorPartsTest, DecodesFeaturesInAnyOrder) {
  auto model = Model(kModel, 2);
  const v1::LookupRequest request = GoodRequest();
  auto input = step::DecodeLookup(request, *model, 1000);
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ(input->order, (std::vector<int>{2, 0, 1}));
  EXPECT_EQ(std::get<preprocess::DenseInput>(input->features[0].ids).sample_count, 2);
}

TEST_F(CoordinatorPartsTest, RefusesWrongFeatures) {
  v1::LookupRequest request = GoodRequest();
  request.mutable_features(1)->set_feature("nobody");
  EXPECT_EQ(
      Refusal(request),
      "features[1].feature is 'nobody', which model 'm' does not have; known features: fa, fb, "
      "fc");
  request.mutable_features(1)->set_feature("fc");
  EXPECT_EQ(Refusal(request), "features[1].feature 'fc' is repeated");
  request = GoodRequest();
  request.mutable_features()->RemoveLast();
  EXPECT_EQ(Refusal(request), "features: 'fb' is missing; every feature must be given once");
  request = GoodRequest();
  request.mutable_features(0)->clear_ids();
  EXPECT_EQ(Refusal(request), "feature 'fc'.ids is not set; it must be dense, sparse or ragged");
  request = GoodRequest();
  request.set_activation_dtype(v1::INT64);
  EXPECT_THAT(Refusal(request), HasSubstr("activation_dtype"));
}

TEST_F(CoordinatorPartsTest, RefusesActivationsOverTheBudgetBeforeMakingThem) {
  v1::LookupRequest request = GoodRequest();
  v1::SparseIds* sparse = request.mutable_features(1)->mutable_sparse();
  *sparse->mutable_indices() = Ints({0, 2}, {});
  *sparse->mutable_values() = Ints({0}, {});
  sparse->set_sample_count(std::numeric_limits<int64_t>::max());
  EXPECT_THAT(Refusal(request, absl::StatusCode::kResourceExhausted),
              HasSubstr("budgets.max_message_bytes = 1000"));
}

// The order of the additions is a promise: (s0 + s1) + (s2 + s3), with absent shards left out.
TEST_F(CoordinatorPartsTest, FoldsShardsByABalancedTree) {
  auto model = Model(
      R"(name: "m" tables { name: "b" vocabulary_size: 64 embedding_dim: 8 combiner: SUM optimizer { sgd {} } }
                        features { name: "f" table: "b" })",
      4);
  const std::vector<int64_t> ids = {0, 1, 2};
  preprocess::FeatureInput input;
  input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 3};
  auto batch = model->preprocessor->Run({input});
  ASSERT_TRUE(batch.ok());

  // Chosen so that every other order of additions gives another result.
  const float parts[4] = {1e8f, 1.0f, -1e8f, 3.0f};
  const std::vector<int32_t> all = {0, 2};
  const std::vector<int32_t> some = {2};
  std::vector<std::vector<float>> sums;
  std::vector<host::GatherResult> results(4);
  for (int shard = 0; shard < 4; ++shard) sums.emplace_back((shard == 3 ? 1 : 2) * 8, parts[shard]);
  for (int shard = 0; shard < 4; ++shard) {
    results[shard].stacks.push_back({0, shard == 3 ? some : all, sums[shard], 0});
    ASSERT_TRUE(step::CheckGatherResult(results[shard], *model, **batch, v1::FLOAT32).ok());
  }
  const auto output = step::TakeOutput(*model, (*batch)->feature_samples(), v1::FLOAT32);
  const step::Activations activations = step::ActivationsIn(*output, *model, **batch, v1::FLOAT32);
  step::CombineActivations(results, *model, **batch, v1::FLOAT32, *output, {0});
  const auto* values = reinterpret_cast<const float*>(activations.features[0].bytes.data());
  EXPECT_EQ(values[0], (1e8f + 1.0f) + -1e8f);
  EXPECT_EQ(values[8], 0.0f) << "a sample that no shard has";
  EXPECT_EQ(values[16], (1e8f + 1.0f) + (-1e8f + 3.0f));
}

TEST_F(CoordinatorPartsTest, RefusesSumsThatDoNotFitTheBatch) {
  auto model = Model(kModel, 1);
  const std::vector<int64_t> ids = {0, 1};
  std::vector<preprocess::FeatureInput> inputs(3);
  for (auto& input : inputs) input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 2};
  auto batch = model->preprocessor->Run(inputs);
  ASSERT_TRUE(batch.ok());
  const std::vector<float> zeros(64);
  for (const std::vector<int32_t>& samples :
       {std::vector<int32_t>{1, 0}, std::vector<int32_t>{0, 0}, std::vector<int32_t>{-1},
        std::vector<int32_t>{99}}) {
    host::GatherResult result;
    result.stacks.push_back({0, samples, absl::MakeConstSpan(zeros).first(samples.size() * 8), 0});
    while (result.stacks.size() < model->plan.stacks.size()) {
      result.stacks.push_back({static_cast<int>(result.stacks.size()), {}, {}, 0});
    }
    EXPECT_EQ(step::CheckGatherResult(result, *model, **batch, v1::FLOAT32).code(),
              absl::StatusCode::kInternal);
  }
}

TEST_F(CoordinatorPartsTest, LaysOutGradientsForTheSamplesOfAShard) {
  auto batch = std::make_shared<step::KeptBatch>();
  batch->model = Model(kModel, 2);
  batch->feature_samples = {2, 2, 2};
  const auto& plan = batch->model->plan;
  batch->feature_sample_begin.resize(3);
  for (const auto& stack : plan.stacks) {
    int64_t next = 0;
    for (const auto& feature : stack.features) {
      batch->feature_sample_begin[feature.feature] = next;
      next += 2;
    }
  }
  const int stack_of_a = plan.feature_at[0].stack;
  const auto first_of_a = static_cast<int32_t>(batch->feature_sample_begin[0]);
  step::KeptShard& shard = batch->shards.emplace_back();
  shard.samples.resize(plan.stacks.size());
  shard.samples[stack_of_a] = {first_of_a + 1};

  v1::ApplyGradientsRequest request;
  v1::FeatureGradient* gradient = request.add_gradients();
  gradient->set_feature("fa");
  gradient->mutable_gradient()->set_dtype(v1::FLOAT32);
  gradient->mutable_gradient()->add_shape(2);
  gradient->mutable_gradient()->add_shape(3);
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  gradient->mutable_gradient()->set_data(values.data(), values.size() * sizeof(float));
  auto input = Read(request, batch);
  ASSERT_TRUE(input.ok()) << input.status();
  const shard::ApplyInput apply = step::GradientsForShard(*input, *batch, 0, /*in_place=*/false);
  EXPECT_THAT(apply.stacks[stack_of_a].gradients, testing::ElementsAre(4, 5, 6, 0, 0, 0, 0, 0));

  request.mutable_gradients(0)->mutable_gradient()->set_shape(1, 2);
  EXPECT_THAT(std::string(Read(request, batch).status().message()),
              HasSubstr("gradient of feature 'fa'.shape is [2, 2]; it must be [2, 3]"));
}

// What is wrong in several parts is told as if they were one request.
TEST_F(CoordinatorPartsTest, PartsAreReadAsOneRequest) {
  const auto batch = std::make_shared<step::KeptBatch>();
  batch->model = Model(kModel, 1);
  batch->feature_samples = {1, 1, 1};
  batch->feature_sample_begin = {0, 0, 1};
  const auto part = [](const std::string& feature, float value) {
    v1::ApplyGradientsRequest request;
    v1::FeatureGradient* gradient = request.add_gradients();
    gradient->set_feature(feature);
    gradient->mutable_gradient()->set_dtype(v1::FLOAT32);
    gradient->mutable_gradient()->add_shape(1);
    gradient->mutable_gradient()->add_shape(8);
    const std::vector<float> values(8, value);
    gradient->mutable_gradient()->set_data(values.data(), 8 * sizeof(float));
    return request;
  };
  const auto first = part("fb", 1), bad = part("fc", std::nanf("")), unknown = part("fd", 1);
  const auto refusal = [&](const std::vector<const v1::ApplyGradientsRequest*>& parts) {
    v1::ApplyGradientsRequest request;
    for (const auto* of : parts) request.MergeFrom(*of);
    return std::string(Read(request, batch).status().message());
  };
  EXPECT_EQ(refusal({&first}), "");
  EXPECT_EQ(refusal({&first, &first}), "gradients[1].feature 'fb' is repeated");
  EXPECT_THAT(refusal({&first, &unknown, &bad}), HasSubstr("gradients[1].feature is 'fd'"));
  EXPECT_THAT(refusal({&first, &bad, &unknown}), HasSubstr("'fc' is nan at sample 0, column 0"));
  v1::ApplyGradientsRequest rate, again;
  (*rate.add_hyperparameters()->mutable_values())["learning_rate"] = 1;
  (*again.add_hyperparameters()->mutable_values())["learning_rate"] = 2;
  EXPECT_EQ(refusal({&rate, &first}), "");
  EXPECT_THAT(refusal({&rate, &first, &again}), HasSubstr("hyperparameters[1].values"));
}

// A gradient of fb or fc that lies at the beginning of a region.
v1::ApplyGradientsRequest SharedPart(const std::string& feature, uint64_t region) {
  v1::ApplyGradientsRequest request;
  v1::FeatureGradient* const gradient = request.add_gradients();
  gradient->set_feature(feature);
  gradient->mutable_gradient()->set_dtype(v1::FLOAT32);
  gradient->mutable_gradient()->add_shape(1);
  gradient->mutable_gradient()->add_shape(8);
  gradient->mutable_shared()->set_region(region);
  gradient->mutable_shared()->set_size(8 * sizeof(float));
  return request;
}

// What an update has named stays mapped, whatever its client does.
TEST_F(CoordinatorPartsTest, ARegionStaysMappedAsLongAsItsGradientsAreUsed) {
  const auto regions = region_ends::StartServer(0, {.max_lent_by_peer = 8});
  const auto peer = region_ends::ConnectTo(*regions);
  const auto region = *SharedRegion::Create("emberd-test", 4096);
  const auto batch = std::make_shared<step::KeptBatch>();
  batch->model = Model(kModel, 1);
  batch->feature_samples = {1, 1, 1};
  batch->feature_sample_begin = {0, 0, 1};
  reinterpret_cast<float*>(region->data())[0] = 5;
  ASSERT_TRUE(peer->LendRegion(7, *region));
  v1::ApplyGradientsRequest request = SharedPart("fb", 7);
  request.MergeFrom(SharedPart("fc", 7));
  const auto input = step::ReadGradients(request, *batch, &regions->regions);
  ASSERT_TRUE(input.ok()) << input.status();
  peer->TakeBack(7);
  ASSERT_TRUE(Eventually([&] { return regions->regions.regions() == 0; }));
  for (const int feature : {1, 2}) {
    float found = 0;
    std::memcpy(&found, input->features[feature].data, sizeof(found));
    EXPECT_EQ(found, 5) << feature;
  }
}

// The hyper-parameters of a step are checked together, whatever order they are given in; an error
// names what was sent.
TEST_F(CoordinatorPartsTest, DecodesHyperparametersAsAWhole) {
  const auto batch = std::make_shared<step::KeptBatch>();
  batch->model = Model(R"(
    name: "m"
    tables { name: "a" vocabulary_size: 40 embedding_dim: 8 combiner: SUM
             optimizer { clip_gradient_min: -1 clip_gradient_max: 1 adam {} } }
    features { name: "fa" table: "a" })",
                       1);
  using Values = std::vector<std::pair<std::string, double>>;
  // Each in a StepHyperparameters of its own if `split`, else all in one.
  const auto decode = [&batch](const Values& values, bool split) {
    v1::ApplyGradientsRequest request;
    for (const auto& [name, value] : values) {
      if (split || request.hyperparameters_size() == 0) request.add_hyperparameters();
      auto* last = request.mutable_hyperparameters(request.hyperparameters_size() - 1);
      (*last->mutable_values())[name] = value;
    }
    return Read(request, batch);
  };
  for (const double shift : {10, -10}) {
    for (const auto& [first, second] : {std::pair("min", "max"), std::pair("max", "min")}) {
      for (const bool split : {false, true}) {
        const auto bound = [shift = shift](const std::string& end) {
          return std::pair("clip_gradient_" + end, shift + (end == "min" ? -1 : 1));
        };
        const auto input = decode({bound(first), bound(second)}, split);
        ASSERT_TRUE(input.ok()) << input.status();
        EXPECT_THAT(input->hyperparameters[0],
                    testing::UnorderedElementsAre(bound("min"), bound("max")));
      }
    }
  }
  const std::tuple<Values, bool, const char*> refused[] = {
      {{{"clip_gradient_max", 3}, {"clip_gradient_min", 4}},
       false,
       "clip_gradient_min: 4 is not allowed; it must be <= clip_gradient_max = 3"},
      {{{"clip_gradient_min", 2}},
       false,
       "clip_gradient_min: 2 is not allowed; it must be <= clip_gradient_max = 1"},
      {{{"learning_rate", -2}, {"epsilon", -3}},
       false,
       "hyperparameters[0].values: epsilon: -3 is not allowed"},
      {{{"beta1", 0.3}, {"beta1", 0.1 + 0.2}},
       true,
       "hyperparameters[1].values['beta1'] is 0.30000000000000004 for table '', but 0.3 for"},
  };
  for (const auto& [values, split, message] : refused) {
    EXPECT_THAT(std::string(decode(values, split).status().message()), HasSubstr(message));
  }
}

// A value that is given for one table of a stack would change the others, too, in silence.
TEST_F(CoordinatorPartsTest, HyperparametersAreGivenForAllTablesOfAStack) {
  const auto batch = std::make_shared<step::KeptBatch>();
  batch->model = Model(R"(
    name: "m"
    tables { name: "a" vocabulary_size: 40 embedding_dim: 8 combiner: SUM }
    tables { name: "b" vocabulary_size: 40 embedding_dim: 8 combiner: SUM }
    tables { name: "alone" vocabulary_size: 40 embedding_dim: 24 combiner: SUM }
    features { name: "fa" table: "a" } features { name: "fb" table: "b" }
    features { name: "fc" table: "alone" })",
                       1);
  const auto decode = [&batch](const std::vector<std::string>& tables) {
    v1::ApplyGradientsRequest request;
    for (const std::string& table : tables) {
      v1::StepHyperparameters* step = request.add_hyperparameters();
      step->set_table(table);
      (*step->mutable_values())["learning_rate"] = 0.5;
    }
    return Read(request, batch).status();
  };
  const std::vector<std::string> allowed[] = {
      {""}, {"alone"}, {"a", "b"}, {"b", "alone", "a"}, {"a", ""}};
  for (const auto& tables : allowed) EXPECT_TRUE(decode(tables).ok()) << decode(tables);
  for (const char* one : {"a", "b"}) {
    const absl::Status refused = decode({"alone", one});
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("'learning_rate' is given for table '", one,
                                       "', but not for table '", *one == 'a' ? "b" : "a",
                                       "' of the same stack")));
  }
}

TEST_F(CoordinatorPartsTest, TheHandMadeAnswerIsALookupResponse) {
  step::LookupOutput output;
  output.model = Model(kModel, 1);
  output.batch_handle = 0xfedcba9876543210u;
  output.order = {1, 0};
  output.statistics.set_num_minibatches(3);
  auto block = std::make_shared<std::string>(3000, 'x');
  output.activations.owner = block;
  output.activations.features = {{2, 3, absl::MakeConstSpan(block->data(), 24)},
                                 {90, 8, absl::MakeConstSpan(block->data(), 2880)},
                                 {0, 8, {}}};
  grpc::Slice slice;
  ASSERT_TRUE(step::EncodeLookupResponse(output).DumpToSingleSlice(&slice).ok());
  v1::LookupResponse response;
  ASSERT_TRUE(response.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  EXPECT_EQ(response.batch_handle(), output.batch_handle);
  EXPECT_EQ(response.statistics().num_minibatches(), 3);
  ASSERT_EQ(response.activations_size(), 2);
  EXPECT_EQ(response.activations(0).feature(), "fb");
  EXPECT_EQ(response.activations(0).activation().data(), std::string(2880, 'x'));
  EXPECT_EQ(response.activations(0).activation().shape(0), 90);
  EXPECT_EQ(response.activations(1).feature(), "fa");
  EXPECT_EQ(response.activations(1).activation().data().size(), 24u);
}

class ReleasingShard final : public TestingShard {
 public:
  explicit ReleasingShard(bool hangs) : TestingShard(0), hangs_(hangs) {
    Answer(host::ShardVerb::kReleaseBatch, &ReleasingShard::OnRelease);
  }
  absl::StatusOr<internal::v1::ReleaseBatchResponse> OnRelease(
      const internal::v1::ReleaseBatchRequest& request) {
    ++asked;
    if (hangs_) return absl::DeadlineExceededError("it hangs");
    return internal::v1::ReleaseBatchResponse();
  }

  int asked = 0;

 private:
  const bool hangs_;
};

// Would catch: the batches of a client that are given back one after another, each for as long as a
// shard may take; and batches that stay on the other shards, too, until they expire.
TEST_F(CoordinatorPartsTest, AShardThatHangsIsNotAskedForEachBatch) {
  const auto shard = std::make_shared<ReleasingShard>(/*hangs=*/true);
  const auto other = std::make_shared<ReleasingShard>(/*hangs=*/false);
  ThreadPools threads(1);
  const step::ShardSet set({shard, other}, &threads.blocking);
  step::StepPath::Options options;
  options.threads = &threads;
  step::StepPath path(set, options, nullptr, &metrics_);
  for (uint64_t handle = 1; handle <= 1000; ++handle) path.Discard(5, handle);
  EXPECT_GE(shard->asked, 1);
  EXPECT_LT(shard->asked, 1000);
  EXPECT_EQ(other->asked, 1000);
}

// Notes for how long it would keep a batch.
class KeepingShard final : public TestingShard {
 public:
  KeepingShard() : TestingShard(0) {}
  std::unique_ptr<host::GatherCall> Gather(host::GatherCommand command,
                                           rpc::CallContext*) override {
    struct Refused final : host::GatherCall {
      absl::StatusOr<host::GatherResult> Wait() override { return absl::InternalError("no rows"); }
    };
    kept_for = command.batch_ttl;
    return std::make_unique<Refused>();
  }

  absl::Duration kept_for;
};

// Would catch: an update that has taken its batch at the coordinator in time, waits on a shard, as
// while a checkpoint begins, and does not find the batch there any more.
TEST_F(CoordinatorPartsTest, ShardsKeepABatchAsLongAsAnUpdateThatHasItMayTake) {
  const auto shard = std::make_shared<KeepingShard>();
  ThreadPools threads(1);
  const step::ShardSet set({shard}, &threads.blocking);
  step::StepPath::Options options;
  options.threads = &threads;
  options.max_activation_bytes = 1000;
  options.batch_ttl = absl::Seconds(7);
  options.shard_call = absl::Seconds(30);
  step::StepPath path(set, options, nullptr, &metrics_);
  rpc::CallContext context(absl::InfiniteFuture());
  step::StepHooks hooks;
  v1::StepTimes times;
  const absl::Status refused =
      path.Lookup(Model(kModel, 1), GoodRequest(), &context, &hooks, &times).status();
  EXPECT_TRUE(absl::IsInternal(refused)) << refused;
  EXPECT_EQ(shard->kept_for, absl::Seconds(37));
}

class WritingShard final : public TestingShard {
 public:
  WritingShard() : TestingShard(0) {
    Answer(host::ShardVerb::kGetTransfer, &WritingShard::OnGetTransfer);
    Answer(host::ShardVerb::kCancelTransfer, &WritingShard::OnCancel);
  }
  absl::StatusOr<internal::v1::GetTransferResponse> OnGetTransfer(
      const internal::v1::GetTransferRequest& request) {
    internal::v1::GetTransferResponse response;
    response.set_state(++asked_ < 3 ? internal::v1::GetTransferResponse::RUNNING
                                    : internal::v1::GetTransferResponse::DONE);
    return response;
  }
  absl::StatusOr<internal::v1::CancelTransferResponse> OnCancel(
      const internal::v1::CancelTransferRequest& request) {
    ++cancelled;
    return internal::v1::CancelTransferResponse();
  }

  int cancelled = 0;

 private:
  int asked_ = 0;
};

// Would catch: a coordinator that stops and goes on with a save until it is cut off, so that nobody
// hears which models it could not save.
TEST_F(CoordinatorPartsTest, FilesAreAwaitedUntilTheDeadlineAtMost) {
  const auto shard = std::make_shared<WritingShard>();
  ThreadPools threads(1);
  const step::ShardSet set({shard}, &threads.blocking);
  const auto await = [&](absl::Time deadline) {
    rpc::CallContext context(deadline);
    step::ShardTransfers transfers(set);
    const absl::Status end =
        transfers.Await(&context, [](int64_t, int64_t) { return absl::OkStatus(); }).status();
    if (end.ok()) transfers.Keep();
    return end;
  };
  const absl::Status late = await(SteadyNow() - absl::Seconds(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_EQ(shard->cancelled, 1);
  const absl::Status in_time = await(absl::InfiniteFuture());
  EXPECT_TRUE(in_time.ok()) << in_time;
  EXPECT_EQ(shard->cancelled, 1);
}

}  // namespace coordinator_parts_test
}  // namespace emberd::coordinator
