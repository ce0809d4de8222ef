// Train streams whose updates need not be a client's: what they may send where rows came instead of
// activations. A failure here means that a trainer's sums are believed where they must not be, or
// that what is wrong with them is not said.
//
// Covers: server/coordinator/gradient_reader.cc
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/shared_arena.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/rows_model.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/shared_place.h"
#include "tests/testing/train_call.h"

namespace emberd::testing {
namespace row_sums_test {

using ::testing::HasSubstr;

class RowSumsTest : public ClusterFixture {
 protected:
  void Start(const std::string& of_tables = "") {
    StartCluster({.shards = 2, .sparsecores_per_shard = 2, .config = "transport: TCP"},
                 RowsModel("raw", of_tables));
    ASSERT_FALSE(HasFatalFailure());
    api_ = std::make_unique<Api>(cluster_->address());
  }
  TrainCall Open() {
    TrainCall call = BeginTrain(*api_, model_.id, "g");
    AwaitStart(&call);
    return call;
  }
  // Of ids 0, 1, 2, 0, 1, 2, ...; e's are all different. The activations, or rows, by feature.
  std::vector<v1::FeatureActivation> LookUp(TrainCall* call, bool distinct_rows = true) {
    v1::TrainRequest request;
    request.mutable_lookup()->set_step(call->next_step);
    request.mutable_lookup()->set_distinct_rows(distinct_rows);
    for (const RowsFeature& shape : kShapes) {
      std::vector<int32_t> ids;
      for (int s = 0; s < kSamples; ++s) ids.push_back(shape.feature[0] == 'e' ? s : s % 3);
      v1::FeatureIds* const feature = request.mutable_lookup()->add_features();
      feature->set_feature(shape.feature);
      *feature->mutable_dense()->mutable_ids() = MakeVector(ids);
    }
    EXPECT_TRUE(call->stream->Write(request));
    std::vector<v1::FeatureActivation> found;
    for (bool continues = true; continues;) {
      v1::TrainResponse response;
      if (!call->stream->Read(&response)) {
        ADD_FAILURE() << call->stream->Finish().error_message();
        return found;
      }
      for (const auto& activation : response.lookup().activations()) found.push_back(activation);
      continues = response.lookup().continues();
    }
    EXPECT_EQ(found.size(), std::size(kShapes));
    return found;
  }
  static v1::FeatureGradient* Add(v1::TrainRequest* update, const std::string& feature,
                                  std::vector<int64_t> shape, bool of_rows, float value = 0.5f) {
    v1::FeatureGradient* const gradient = update->mutable_update()->add_gradients();
    gradient->set_feature(feature);
    gradient->set_of_rows(of_rows);
    *gradient->mutable_gradient() =
        MakeTensor<float>(shape, std::vector<float>(shape[0] * shape[1], value));
    return gradient;
  }
  // Sums in BFLOAT16: their upper halves, and the lower ones of `lower_rows`.
  static v1::FeatureGradient* AddHalves(v1::TrainRequest* update, const std::string& feature,
                                        int64_t rows, int64_t dim, float value,
                                        const std::vector<int32_t>& lower_rows) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    std::vector<uint16_t> halves(rows * dim, static_cast<uint16_t>(bits >> 16));
    halves.resize(halves.size() + lower_rows.size() * dim, static_cast<uint16_t>(bits));
    v1::FeatureGradient* const gradient = update->mutable_update()->add_gradients();
    gradient->set_feature(feature);
    gradient->set_of_rows(true);
    gradient->mutable_lower_rows()->Assign(lower_rows.begin(), lower_rows.end());
    v1::Tensor* const tensor = gradient->mutable_gradient();
    tensor->set_dtype(v1::BFLOAT16);
    tensor->add_shape(rows + static_cast<int64_t>(lower_rows.size()));
    tensor->add_shape(dim);
    tensor->set_data(halves.data(), halves.size() * sizeof(uint16_t));
    return gradient;
  }
  // The error that the update ends with.
  static grpc::Status Refusal(TrainCall* call, v1::TrainRequest update) {
    update.mutable_update()->set_step(call->next_step);
    EXPECT_TRUE(call->stream->Write(update));
    v1::TrainResponse response;
    EXPECT_FALSE(call->stream->Read(&response)) << response.ShortDebugString();
    return call->stream->Finish();
  }
  void Update(TrainCall* call, v1::TrainRequest update) {
    update.mutable_update()->set_step(call->next_step++);
    ASSERT_TRUE(call->stream->Write(update));
    v1::TrainResponse response;
    ASSERT_TRUE(call->stream->Read(&response)) << call->stream->Finish().error_message();
    updated_ = response.update();
  }

  static constexpr int kSamples = 60;
  std::unique_ptr<Api> api_;
  v1::TrainUpdateResult updated_;
};

TEST_F(RowSumsTest, AnAnswerHasEachRowOnce) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  TrainCall call = Open();
  const auto found = LookUp(&call);
  TrainCall other = Open();  // takes the place of the first
  const auto whole = LookUp(&other, /*distinct_rows=*/false);
  for (size_t f = 0; f < found.size(); ++f) {
    const v1::FeatureActivation& rows = found[f];
    EXPECT_EQ(rows.feature(), kShapes[f].feature);
    EXPECT_FALSE(whole[f].has_rows() || whole[f].has_row_index());
    EXPECT_FALSE(rows.has_activation()) << "rows are chosen by the bytes of all features";
    const int64_t count = kShapes[f].feature[0] == 'e' ? kSamples : 3;
    const int64_t width = (kShapes[f].dim + 7) / 8 * 8;
    EXPECT_THAT(rows.rows().shape(), ::testing::ElementsAre(count, width));
    EXPECT_THAT(rows.row_index().shape(), ::testing::ElementsAre(kSamples));
    EXPECT_EQ(rows.row_index().dtype(), v1::INT32);
    const std::vector<float> values = Floats(rows.rows()),
                             activation = Floats(whole[f].activation());
    for (int s = 0; s < kSamples; ++s) {
      int32_t row = 0;
      std::memcpy(&row, rows.row_index().data().data() + s * sizeof(row), sizeof(row));
      ASSERT_GE(row, 0);
      ASSERT_LT(row, count);
      for (int c = 0; c < kShapes[f].dim; ++c) {
        ASSERT_EQ(values[row * width + c], activation[s * kShapes[f].dim + c]) << s << ", " << c;
      }
    }
  }
}

TEST_F(RowSumsTest, WhoDoesNotAskGetsActivationsAndMaySendNoSums) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  const std::string before = TableDigest();
  TrainCall call = Open();
  LookUp(&call, /*distinct_rows=*/false);
  v1::TrainRequest update;
  Add(&update, "a", {3, 32}, true);
  const grpc::Status status = Refusal(&call, update);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("gradient of feature 'a': of_rows is set, but the "
                                                "lookup was not answered with its rows"));
  EXPECT_EQ(TableDigest(), before);
}

TEST_F(RowSumsTest, SumsThatCannotBeTakenChangeNothing) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  const std::string before = TableDigest();
  struct Case {
    std::string message;
    std::function<void(v1::TrainRequest*)> add;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Case cases[] = {
      {"gradient of feature 'c': of_rows is set, but table 'tc' has other features",
       [](auto* update) {
         Add(update, "c", {3, 32}, true);
       }},
      {"gradient of feature 'a'.shape is [4, 32]; it must be [3, 32]",
       [](auto* update) {
         Add(update, "a", {4, 32}, true);
       }},
      {"gradient of feature 'a'.shape is [3, 24]; it must be [3, 32]",
       [](auto* update) {
         Add(update, "a", {3, 24}, true);
       }},
      {"gradient of feature 'e'.shape is [60, 24]; it must be [60, 20]",  // not the padded width
       [](auto* update) {
         Add(update, "e", {60, 24}, true);
       }},
      {"gradient of feature 'a' is nan at row 0, column 0; gradients must be finite",
       [&](auto* update) {
         Add(update, "a", {3, 32}, true, nan);
       }},
      {"gradient of feature 'a' is nan at row 2, column 0; gradients must be finite",
       [&](auto* update) {
         AddHalves(update, "a", 3, 32, 1, {1})
             ->mutable_gradient()
             ->mutable_data()
             ->replace(2 * 32 * 2, 2, "\xc0\x7f");
       }},
      {"gradient of feature 'a': lower_rows is given; only BFLOAT16 sums of rows have them",
       [](auto* update) {
         Add(update, "a", {3, 32}, true)->add_lower_rows(0);
       }},
      {"gradient of feature 'a': lower_rows is given; only BFLOAT16 sums of rows have them",
       [](auto* update) { AddHalves(update, "a", kSamples, 32, 1, {0})->set_of_rows(false); }},
      {"gradient of feature 'a'.shape is [5, 32]; it must be [4, 32]",
       [](auto* update) {
         AddHalves(update, "a", 3, 32, 1, {0, 1})->mutable_lower_rows()->RemoveLast();
       }},
      {"lower_rows[1] is 0; it must be in [1, 3), for the rows ascend",
       [](auto* update) {
         AddHalves(update, "a", 3, 32, 1, {0, 0});
       }},
      {"lower_rows[1] is 1; it must be in [3, 3), for the rows ascend",
       [](auto* update) {
         AddHalves(update, "a", 3, 32, 1, {2, 1});
       }},
      {"lower_rows[0] is -1; it must be in [0, 3), for the rows ascend",
       [](auto* update) { AddHalves(update, "a", 3, 32, 1, {-1}); }},
      {"lower_rows[0] is 3; it must be in [0, 3), for the rows ascend",
       [](auto* update) { AddHalves(update, "a", 3, 32, 1, {3}); }},
      {"of_rows is set, but the gradient lies in shared memory",
       [](auto* update) {
         Add(update, "a", {3, 32}, true)->mutable_shared()->set_size(3 * 32 * 4);
       }},
      {"gradients[1].feature 'a' is repeated",
       [](auto* update) {
         Add(update, "a", {3, 32}, true);
         Add(update, "a", {kSamples, 32}, false);
       }},
      {"data has 380 bytes",
       [](auto* update) {
         Add(update, "a", {3, 32}, true)->mutable_gradient()->mutable_data()->resize(380);
       }},
  };
  for (const Case& c : cases) {
    TrainCall call = Open();
    EXPECT_EQ(call.next_step, 0);
    LookUp(&call);
    v1::TrainRequest update;
    Add(&update, "b", {3, 32}, true);  // nothing is wrong with it
    v1::TrainRequest bad;
    c.add(&bad);
    v1::TrainRequest whole = bad;
    *whole.mutable_update()->add_gradients() = update.update().gradients(0);
    const grpc::Status status = Refusal(&call, whole);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << c.message;
    EXPECT_THAT(status.error_message(), HasSubstr(c.message));
    EXPECT_EQ(TableDigest(), before) << c.message;
  }
}

TEST_F(RowSumsTest, OnlyAGroupOfOneMaySendSums) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<TrainCall> ranks;
  v1::GroupOptions options;
  options.set_size(2);
  options.set_consistency(v1::ASYNC);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(BeginTrain(*api_, model_.id, "pair", rank, options));
  }
  for (TrainCall& rank : ranks) AwaitStart(&rank);
  LookUp(&ranks[0]);
  v1::TrainRequest update;
  Add(&update, "a", {3, 32}, true);
  const grpc::Status status = Refusal(&ranks[0], update);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(),
              HasSubstr("the update is not that of a stream whose group has one rank"));
  ranks[1].context->TryCancel();
  ranks[1].stream->Finish();
}

// In any order, beside gradients of samples, in one message or in several: the same bits.
TEST_F(RowSumsTest, SumsAndGradientsGoTogether) {
  const std::vector<std::vector<std::string>> orders = {
      {"a*", "b", "c", "d", "e*", "f*", "g*"},  {"a/", "b", "c", "d", "e/", "g/", "f/"},
      {"f/", "e/", "b*", "a/", "d", "g*", "c"}, {"d", "c", "b", "a*", "e", "f", "g/"},
      {"a", "b", "c", "d", "e", "f", "g"},      {"e*", "b*", "a*", "c", "d", "f*", "g"},
      {"g/", "c", "a", "b", "e*", "d", "f/"}};
  std::string expected;
  for (const bool in_parts : {false, true}) {
    for (const auto& order : orders) {
      Start();
      ASSERT_FALSE(HasFatalFailure());
      TrainCall call = Open();
      for (int step = 0; step < 2; ++step) {
        LookUp(&call);
        v1::TrainRequest update;
        for (const std::string& name : order) {
          const auto* const shape =
              std::find_if(std::begin(kShapes), std::end(kShapes),
                           [&](const RowsFeature& s) { return s.feature == name.substr(0, 1); });
          const bool sums = name.size() > 1, halves = sums && name[1] == '/';
          const int64_t rows = sums && name[0] != 'e' ? 3 : kSamples;
          float value = 0;
          for (int64_t i = 0; i < kSamples / rows; ++i) value += 0.1f;
          if (halves) {
            std::vector<int32_t> all(rows);
            std::iota(all.begin(), all.end(), 0);
            AddHalves(&update, shape->feature, rows, shape->dim, value, all);
          } else {
            Add(&update, shape->feature, {rows, shape->dim}, sums, value);
          }
          if (!in_parts || name == order.back()) continue;
          update.mutable_update()->set_step(call.next_step);
          update.mutable_update()->set_continues(true);
          ASSERT_TRUE(call.stream->Write(update));
          update.Clear();
        }
        Update(&call, update);
      }
      EndTrain(&call);
      if (expected.empty()) expected = TableDigest();
      EXPECT_EQ(TableDigest(), expected) << order[0] << order[1] << order[2] << in_parts;
    }
  }
}

// Of a stack that is nothing but sums: no more bytes than the trainer sent.
TEST_F(RowSumsTest, HalvesReachTheShardsAsTheyCame) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  const auto sent = [&] {  // to the shards
    double bytes = 0;
    for (int shard = 0; shard < 2; ++shard) {
      bytes += MetricSum(FetchMetrics(cluster_->shard_http_address(shard)),
                         "emberd_rpc_request_bytes_total", "method=\"ShardService/Apply\"");
    }
    return bytes;
  };
  TrainCall call = Open();
  const auto train = [&](const std::vector<int32_t>& lower_rows) {
    const double before = sent();
    LookUp(&call);
    v1::TrainRequest update;
    for (const char* feature : {"f", "g"}) AddHalves(&update, feature, 3, 16, 0.5f, lower_rows);
    Update(&call, update);
    return sent() - before;
  };
  constexpr int kHalves = 16 * 2;  // bytes of a row
  EXPECT_EQ(train({}), 2 * 3 * kHalves);
  // Both halves are as many bytes as floats.
  EXPECT_EQ(train({0, 1, 2}), 2 * 3 * 2 * kHalves);
  EndTrain(&call);
}

// Shards read what lies in shared memory in place, sample by sample; not beside sums.
TEST_F(RowSumsTest, SumsAndGradientsInSharedMemoryGoTogether) {
  constexpr int kDims[] = {8, 16};  // of two stacks
  std::string expected;
  for (const bool sums_and_shared : {false, true}) {
    StartCluster({.shards = 2},
                 "name: 'two' optimizer { sgd {} learning_rate: 1 }"
                 "tables { name: 'a' vocabulary_size: 50 embedding_dim: 8 combiner: SUM }"
                 "tables { name: 'b' vocabulary_size: 50 embedding_dim: 16 combiner: SUM }"
                 "features { name: 'a' table: 'a' } features { name: 'b' table: 'b' }");
    ASSERT_FALSE(HasFatalFailure());
    api_ = std::make_unique<Api>(cluster_->address());
    v1::ShareMemoryResponse invitation;
    ASSERT_TRUE(testing::Call(&v1::EmbeddingService::Stub::ShareMemory, *api_,
                              v1::ShareMemoryRequest(), &invitation)
                    .ok());
    auto arena = SharedArena::Connect(invitation.socket(), invitation.ticket());
    ASSERT_TRUE(arena.ok()) << arena.status();
    const auto block = (*arena)->Take(kSamples * 16 * sizeof(float));
    ASSERT_NE(block, nullptr);
    TrainCall call = Open();
    v1::TrainRequest request, update;
    request.mutable_lookup()->set_step(0);
    request.mutable_lookup()->set_distinct_rows(true);
    std::vector<int32_t> ids;
    for (int s = 0; s < kSamples; ++s) ids.push_back(s % 3);
    for (const char* name : {"a", "b"}) {
      v1::FeatureIds* const feature = request.mutable_lookup()->add_features();
      feature->set_feature(name);
      *feature->mutable_dense()->mutable_ids() = MakeVector(ids);
    }
    ASSERT_TRUE(call.stream->Write(request));
    v1::TrainResponse response;
    response.mutable_lookup()->set_continues(true);
    while (response.lookup().continues()) ASSERT_TRUE(call.stream->Read(&response));
    if (sums_and_shared) {
      Add(&update, "a", {3, kDims[0]}, true, 20);
    } else {
      Add(&update, "a", {kSamples, kDims[0]}, false, 1);
    }
    v1::FeatureGradient* const b = Add(&update, "b", {kSamples, kDims[1]}, false, 2);
    if (sums_and_shared) {
      const std::string data = std::move(*b->mutable_gradient()->mutable_data());
      std::copy(data.begin(), data.end(), block->data());
      b->mutable_gradient()->clear_data();
      *b->mutable_shared() = PlaceIn(*block, 0, data.size());
    }
    Update(&call, update);
    EndTrain(&call);
    if (!sums_and_shared) expected = TableDigest();
  }
  EXPECT_EQ(TableDigest(), expected);
}

// The client sums by itself, and leaves what is not finite to the server, which knows the sample.
class NonFiniteTest : public RowSumsTest {
 protected:
  // A step of the client's, with one bad value.
  absl::Status TrainStep(float bad) {
    client::ClientOptions options = cluster_->client_options();
    options.transport = client::TransportKind::kTcp;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    auto stream = (*client)->Train(model_, {.group = "bad"});
    EXPECT_TRUE(stream.ok()) << stream.status();
    const std::vector<int32_t> ids(kSamples, 7);
    std::vector<client::FeatureIds> features;
    std::vector<client::FeatureGradient> gradients;
    std::vector<float> good(kSamples * 32, 0.5f), values = good;
    values[40 * 32 + 3] = bad;
    for (const RowsFeature& shape : kShapes) {
      features.push_back({shape.feature, client::DenseIds{absl::MakeConstSpan(ids)}});
      const std::vector<float>& of = shape.feature[0] == 'b' ? values : good;
      gradients.push_back(
          {shape.feature, absl::MakeConstSpan(of).first(kSamples * shape.dim), kSamples});
    }
    absl::Status status = (*stream)->SendLookup((*stream)->next_step(), features);
    if (!status.ok()) return status;
    if (auto found = (*stream)->ReceiveLookup(); !found.ok()) return found.status();
    status = (*stream)->SendUpdate((*stream)->next_step(), gradients);
    if (!status.ok()) return status;
    auto updated = (*stream)->ReceiveUpdate();
    if (updated.ok()) skipped_ = updated->rows_skipped;
    return updated.status();
  }
  int64_t skipped_ = 0;
};

TEST_F(NonFiniteTest, AreRefusedBySample) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  const std::string before = TableDigest();
  const absl::Status status = TrainStep(-std::numeric_limits<float>::infinity());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("gradient of feature 'b' is -inf at sample 40, column 3"));
  EXPECT_EQ(TableDigest(), before);
}

TEST_F(NonFiniteTest, AreSkippedWhereTheTableSaysSo) {
  Start("on_nonfinite_gradient: SKIP_ROW");
  ASSERT_FALSE(HasFatalFailure());
  const absl::Status status = TrainStep(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(skipped_, 1);
}

}  // namespace row_sums_test
}  // namespace emberd::testing
