// Threads belong to the process, not to its models. A pool for each model would be noticed only on
// machines with many models, by their load.
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <latch>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/config.h"
#include "server/coordinator/coordinator.h"
#include "server/host/shard_backend.h"

namespace emberd::coordinator {
namespace thread_count_test {

int64_t ThreadsOfThisProcess() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator());
}

void DeclareAndLookUp(Coordinator& coordinator, int number) {
  rpc::CallContext context(absl::Now() + absl::Seconds(100));
  v1::DeclareModelRequest declare;
  *declare.mutable_config() = *config::ParseModel(
      absl::StrCat("name: 'm", number, "' tables { name: 't' vocabulary_size: 64 embedding_dim: 8 ",
                   "optimizer { sgd {} learning_rate: 0.5 } } ",
                   "features { name: 'f' table: 't' batch_size: 4 }"));
  const auto declared = coordinator.DeclareModel(declare, &context);
  ASSERT_TRUE(declared.ok()) << declared.status();

  const std::vector<int64_t> ids = {1, 2, 3, 63};
  v1::LookupRequest lookup;
  lookup.set_model_id(declared->model_id());
  v1::FeatureIds& feature = *lookup.add_features();
  feature.set_feature("f");
  v1::Tensor& tensor = *feature.mutable_dense()->mutable_ids();
  tensor.set_dtype(v1::INT64);
  tensor.add_shape(static_cast<int64_t>(ids.size()));
  tensor.set_data(ids.data(), ids.size() * sizeof(int64_t));
  const auto found = coordinator.resources().steps->Lookup(lookup, v1::Token::TRAINER, &context);
  ASSERT_TRUE(found.ok()) << found.status();
}

// In-process shards, as gRPC starts threads as it likes.
TEST(ThreadCountTest, FiftyModelsNeedTheThreadsOfOne) {
  auto cluster = *config::ParseCluster(
      "shards { address: '127.0.0.1:1' } shards { address: '127.0.0.1:2' } "
      "coordinators { address: '127.0.0.1:3' } sparsecores_per_shard: 2");
  ASSERT_TRUE(config::CompleteCluster(&cluster).ok());
  ops::Metrics metrics("test");
  ThreadPools threads(2);
  std::vector<std::shared_ptr<host::ShardBackend>> shards;
  for (int i = 0; i < 2; ++i)
    shards.push_back(*host::MakeLocalShard(cluster, i, &metrics, &threads));
  Coordinator coordinator(cluster, 0, shards, &metrics, &threads);

  // Threads that may block start when they are needed: more than a step needs are there already.
  std::latch together(16);
  threads.blocking.RunEach(16, [&](int) { together.arrive_and_wait(); });
  DeclareAndLookUp(coordinator, 0);
  const int64_t threads_of_one = ThreadsOfThisProcess();
  EXPECT_GE(threads_of_one, 2 + 15);
  for (int i = 1; i < 50; ++i) DeclareAndLookUp(coordinator, i);
  EXPECT_EQ(ThreadsOfThisProcess(), threads_of_one);
}

}  // namespace thread_count_test
}  // namespace emberd::coordinator
