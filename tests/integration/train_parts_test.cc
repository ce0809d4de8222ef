// Requests and answers of a training stream that are many messages long. A failure here means that
// a table gets other bits because of how an update was cut, that half an update is made, or that an
// answer is not what was asked for.
//
// Covers: server/step/step.cc, server/step/gradients.cc,
// server/coordinator/train/train_stream.cc
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/seed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/train_call.h"

namespace emberd::testing {
namespace train_parts_test {

using ::testing::HasSubstr;

constexpr int kFeatures = 6;
constexpr int kSamples = 6000;
constexpr int kWidth = 64;
constexpr int kRows = 2000;
// f0 and f3 have one table, so that the order of their sums matters.
int TableOf(int feature) { return feature == 3 ? 0 : feature; }

std::string ModelText(const std::string& result_mode) {
  std::string text = "name: 'parts' optimizer { adagrad {} learning_rate: 0.1 }\n";
  for (int f = 0; f < kFeatures; ++f) {
    if (TableOf(f) == f) {
      absl::StrAppend(&text, "tables { name: 't", f, "' vocabulary_size: ", kRows,
                      " embedding_dim: ", kWidth, " combiner: SUM result_mode: ", result_mode,
                      " initializer { uniform { lower: -1 upper: 1 } } }\n");
    }
    absl::StrAppend(&text, "features { name: 'f", f, "' table: 't", TableOf(f), "' }\n");
  }
  return text;
}

std::string Name(int feature) { return absl::StrCat("f", feature); }

using Order = std::vector<int>;
const Order kUsual = {0, 1, 2, 3, 4, 5};

class TrainPartsTest : public ClusterFixture {
 protected:
  void Start(const std::string& config, const std::string& result_mode = "AUTO") {
    StartCluster({.shards = 2, .sparsecores_per_shard = 2, .config = config},
                 ModelText(result_mode));
    ASSERT_FALSE(HasFatalFailure());
    api_ = std::make_unique<Api>(cluster_->address());
    std::mt19937 random(7);
    for (int f = 0; f < kFeatures; ++f) {
      std::vector<int32_t>& ids = ids_.emplace_back(kSamples);
      std::vector<float>& gradients = gradients_.emplace_back(kSamples * kWidth);
      for (int32_t& id : ids) id = static_cast<int32_t>(random() % kRows * (random() % 100) / 100);
      for (float& gradient : gradients) {
        gradient = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 300;
      }
    }
  }

  TrainCall Open() {
    TrainCall call = BeginTrain(*api_, model_.id, "parts");
    AwaitStart(&call);
    return call;
  }

  v1::FeatureIds Ids(int feature) const {
    v1::FeatureIds ids;
    ids.set_feature(Name(feature));
    *ids.mutable_dense()->mutable_ids() = MakeVector(ids_[feature]);
    return ids;
  }
  // Sends the lookup, and reads its answer with a pause before each message. The activations, by
  // feature; `parts`: how many messages there were.
  std::map<std::string, std::vector<float>> LookUp(const TrainCall& call, const Order& order,
                                                   absl::Duration pause = absl::ZeroDuration(),
                                                   int* parts = nullptr) const {
    v1::TrainRequest request;
    request.mutable_lookup()->set_step(call.next_step);
    for (const int feature : order) *request.mutable_lookup()->add_features() = Ids(feature);
    EXPECT_TRUE(call.stream->Write(request));
    std::map<std::string, std::vector<float>> found;
    std::vector<std::string> names, expected;
    for (const int feature : order) expected.push_back(Name(feature));
    for (bool continues = true; continues;) {
      absl::SleepFor(pause);
      v1::TrainResponse response;
      if (!call.stream->Read(&response)) {
        ADD_FAILURE() << call.stream->Finish().error_message();
        return found;
      }
      if (parts != nullptr) ++*parts;
      const v1::TrainLookupResult& result = response.lookup();
      EXPECT_EQ(result.step(), call.next_step);
      for (const v1::FeatureActivation& activation : result.activations()) {
        names.push_back(activation.feature());
        found[activation.feature()] = Floats(activation.activation());
      }
      continues = result.continues();
      EXPECT_NE(result.has_times(), continues) << "the last part has them";
    }
    EXPECT_EQ(names, expected);
    return found;
  }
  // As a lookup outside of streams finds them.
  std::map<std::string, std::vector<float>> Expected() const {
    v1::LookupRequest request;
    request.set_model_id(model_.id);
    request.set_inference(true);
    for (const int feature : kUsual) *request.add_features() = Ids(feature);
    v1::LookupResponse response;
    const grpc::Status status =
        testing::Call(&v1::EmbeddingService::Stub::Lookup, *api_, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::map<std::string, std::vector<float>> found;
    for (const v1::FeatureActivation& activation : response.activations()) {
      found[activation.feature()] = Floats(activation.activation());
    }
    return found;
  }

  v1::TrainRequest Part(int64_t step, const Order& features, bool continues) const {
    v1::TrainRequest request;
    request.mutable_update()->set_step(step);
    request.mutable_update()->set_continues(continues);
    for (const int feature : features) {
      v1::FeatureGradient* gradient = request.mutable_update()->add_gradients();
      gradient->set_feature(Name(feature));
      *gradient->mutable_gradient() = MakeTensor<float>({kSamples, kWidth}, gradients_[feature]);
    }
    return request;
  }
  // A whole step, whose update comes in these parts.
  void Step(TrainCall* call, const std::vector<Order>& parts) const {
    LookUp(*call, kUsual);
    Update(call, parts);
  }
  void Update(TrainCall* call, const std::vector<Order>& parts) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      ASSERT_TRUE(call->stream->Write(Part(call->next_step, parts[i], i + 1 < parts.size())));
    }
    v1::TrainResponse response;
    ASSERT_TRUE(call->stream->Read(&response)) << call->stream->Finish().error_message();
    ASSERT_EQ(response.update().step(), call->next_step++);
  }
  std::unique_ptr<Api> api_;
  std::vector<std::vector<int32_t>> ids_;
  std::vector<std::vector<float>> gradients_;  // by feature
};

// The rows change from step to step: what was sent before it was there would be of a step before.
TEST_F(TrainPartsTest, AnswersComeInTheOrderOfTheRequestAndWhole) {
  Start("transport: TCP");
  ASSERT_FALSE(HasFatalFailure());
  TrainCall call = Open();
  Order order = kUsual;
  std::mt19937 random(TestSeed());
  for (int step = 0; step < 12; ++step) {
    const auto expected = Expected();
    int parts = 0;
    const auto found = LookUp(call, order, absl::ZeroDuration(), &parts);
    EXPECT_GT(parts, 1) << "what is tested here does not happen";
    EXPECT_EQ(found, expected) << "step " << step;
    Update(&call, {kUsual});
    std::shuffle(order.begin(), order.end(), random);
  }
  EndTrain(&call);
}

// Who reads slowly gets the same, and keeps nobody else waiting.
TEST_F(TrainPartsTest, ASlowTrainerGetsItsAnswers) {
  Start("transport: TCP");
  ASSERT_FALSE(HasFatalFailure());
  const auto expected = Expected();
  TrainCall call = Open();
  EXPECT_EQ(LookUp(call, kUsual, absl::Milliseconds(150)), expected);
  for (int f = 0; f < kFeatures; ++f) {
    absl::SleepFor(absl::Milliseconds(100));
    EXPECT_EQ(Expected(), expected) << "no part of the update is made before all of it is there";
    ASSERT_TRUE(call.stream->Write(Part(call.next_step, {f}, f + 1 < kFeatures)));
  }
  v1::TrainResponse response;
  ASSERT_TRUE(call.stream->Read(&response));
  EXPECT_GT(response.update().rows_updated(), 0);
  EXPECT_NE(Expected(), expected);
  EndTrain(&call);
}

// How parts are cut and ordered must not show.
TEST_F(TrainPartsTest, HoweverAnUpdateIsCutTheTablesAreTheSame) {
  const std::vector<std::vector<Order>> cuts = {
      {{0, 1, 2, 3, 4, 5}},         {{0}, {1}, {2}, {3}, {4}, {5}}, {{5}, {4}, {3}, {2}, {1}, {0}},
      {{3}, {}, {1, 5, 0}, {2, 4}}, {{}, {0, 1, 2}, {3, 4, 5}, {}},
  };
  for (const char* mode : {"UNIQUE_ROWS", "PARTIAL_SUMS"}) {
    std::string expected;
    for (const auto& parts : cuts) {
      ids_.clear();
      gradients_.clear();
      Start("transport: TCP", mode);
      ASSERT_FALSE(HasFatalFailure());
      TrainCall call = Open();
      for (int step = 0; step < 2; ++step) Step(&call, parts);
      EndTrain(&call);
      if (expected.empty()) expected = TableDigest();
      EXPECT_EQ(TableDigest(), expected) << mode << ", " << parts.size() << " parts";
    }
  }
}

// Some features without a gradient, among them one of a shared table that others wait for.
TEST_F(TrainPartsTest, FeaturesWithoutAGradientHaveAZeroOne) {
  std::string expected;
  for (const auto& parts : std::vector<std::vector<Order>>{{{1, 3}}, {{3}, {1}}, {{1}, {3}, {}}}) {
    ids_.clear();
    gradients_.clear();
    Start("transport: TCP", "UNIQUE_ROWS");
    ASSERT_FALSE(HasFatalFailure());
    TrainCall call = Open();
    Step(&call, parts);
    EndTrain(&call);
    if (expected.empty()) expected = TableDigest();
    EXPECT_EQ(TableDigest(), expected) << parts.size() << " parts";
  }
}

// Whatever is wrong with a part, in whatever place: no row changes, and the first fault is named.
TEST_F(TrainPartsTest, ABadPartChangesNothing) {
  Start("transport: TCP");
  ASSERT_FALSE(HasFatalFailure());
  struct Case {
    std::string what;
    std::function<void(v1::TrainUpdate*)> spoil;
    std::string message;
  };
  const auto set = [](v1::TrainUpdate* update, int64_t sample, int64_t column, float value) {
    std::string* data = update->mutable_gradients(0)->mutable_gradient()->mutable_data();
    std::memcpy(data->data() + (sample * kWidth + column) * sizeof(value), &value, sizeof(value));
  };
  const Case cases[] = {
      {"not a number",
       [&](v1::TrainUpdate* update) {
         set(update, 5999, 63, std::numeric_limits<float>::quiet_NaN());
       },
       "' is nan at sample 5999, column 63; gradients must be finite"},
      {"infinity",
       [&](v1::TrainUpdate* update) {
         set(update, 1234, 5, -std::numeric_limits<float>::infinity());
       },
       "' is -inf at sample 1234, column 5; gradients must be finite"},
      {"too few bytes",
       [](v1::TrainUpdate* update) {
         update->mutable_gradients(0)->mutable_gradient()->mutable_data()->pop_back();
       },
       ".data has 1535999 bytes; shape [6000, 64] of FLOAT32 needs 1536000"},
      {"another shape",
       [](v1::TrainUpdate* update) {
         update->mutable_gradients(0)->mutable_gradient()->set_shape(1, 32);
       },
       ".shape is [6000, 32]; it must be [6000, 64]"},
      {"a name", [](v1::TrainUpdate* update) { update->mutable_gradients(0)->set_feature("g"); },
       "].feature is 'g', which model 'parts' does not have"},
  };
  const std::string before = TableDigest();
  for (const int bad : {0, 3, kFeatures - 1}) {
    for (const Case& c : cases) {
      TrainCall call = Open();
      EXPECT_EQ(call.next_step, 0);
      LookUp(call, kUsual);
      for (int f = 0; f < kFeatures; ++f) {
        v1::TrainRequest part = Part(0, {f}, f + 1 < kFeatures);
        if (f >= bad) c.spoil(part.mutable_update());  // the first one is named
        if (!call.stream->Write(part)) break;
      }
      v1::TrainResponse response;
      EXPECT_FALSE(call.stream->Read(&response));
      const grpc::Status status = call.stream->Finish();
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
      const std::string message = status.error_message();
      EXPECT_THAT(message, HasSubstr(c.message)) << c.what << " in part " << bad;
      EXPECT_THAT(message, HasSubstr(c.what == "a name" ? absl::StrCat("gradients[", bad, "]")
                                                        : absl::StrCat("'", Name(bad), "'")));
    }
  }
  EXPECT_EQ(TableDigest(), before);
  TrainCall call = Open();
  Step(&call, {kUsual});
  EndTrain(&call);
  EXPECT_NE(TableDigest(), before);
}

// A trainer that goes away after any number of parts: the step was not made, and can be made again.
TEST_F(TrainPartsTest, AnUpdateThatBreaksOffChangesNothing) {
  for (const char* config : {"transport: TCP", ""}) {
    ids_.clear();
    gradients_.clear();
    Start(config);
    ASSERT_FALSE(HasFatalFailure());
    const std::string before = TableDigest();
    for (int sent = 0; sent <= kFeatures; ++sent) {
      TrainCall call = Open();
      EXPECT_EQ(call.next_step, 0);
      LookUp(call, kUsual);
      for (int f = 0; f < sent; ++f) ASSERT_TRUE(call.stream->Write(Part(0, {f}, true)));
      if (sent % 2 == 0) {
        call.context->TryCancel();
        EXPECT_EQ(call.stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
      } else {
        call.stream->WritesDone();
        const grpc::Status status = call.stream->Finish();
        EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
        EXPECT_EQ(status.error_message(), "the stream ended in the middle of a request");
      }
    }
    EXPECT_EQ(TableDigest(), before);
    TrainCall call = Open();
    Step(&call, {{0, 1}, {2, 3}, {4, 5}});
    EndTrain(&call);
    EXPECT_NE(TableDigest(), before);
  }
}

// Updates that wait for another rank are held as they came. Those of all ranks fill most of
// the budget: no rank's may keep another's from being read.
TEST_F(TrainPartsTest, UpdatesThatWaitForEachOtherFitTheBudget) {
  Start("transport: TCP budgets { in_flight_bytes: 24000000 }");
  ASSERT_FALSE(HasFatalFailure());
  std::vector<TrainCall> ranks;
  v1::GroupOptions options;
  options.set_size(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(BeginTrain(*api_, model_.id, "pair", rank, options));
  }
  for (TrainCall& rank : ranks) AwaitStart(&rank);
  v1::TrainResponse response;
  for (int step = 0; step < 4; ++step) {
    std::vector<std::thread> lookups;
    for (TrainCall& rank : ranks) lookups.emplace_back([&] { LookUp(rank, kUsual); });
    for (std::thread& lookup : lookups) lookup.join();
    for (TrainCall& rank : ranks) {  // the first is held while the second comes
      for (int f = 0; f < kFeatures; ++f) {
        ASSERT_TRUE(rank.stream->Write(Part(step, {f}, f + 1 < kFeatures)));
      }
    }
    for (TrainCall& rank : ranks) {
      ASSERT_TRUE(rank.stream->Read(&response)) << rank.stream->Finish().error_message();
      EXPECT_EQ(response.update().step(), rank.next_step++);
    }
  }
  for (TrainCall& rank : ranks) EndTrain(&rank);
}

// A trainer that goes away after any message of an answer.
TEST_F(TrainPartsTest, AnAnswerThatBreaksOffIsNoStep) {
  Start("transport: TCP");
  ASSERT_FALSE(HasFatalFailure());
  for (int taken = 0; taken < kFeatures; ++taken) {
    TrainCall call = Open();
    EXPECT_EQ(call.next_step, 0);
    v1::TrainRequest request;
    request.mutable_lookup()->set_step(0);
    for (const int feature : kUsual) *request.mutable_lookup()->add_features() = Ids(feature);
    ASSERT_TRUE(call.stream->Write(request));
    // Features that were made at once come in one message: there may be fewer.
    v1::TrainResponse response;
    response.mutable_lookup()->set_continues(true);
    for (int i = 0; i < taken && response.lookup().continues(); ++i) {
      ASSERT_TRUE(call.stream->Read(&response));
    }
    call.context->TryCancel();
    EXPECT_EQ(call.stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  TrainCall call = Open();
  EXPECT_EQ(call.next_step, 0);
  EXPECT_EQ(LookUp(call, kUsual), Expected());
  EndTrain(&call);
}

}  // namespace train_parts_test
}  // namespace emberd::testing
