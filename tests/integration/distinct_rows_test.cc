// Rows that many samples have travel once between trainer and coordinator, and so do the sums of
// their gradients. A failure here means that a model gets other bits because of how it was sent,
// or that a trainer's sums are believed where they must not be.
//
// Covers: server/coordinator/distinct_rows.cc, server/coordinator/gradient_reader.cc
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/seed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace {

using client::WireType;
using ::testing::HasSubstr;

constexpr int kSamples = 900;
constexpr int kRows = 300;

// Tables of two stacks, of which one has padding columns; c and d share a table.
struct Shape {
  const char* feature;
  const char* table;
  int dim;
};
constexpr Shape kShapes[] = {
    {"a", "ta", 32}, {"b", "tb", 32}, {"c", "tc", 32}, {"d", "tc", 32}, {"e", "te", 20}};

std::string ModelText(const std::string& name, const std::string& of_tables = "") {
  std::string text =
      absl::StrCat("name: '", name, "' optimizer { adagrad {} learning_rate: 0.1 }\n");
  std::string last;
  for (const Shape& shape : kShapes) {
    if (last != shape.table) {
      absl::StrAppend(&text, "tables { name: '", shape.table, "' vocabulary_size: ", kRows,
                      " embedding_dim: ", shape.dim, " combiner: SUM ", of_tables,
                      " initializer { uniform { lower: -1 upper: 1 } } }\n");
    }
    last = shape.table;
    absl::StrAppend(&text, "features { name: '", shape.feature, "' table: '", shape.table, "' }\n");
  }
  return text;
}

// One batch: ids, a sample without one here and there; for some features more than one id.
struct Batch {
  std::vector<std::vector<int64_t>> splits, values;

  Batch(uint64_t seed, const std::string& with_two_ids) {
    std::mt19937_64 random(seed);
    for (const Shape& shape : kShapes) {
      std::vector<int64_t>& split = splits.emplace_back(1, 0);
      std::vector<int64_t>& ids = values.emplace_back();
      for (int s = 0; s < kSamples; ++s) {
        int64_t count = random() % 10 == 0 ? 0 : 1;
        if (with_two_ids == shape.feature && s == 5) count = 2;
        for (int64_t i = 0; i < count; ++i) {
          ids.push_back(static_cast<int64_t>(random() % kRows * (random() % 100) / 100));
        }
        split.push_back(static_cast<int64_t>(ids.size()));
      }
    }
  }
  std::vector<client::FeatureIds> Features() const {
    std::vector<client::FeatureIds> features;
    for (size_t f = 0; f < splits.size(); ++f) {
      features.push_back({kShapes[f].feature, client::RaggedIds{absl::MakeConstSpan(splits[f]),
                                                                absl::MakeConstSpan(values[f])}});
    }
    return features;
  }
};

struct How {
  WireType type = WireType::kFloat32;
  bool distinct_rows = true;
  std::string with_two_ids = {};
  // Features whose update has no gradient.
  std::string without = {};
  bool concat = false;
  bool pipelined = false;
  int size = 1;  // of the group, whose other ranks are not there: ASYNC
};

class DistinctRowsTest : public ::testing::Test {
 protected:
  void Start(const ClusterOptions& options) {
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }

  // Trains a new model. The bits of all activations, and of the tables at the end.
  std::string Train(const How& run, int steps = 4) {
    client::ClientOptions options = cluster_->client_options();
    options.transport = client::TransportKind::kTcp;
    options.activation_type = options.gradient_type = run.type;
    options.distinct_rows = run.distinct_rows;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    auto model = (*client)->DeclareModel(ModelText(absl::StrCat("m", models_++)));
    EXPECT_TRUE(model.ok()) << model.status();
    auto stream = (*client)->Train(*model, {.group = "g", .pipelined = run.pipelined});
    EXPECT_TRUE(stream.ok()) << stream.status();
    std::string bits;
    for (int64_t step = 0; step < steps; ++step) {
      const Batch batch(step, run.with_two_ids);
      const absl::Status status = Step(**stream, step, batch, run, &bits);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return "failed";
    }
    const absl::Status status = (*stream)->Finish();
    EXPECT_TRUE(status.ok()) << status;
    return bits + Digest(**client, *model).value_or("none");
  }

  static absl::Status Step(client::TrainStream& stream, int64_t step, const Batch& batch,
                           const How& run, std::string* bits) {
    absl::Status status = stream.SendLookup(step, batch.Features(), {.concat = run.concat});
    if (!status.ok()) return status;
    auto found = stream.ReceiveLookup();
    if (!found.ok()) return found.status();
    std::vector<std::vector<float>> values;
    std::vector<client::FeatureGradient> gradients;
    std::mt19937 random(static_cast<uint32_t>(step));
    for (const client::Activation& activation : found->activations) {
      std::vector<float>& gradient = values.emplace_back();
      const int64_t stride = activation.row_stride;
      for (int64_t s = 0; s < activation.samples; ++s) {
        const auto row = activation.values.subspan(s * stride, activation.dim);
        bits->append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(float));
        // Of sizes that make each order of a sum show.
        for (const float value : row) {
          gradient.push_back(value * static_cast<float>(1 << random() % 20));
        }
      }
      if (run.without.find(activation.feature) != std::string::npos) continue;
      gradients.push_back({activation.feature, gradient, activation.samples});
    }
    status = stream.SendUpdate(step, gradients);
    if (!status.ok() || (run.pipelined && step == 0)) return status;
    return stream.ReceiveUpdate().status();
  }

  // Bytes that the trainers' streams have brought so far, and taken.
  double TrainBytes(const char* direction) {
    return MetricSum(FetchMetrics(cluster_->http_address()),
                     absl::StrCat("emberd_rpc_", direction, "_bytes_total"), "method=\"EmbeddingService/Train\"");
  }

  std::unique_ptr<Cluster> cluster_;
  int models_ = 0;
};

TEST_F(DistinctRowsTest, EverybodyGetsTheSameBits) {
  for (const int shards : {1, 2, 4}) {
    Start({.shards = shards, .sparsecores_per_shard = 4 / shards, .config = "transport: TCP"});
    ASSERT_FALSE(HasFatalFailure());
    for (const How& run : std::vector<How>{
             {},
             {.type = WireType::kBfloat16},
             {.concat = true},
             {.type = WireType::kBfloat16, .concat = true},
             {.pipelined = true},
             {.with_two_ids = "a"},  // a stack without rows beside one that has them
             {.with_two_ids = "e"},
             {.without = "b"},
             {.without = "ae"},
             {.without = "abcd"},  // a stack without gradients
         }) {
      How whole = run;
      whole.distinct_rows = false;
      EXPECT_EQ(Train(run), Train(whole))
          << shards << " shards, bfloat16 " << (run.type == WireType::kBfloat16) << ", concat "
          << run.concat << ", pipelined " << run.pipelined << ", two ids of '" << run.with_two_ids
          << "', no gradient of '" << run.without << "'";
    }
  }
}

// What a coordinator has from its shards by shared memory, it sends on from there.
TEST_F(DistinctRowsTest, EverybodyGetsTheSameBitsFromSharedMemory) {
  Start({.shards = 2, .sparsecores_per_shard = 2});
  ASSERT_FALSE(HasFatalFailure());
  for (const How& run :
       std::vector<How>{{}, {.type = WireType::kBfloat16}, {.with_two_ids = "e"}}) {
    How whole = run;
    whole.distinct_rows = false;
    EXPECT_EQ(Train(run), Train(whole)) << "two ids of '" << run.with_two_ids << "'";
  }
}

// Otherwise the tests above compare a way with itself.
TEST_F(DistinctRowsTest, FewerBytesTravel) {
  Start({.shards = 2, .sparsecores_per_shard = 2, .config = "transport: TCP"});
  ASSERT_FALSE(HasFatalFailure());
  double sent = 0, received = 0;
  const auto measure = [&](const How& run) {
    const double sent_before = TrainBytes("request"), received_before = TrainBytes("response");
    Train(run);
    sent = TrainBytes("request") - sent_before;
    received = TrainBytes("response") - received_before;
  };
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    measure({.type = type, .distinct_rows = false});
    const double sent_whole = sent, received_whole = received;
    EXPECT_GT(sent_whole, 1e5);
    EXPECT_GT(received_whole, 1e5);
    measure({.type = type});
    EXPECT_LT(received, 0.6 * received_whole);
    // c and d share a table, so theirs are not summed; nor are those that are rounded.
    EXPECT_LT(sent, (type == WireType::kFloat32 ? 0.75 : 1.01) * sent_whole);
  }
}

// Raw streams, whose updates need not be a client's.
class RawRowsTest : public ClusterFixture {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>;
  struct Call {
    std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
    std::unique_ptr<Stream> stream;
    int64_t next_step = 0;
  };

  void Start(const std::string& of_tables = "") {
    StartCluster({.shards = 2, .sparsecores_per_shard = 2, .config = "transport: TCP"},
                 ModelText("raw", of_tables));
    ASSERT_FALSE(HasFatalFailure());
    api_ = std::make_unique<Api>(cluster_->address());
  }
  Call Open() {
    Call call;
    call.context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    call.stream = api_->embedding->Train(call.context.get());
    v1::TrainRequest start;
    start.mutable_start()->set_model_id(model_.id);
    start.mutable_start()->set_group("g");
    v1::TrainResponse started;
    EXPECT_TRUE(call.stream->Write(start) && call.stream->Read(&started));
    call.next_step = started.started().next_step();
    return call;
  }
  // Of ids 0, 1, 2, 0, 1, 2, ...; e's are all different. The activations, or rows, by feature.
  std::vector<v1::FeatureActivation> LookUp(Call* call, bool distinct_rows = true) {
    v1::TrainRequest request;
    request.mutable_lookup()->set_step(call->next_step);
    request.mutable_lookup()->set_distinct_rows(distinct_rows);
    for (const Shape& shape : kShapes) {
      std::vector<int32_t> ids;
      for (int s = 0; s < kRawSamples; ++s) ids.push_back(shape.feature[0] == 'e' ? s : s % 3);
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
  // The error that the update ends with.
  static grpc::Status Refusal(Call* call, v1::TrainRequest update) {
    update.mutable_update()->set_step(call->next_step);
    EXPECT_TRUE(call->stream->Write(update));
    v1::TrainResponse response;
    EXPECT_FALSE(call->stream->Read(&response)) << response.ShortDebugString();
    return call->stream->Finish();
  }
  void Update(Call* call, v1::TrainRequest update) {
    update.mutable_update()->set_step(call->next_step++);
    ASSERT_TRUE(call->stream->Write(update));
    v1::TrainResponse response;
    ASSERT_TRUE(call->stream->Read(&response)) << call->stream->Finish().error_message();
    updated_ = response.update();
  }

  static constexpr int kRawSamples = 60;
  std::unique_ptr<Api> api_;
  v1::TrainUpdateResult updated_;
};

TEST_F(RawRowsTest, AnAnswerHasEachRowOnce) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  Call call = Open();
  const auto found = LookUp(&call);
  Call other = Open();  // takes the place of the first
  const auto whole = LookUp(&other, /*distinct_rows=*/false);
  for (size_t f = 0; f < found.size(); ++f) {
    const v1::FeatureActivation& rows = found[f];
    EXPECT_EQ(rows.feature(), kShapes[f].feature);
    EXPECT_FALSE(whole[f].has_rows() || whole[f].has_row_index());
    EXPECT_FALSE(rows.has_activation()) << "rows are chosen by the bytes of all features";
    const int64_t count = kShapes[f].feature[0] == 'e' ? kRawSamples : 3;
    const int64_t width = (kShapes[f].dim + 7) / 8 * 8;
    EXPECT_THAT(rows.rows().shape(), ::testing::ElementsAre(count, width));
    EXPECT_THAT(rows.row_index().shape(), ::testing::ElementsAre(kRawSamples));
    EXPECT_EQ(rows.row_index().dtype(), v1::INT32);
    const std::vector<float> values = Floats(rows.rows()),
                             activation = Floats(whole[f].activation());
    for (int s = 0; s < kRawSamples; ++s) {
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

TEST_F(RawRowsTest, WhoDoesNotAskGetsActivationsAndMaySendNoSums) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  const std::string before = TableDigest();
  Call call = Open();
  LookUp(&call, /*distinct_rows=*/false);
  v1::TrainRequest update;
  Add(&update, "a", {3, 32}, true);
  const grpc::Status status = Refusal(&call, update);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("gradient of feature 'a': of_rows is set, but the "
                                                "lookup was not answered with its rows"));
  EXPECT_EQ(TableDigest(), before);
}

TEST_F(RawRowsTest, SumsThatCannotBeTakenChangeNothing) {
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
      {"dtype is BFLOAT16, and sums are FLOAT32",
       [](auto* update) {
         v1::FeatureGradient* const gradient = Add(update, "a", {3, 32}, true);
         gradient->mutable_gradient()->set_dtype(v1::BFLOAT16);
         gradient->mutable_gradient()->mutable_data()->resize(3 * 32 * 2);
       }},
      {"of_rows is set, but the gradient lies in shared memory",
       [](auto* update) {
         Add(update, "a", {3, 32}, true)->mutable_shared()->set_size(3 * 32 * 4);
       }},
      {"gradients[1].feature 'a' is repeated",
       [](auto* update) {
         Add(update, "a", {3, 32}, true);
         Add(update, "a", {kRawSamples, 32}, false);
       }},
      {"data has 380 bytes",
       [](auto* update) {
         Add(update, "a", {3, 32}, true)->mutable_gradient()->mutable_data()->resize(380);
       }},
  };
  for (const Case& c : cases) {
    Call call = Open();
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

TEST_F(RawRowsTest, OnlyAGroupOfOneMaySendSums) {
  Start();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<Call> ranks(2);
  v1::TrainResponse response;
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    ranks[rank].stream = api_->embedding->Train(ranks[rank].context.get());
    v1::TrainRequest start;
    start.mutable_start()->set_model_id(model_.id);
    start.mutable_start()->set_group("pair");
    start.mutable_start()->set_rank(rank);
    start.mutable_start()->mutable_options()->set_size(2);
    start.mutable_start()->mutable_options()->set_consistency(v1::ASYNC);
    ASSERT_TRUE(ranks[rank].stream->Write(start));
  }
  for (Call& rank : ranks) ASSERT_TRUE(rank.stream->Read(&response));
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
TEST_F(RawRowsTest, SumsAndGradientsGoTogether) {
  const std::vector<std::vector<std::string>> orders = {{"a*", "b", "c", "d", "e*"},
                                                        {"d", "c", "b", "a*", "e"},
                                                        {"a", "b", "c", "d", "e"},
                                                        {"e*", "b*", "a*", "c", "d"},
                                                        {"c", "a", "b", "e*", "d"}};
  std::string expected;
  for (const bool in_parts : {false, true}) {
    for (const auto& order : orders) {
      Start();
      ASSERT_FALSE(HasFatalFailure());
      Call call = Open();
      for (int step = 0; step < 2; ++step) {
        LookUp(&call);
        v1::TrainRequest update;
        for (const std::string& name : order) {
          const auto* const shape =
              std::find_if(std::begin(kShapes), std::end(kShapes),
                           [&](const Shape& s) { return s.feature == name.substr(0, 1); });
          const bool sums = name.size() > 1;
          const bool all_different = name[0] == 'e';
          // 20 samples of 0.5 have the same row, and a sum of 10.
          Add(&update, shape->feature, {sums && !all_different ? 3 : kRawSamples, shape->dim}, sums,
              sums && !all_different ? 10.0f : 0.5f);
          if (!in_parts || name == order.back()) continue;
          update.mutable_update()->set_step(call.next_step);
          update.mutable_update()->set_continues(true);
          ASSERT_TRUE(call.stream->Write(update));
          update.Clear();
        }
        Update(&call, update);
      }
      call.stream->WritesDone();
      EXPECT_TRUE(call.stream->Finish().ok());
      if (expected.empty()) expected = TableDigest();
      EXPECT_EQ(TableDigest(), expected) << order[0] << order[1] << order[2] << in_parts;
    }
  }
}

// The client sums by itself, and leaves what is not finite to the server, which knows the sample.
class NonFiniteTest : public RawRowsTest {
 protected:
  // A step of the client's, with one bad value.
  absl::Status TrainStep(float bad) {
    client::ClientOptions options = cluster_->client_options();
    options.transport = client::TransportKind::kTcp;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    auto stream = (*client)->Train(model_, {.group = "bad"});
    EXPECT_TRUE(stream.ok()) << stream.status();
    const std::vector<int32_t> ids(kRawSamples, 7);
    std::vector<client::FeatureIds> features;
    std::vector<client::FeatureGradient> gradients;
    std::vector<float> good(kRawSamples * 32, 0.5f), values = good;
    values[40 * 32 + 3] = bad;
    for (const Shape& shape : kShapes) {
      features.push_back({shape.feature, client::DenseIds{absl::MakeConstSpan(ids)}});
      const std::vector<float>& of = shape.feature[0] == 'b' ? values : good;
      gradients.push_back(
          {shape.feature, absl::MakeConstSpan(of).first(kRawSamples * shape.dim), kRawSamples});
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

}  // namespace
}  // namespace emberd::testing
