// Rows that many samples have travel once between trainer and coordinator, and so do the sums of
// their gradients. A failure here means that a model gets other bits because of how it was sent.
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "gtest/gtest.h"
#include "tests/integration/rows_model.h"
#include "tests/testing/cluster.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace distinct_rows_test {

using client::WireType;

constexpr int kSamples = 900;

// One batch: ids, a sample without one here and there; for some features more than one id.
struct Batch {
  std::vector<std::vector<int64_t>> splits, values;

  Batch(uint64_t seed, const std::string& with_two_ids) {
    std::mt19937_64 random(seed);
    for (const RowsFeature& shape : kShapes) {
      std::vector<int64_t>& split = splits.emplace_back(1, 0);
      std::vector<int64_t>& ids = values.emplace_back();
      for (int s = 0; s < kSamples; ++s) {
        int64_t count = random() % 10 == 0 ? 0 : 1;
        if (with_two_ids == shape.feature && s == 5) count = 2;
        for (int64_t i = 0; i < count; ++i) {
          ids.push_back(static_cast<int64_t>(random() % kRowsOfTable * (random() % 100) / 100));
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
  bool overflow = false;  // of sums of finite gradients
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
    auto model = (*client)->DeclareModel(RowsModel(absl::StrCat("m", models_++)));
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
        if (run.overflow && activation.feature == "b") {
          gradient.back() = run.type == WireType::kFloat32 ? std::numeric_limits<float>::max()
                                                           : FromBfloat16(0x7f7f);
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
                     absl::StrCat("emberd_rpc_", direction, "_bytes_total"),
                     "method=\"EmbeddingService/Train\"");
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
             {.overflow = true},
             {.type = WireType::kBfloat16, .overflow = true},
             {.without = "b"},
             {.without = "ae"},
             {.without = "abcd"},  // a stack without gradients
             {.without = "g"},     // sums that cannot be passed on
             {.with_two_ids = "f"},
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
    // c and d share a table, so theirs are not summed.
    EXPECT_LT(sent, (type == WireType::kFloat32 ? 0.75 : 0.85) * sent_whole);
  }
}

}  // namespace distinct_rows_test
}  // namespace emberd::testing
