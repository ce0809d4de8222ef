// What travels from shards to coordinators is chosen by bytes, and must never show in a result:
// clusters of real processes train the same model in every mode and must end with the same bits. A
// failure here means that a mode loses samples, sums in another order, or is not used at all.
#include <map>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace result_mode_test {

constexpr int kSteps = 8;
constexpr int64_t kSamples = 61;

// For MixedBatch; of every storage type, one of them quantized, one with limits that cut batches.
constexpr char kModel[] = R"(
  name: "modes" seed: 5 optimizer { adagrad {} learning_rate: 0.1 }
  tables { name: "users" vocabulary_size: 1000 embedding_dim: 16 result_mode: MODE }
  tables { name: "items" vocabulary_size: 517 embedding_dim: 24 combiner: SUM result_mode: MODE
           storage_dtype: BFLOAT16 }
  tables { name: "tags" vocabulary_size: 60 embedding_dim: 12 combiner: SQRTN result_mode: MODE
           storage_dtype: FLOAT16 }
  tables { name: "genres" vocabulary_size: 33 embedding_dim: 12 combiner: SQRTN result_mode: MODE
           quantization { lower: -0.2 upper: 0.2 num_buckets: 256 } }
  tables { name: "cities" vocabulary_size: 300 embedding_dim: 5 combiner: SUM result_mode: MODE
           max_unique_ids_per_partition: 3 }
  tables { name: "days" vocabulary_size: 7 embedding_dim: 8 combiner: SUM result_mode: MODE }
  features { name: "user" table: "users" } features { name: "friends" table: "users" }
  features { name: "item" table: "items" } features { name: "history" table: "items" }
  features { name: "tag" table: "tags" } features { name: "genre" table: "genres" }
  features { name: "city" table: "cities" } features { name: "day" table: "days" }
)";

struct Outcome {
  std::string tables;
  double sums_bytes = 0;
  double rows_bytes = 0;
};

Outcome TrainIn(const std::string& mode, int shards) {
  Outcome outcome;
  auto cluster = Cluster::Start({.shards = shards, .sparsecores_per_shard = 8 / shards});
  if (!cluster.ok()) {
    ADD_FAILURE() << cluster.status();
    return outcome;
  }
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  if (client == nullptr) return outcome;
  const auto model = client->DeclareModel(absl::StrReplaceAll(kModel, {{"MODE", mode}}));
  if (!model.ok()) {
    ADD_FAILURE() << model.status();
    return outcome;
  }
  for (int step = 0; step < kSteps; ++step) {
    const absl::Status status = TrainStep(*client, *model, step, kSamples);
    if (!status.ok()) {
      ADD_FAILURE() << "step " << step << ": " << status;
      return outcome;
    }
  }
  outcome.tables = Digest(*client, *model).value_or("none");
  for (int shard = 0; shard < shards; ++shard) {
    const std::string page = FetchMetrics((*cluster)->shard_http_address(shard));
    const auto sent = [&](const char* as) {
      return MetricSum(page, "emberd_shard_sent_bytes_total", absl::StrCat("mode=\"", as, "\""));
    };
    outcome.sums_bytes += sent("partial_sums");
    outcome.rows_bytes += sent("unique_rows");
  }
  return outcome;
}

TEST(ResultModeTest, EveryModeEndsWithTheSameBitsAndAutoSendsTheLeast) {
  const Outcome sums = TrainIn("PARTIAL_SUMS", 2);
  ASSERT_FALSE(sums.tables.empty());
  EXPECT_GT(sums.sums_bytes, 0);
  EXPECT_EQ(sums.rows_bytes, 0);
  const Outcome rows = TrainIn("UNIQUE_ROWS", 4);
  EXPECT_EQ(rows.tables, sums.tables);
  EXPECT_EQ(rows.sums_bytes, 0);
  EXPECT_GT(rows.rows_bytes, 0);
  const Outcome chosen = TrainIn("AUTO", 2);
  EXPECT_EQ(chosen.tables, sums.tables);
  EXPECT_GT(chosen.sums_bytes, 0);
  EXPECT_GT(chosen.rows_bytes, 0);
  EXPECT_LT(chosen.sums_bytes + chosen.rows_bytes, sums.sums_bytes);
}

}  // namespace result_mode_test
}  // namespace emberd::testing
