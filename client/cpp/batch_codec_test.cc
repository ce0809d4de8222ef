#include "client/cpp/batch_codec.h"

#include <cstring>
#include <functional>
#include <limits>

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace batch_codec_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Model TwoFeatures() {
  Model model;
  model.id = 9;
  model.name = "m";
  model.tables = {{.name = "t",
                   .vocabulary_size = 100,
                   .embedding_dim = 2,
                   .combiner = "mean",
                   .stack = "t",
                   .optimizer = "sgd",
                   .slots = {}}};
  model.features = {{"x", "t", 2}, {"y", "t", 2}};
  return model;
}

template <typename T>
std::string Bytes(std::vector<T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

v1::Tensor Tensor(v1::DataType type, std::vector<int64_t> shape, std::string data) {
  v1::Tensor tensor;
  tensor.set_dtype(type);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(std::move(data));
  return tensor;
}

bool Same(const google::protobuf::Message& a, const google::protobuf::Message& b) {
  return google::protobuf::util::MessageDifferencer::Equals(a, b);
}

TEST(EncodeLookupTest, EveryForm) {
  const std::vector<int32_t> narrow = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> wide = {0, 0, 1, 3, 1, 4};
  const std::vector<int64_t> values = {7, 8, 9};
  const std::vector<int32_t> splits = {0, 1, 1, 3};
  const std::vector<float> six = {1, 2, 3, 4, 5, 6}, three = {1, 2, 3}, one = {0.5f};
  Model model = TwoFeatures();
  model.features.push_back({"z", "t", 2});
  // In an order that is not the model's.
  const std::vector<FeatureIds> features = {{"z", DenseIds{narrow, 3}, six},
                                            {"x", SparseIds{wide, values, 5}, one},
                                            {"y", RaggedIds{splits, values}, three}};
  absl::StatusOr<v1::LookupRequest> request =
      EncodeLookup(model, features, /*inference=*/true, WireType::kBfloat16);
  ASSERT_TRUE(request.ok()) << request.status();
  v1::LookupRequest expected;
  expected.set_model_id(9);
  expected.set_inference(true);
  expected.set_activation_dtype(v1::BFLOAT16);
  v1::FeatureIds* z = expected.add_features();
  z->set_feature("z");
  *z->mutable_dense()->mutable_ids() = Tensor(v1::INT32, {2, 3}, Bytes(narrow));
  *z->mutable_dense()->mutable_weights() = Tensor(v1::FLOAT32, {2, 3}, Bytes(six));
  v1::FeatureIds* x = expected.add_features();
  x->set_feature("x");
  x->mutable_sparse()->set_sample_count(5);
  *x->mutable_sparse()->mutable_indices() = Tensor(v1::INT64, {3, 2}, Bytes(wide));
  *x->mutable_sparse()->mutable_values() = Tensor(v1::INT64, {3}, Bytes(values));
  *x->mutable_sparse()->mutable_weights() = Tensor(v1::FLOAT32, {1}, Bytes(one));
  v1::FeatureIds* y = expected.add_features();
  y->set_feature("y");
  *y->mutable_ragged()->mutable_row_splits() = Tensor(v1::INT32, {4}, Bytes(splits));
  *y->mutable_ragged()->mutable_values() = Tensor(v1::INT64, {3}, Bytes(values));
  *y->mutable_ragged()->mutable_weights() = Tensor(v1::FLOAT32, {3}, Bytes(three));
  EXPECT_TRUE(Same(*request, expected)) << request->DebugString();
  const absl::StatusOr<ExpectedLookup> answer = ExpectLookup(model, features, WireType::kBfloat16);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->features[0].samples, 2);
  EXPECT_EQ(answer->features[1].samples, 5);
  EXPECT_EQ(answer->features[2].samples, 3);
}

// Ids that are told to be [samples, ids_per_sample] must not be read as some of a shape.
TEST(EncodeLookupTest, DenseIdsHaveTheShapeThatTheServerReads) {
  using Shape = std::vector<int64_t>;
  const std::vector<int64_t> ids(12);
  const std::vector<float> twelve(12);
  const struct {
    DenseIds ids;
    Shape output_shape, sent;
    int64_t samples;
  } cases[] = {{{ids}, {5}, {12}, 12},
               {{ids, 3}, {}, {4, 3}, 4},
               {{ids}, {4, 3}, {12}, 12},
               {{ids, 2}, {4, 3}, {2, 3, 2}, 6},
               {{ids, 3}, {4, 2, 2}, {1, 2, 2, 3}, 4},
               {{ids, 1, {4, 3}}, {9, 3}, {4, 3}, 12},
               {{ids, 1, {2, 3, 2}}, {4, 3}, {2, 3, 2}, 6},
               {{ids, 1, {6, 2}}, {4, 3}, {6, 2}, 0}};  // the server says what is allowed
  Model model = TwoFeatures();
  for (const auto& [given, output_shape, sent, samples] : cases) {
    model.features[0].output_shape = output_shape;
    const auto request = EncodeLookup(model, {{"x", given, twelve}}, true, WireType::kFloat32);
    ASSERT_TRUE(request.ok()) << request.status();
    const v1::DenseIds& dense = request->features(0).dense();
    EXPECT_EQ(absl::MakeConstSpan(dense.ids().shape()), sent);
    EXPECT_EQ(absl::MakeConstSpan(dense.weights().shape()), sent);
    EXPECT_EQ(ExpectLookup(model, {{"x", given}}, WireType::kFloat32)->features[0].samples,
              samples);
  }
  model.features[0].output_shape = {4, 3};
  const std::pair<DenseIds, const char*> refused[] = {
      // 4 samples are no multiple of 3.
      {{ids, 3}, "ids: 12 are given; shape [1, 3, 3] needs 9, as output_shape says"},
      {{ids, 1, {4, 2}}, "ids: 12 are given; shape [4, 2] needs 8"},
      {{ids, 1, {4, 3, 0}}, "ids_per_sample: 0 is not allowed"},
      {{ids, 1, {int64_t{1} << 62, 4}},
       "ids: 12 are given; shape [4611686018427387904, 4] needs 92233"}};
  for (const auto& [given, message] : refused) {
    const absl::Status status =
        EncodeLookup(model, {{"x", given}}, true, WireType::kFloat32).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST(EncodeLookupTest, RefusesSpansThatMakeNoTensor) {
  const std::vector<int64_t> five = {1, 2, 3, 4, 5};
  const struct {
    FeatureIds feature;
    const char* message;
  } cases[] = {
      {{"x", DenseIds{five, 2}}, "feature \"x\": ids_per_sample: 2"},
      {{"x", DenseIds{five, 0}}, "feature \"x\": ids_per_sample: 0"},
      {{"y", SparseIds{five, five, 5}}, "feature \"y\": indices: 5 numbers"},
      {{"w", DenseIds{five}}, "feature \"w\": the model \"m\" has no such feature"},
  };
  for (const auto& [feature, message] : cases) {
    const absl::Status status =
        EncodeLookup(TwoFeatures(), {feature}, false, WireType::kFloat32).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

ExpectedLookup TwoSamples(WireType type) {
  static const std::vector<int64_t> ids = {1, 2};
  return *ExpectLookup(TwoFeatures(), {{"x", DenseIds{ids}}, {"y", DenseIds{ids}}}, type);
}

v1::LookupResponse Answer(v1::DataType type, const std::string& data) {
  v1::LookupResponse response;
  response.set_batch_handle(77);
  for (const char* name : {"x", "y"}) {
    v1::FeatureActivation* activation = response.add_activations();
    activation->set_feature(name);
    *activation->mutable_activation() = Tensor(type, {2, 2}, data);
  }
  return response;
}

absl::StatusOr<LookupResult> Decode(const ExpectedLookup& expected,
                                    const v1::LookupResponse& response) {
  BufferPool pool;
  return DecodeLookup(expected, /*inference=*/false, response, &pool);
}

TEST(DecodeLookupTest, OutlivesTheAnswerAndThePool) {
  absl::StatusOr<LookupResult> result =
      Decode(TwoSamples(WireType::kFloat32), Answer(v1::FLOAT32, Bytes<float>({1, 2, 3, 4})));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->batch.value, 77u);
  const Activation* y = result->Find("y");
  ASSERT_NE(y, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(y->values.data()) % 64, 0u);
  EXPECT_EQ(y->samples, 2);
  EXPECT_EQ(y->dim, 2);
  EXPECT_THAT(y->values, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(result->Find("z"), nullptr);
}

TEST(DecodeLookupTest, ConvertsBfloat16) {
  absl::StatusOr<LookupResult> result =
      Decode(TwoSamples(WireType::kBfloat16),
             Answer(v1::BFLOAT16, Bytes<uint16_t>({0x3f80, 0x4000, 0x4040, 0xc080})));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->Find("x")->values, ElementsAre(1, 2, 3, -4));
}

TEST(DecodeLookupTest, DoesNotBelieveWhatDoesNotFit) {
  const std::string data = Bytes<float>({1, 2, 3, 4});
  const auto tensor = [](v1::LookupResponse* r) {
    return r->mutable_activations(1)->mutable_activation();
  };
  const struct {
    const char* message;
    std::function<void(v1::LookupResponse*)> damage;
  } cases[] = {
      {"activations: the server sent 1; 2 were expected",
       [](v1::LookupResponse* r) { r->mutable_activations()->RemoveLast(); }},
      {"batch_handle: the server sent 0", [](v1::LookupResponse* r) { r->set_batch_handle(0); }},
      {"activations[0] (feature \"x\").feature: the server sent \"y\"",
       [](v1::LookupResponse* r) { r->mutable_activations()->SwapElements(0, 1); }},
      {"activations[1] (feature \"y\").dtype: the server sent INT64",
       [&](v1::LookupResponse* r) { tensor(r)->set_dtype(v1::INT64); }},
      {"(feature \"y\").shape: the server sent [2, 3]; [2, 2] was expected",
       [&](v1::LookupResponse* r) { tensor(r)->set_shape(1, 3); }},
      {"shape: the server sent [2]",
       [&](v1::LookupResponse* r) { tensor(r)->mutable_shape()->RemoveLast(); }},
      {"shape: the server sent [-1, 2]",
       [&](v1::LookupResponse* r) { tensor(r)->set_shape(0, -1); }},
      {"data: the server sent 15 bytes",
       [&](v1::LookupResponse* r) { tensor(r)->mutable_data()->pop_back(); }},
      {"data: the server sent 17 bytes",
       [&](v1::LookupResponse* r) { tensor(r)->mutable_data()->push_back('x'); }},
      {"dtype: the server sent DATA_TYPE_UNSPECIFIED",
       [&](v1::LookupResponse* r) { r->mutable_activations(0)->clear_activation(); }},
  };
  for (const auto& [message, damage] : cases) {
    v1::LookupResponse response = Answer(v1::FLOAT32, data);
    damage(&response);
    const absl::Status status = Decode(TwoSamples(WireType::kFloat32), response).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

// A request may hold any sample_count; a server that plays along must not lead to an overflow.
TEST(DecodeLookupTest, HugeShapesDoNotOverflow) {
  const int64_t huge = int64_t{1} << 62;
  const absl::StatusOr<ExpectedLookup> expected =
      ExpectLookup(TwoFeatures(), {{"x", SparseIds{{}, {}, huge}}}, WireType::kFloat32);
  ASSERT_TRUE(expected.ok()) << expected.status();
  v1::LookupResponse response;
  response.set_batch_handle(1);
  v1::FeatureActivation* activation = response.add_activations();
  activation->set_feature("x");
  *activation->mutable_activation() = Tensor(v1::FLOAT32, {huge, 2}, "");
  EXPECT_EQ(Decode(*expected, response).status().code(), absl::StatusCode::kInternal);
  // Nor through shared memory, whatever the server says of it.
  EXPECT_EQ(SharedBytes(*expected), 0u);
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{64}, ~uint64_t{0}}) {
    response.set_shared_bytes(bytes);
    EXPECT_EQ(Decode(*expected, response).status().code(), absl::StatusCode::kInternal);
  }
}

TEST(EncodeApplyTest, WritesEveryField) {
  const std::vector<float> gradient = {1, -2, 0.5f, 4};
  ApplyOptions options;
  options.step = 12;
  options.hyperparameters = {{"t", {{"beta2", 0.999}}}};
  absl::StatusOr<v1::ApplyGradientsRequest> request =
      EncodeApply(TwoFeatures(), {77, 0}, {{"y", gradient, 2}}, options, WireType::kBfloat16);
  ASSERT_TRUE(request.ok()) << request.status();
  v1::ApplyGradientsRequest expected;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(
      R"(model_id: 9 batch_handle: 77 step: 12
         hyperparameters { table: "t" })",
      &expected));
  // Neither in the text above nor compared field by field: under ThreadSanitizer, maps have other
  // members in the headers of protobuf than in its library, which was built without.
  (*expected.mutable_hyperparameters(0)->mutable_values())["beta2"] = 0.999;
  v1::FeatureGradient* y = expected.add_gradients();
  y->set_feature("y");
  *y->mutable_gradient() =
      Tensor(v1::BFLOAT16, {2, 2}, Bytes<uint16_t>({0x3f80, 0xc000, 0x3f00, 0x4080}));
  EXPECT_TRUE(request->SerializeAsString() == expected.SerializeAsString())
      << request->DebugString();
}

TEST(EncodeApplyTest, RefusesShapesThatDoNotFit) {
  const std::vector<float> gradient = {1, 2, 3, 4};
  for (const int64_t samples : {int64_t{-2}, int64_t{1}, int64_t{3}, (int64_t{1} << 62) + 1,
                                std::numeric_limits<int64_t>::min()}) {
    const absl::Status status =
        EncodeApply(TwoFeatures(), {77, 0}, {{"y", gradient, samples}}, {}, WireType::kFloat32)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << samples;
    EXPECT_THAT(std::string(status.message()), HasSubstr("feature \"y\": gradient: 4 floats"));
  }
}

}  // namespace batch_codec_test
}  // namespace emberd::client
