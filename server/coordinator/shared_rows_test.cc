// A model that is declared through one coordinator while the model that has its rows is dropped
// through another one. A failure here means that the rows of some shards are those that were
// trained, and those of the others are initial ones, without a word.
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/thread_pools.h"
#include "config/config.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/testing_shard.h"
#include "server/group/rendezvous.h"
#include "server/host/shard_host.h"
#include "server/host/verbs.h"
#include "server/ops/metrics.h"

namespace emberd::coordinator {
namespace shared_rows_test {

using host::ShardVerb;
using ::testing::HasSubstr;

constexpr int64_t kRows = 20;
constexpr int64_t kDim = 8;

// A shard in this process that does something first when it is next asked for a verb.
class OrderedShard final : public TestingShard {
 public:
  OrderedShard(int index, std::unique_ptr<host::ShardHost> host)
      : TestingShard(index), host_(std::move(host)) {}

  void BeforeNext(ShardVerb verb, std::function<void()> call) {
    absl::MutexLock lock(&mutex_);
    before_[verb] = std::move(call);
  }

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    std::function<void()> call;
    {
      absl::MutexLock lock(&mutex_);
      std::swap(call, before_[verb]);
    }
    if (call != nullptr) call();
    return verbs_.Call(verb, request, response, context);
  }

  const std::unique_ptr<host::ShardHost> host_;
  group::Rendezvous rendezvous_;
  host::ShardVerbs verbs_{host_.get(), &rendezvous_};
  absl::Mutex mutex_;
  std::map<ShardVerb, std::function<void()>> before_ ABSL_GUARDED_BY(mutex_);
};

// Two shards, and two coordinators over them.
class SharedRowsTest : public ::testing::Test {
 protected:
  SharedRowsTest() {
    const v1::ClusterConfig cluster = *config::ParseCluster(R"(
      shards { address: '127.0.0.1:0' } shards { address: '127.0.0.1:0' }
      sparsecores_per_shard: 1 shard_threads: 2
      coordinators { address: '127.0.0.1:0' } coordinators { address: '127.0.0.1:0' })");
    for (int i = 0; i < 2; ++i) {
      auto shard = *host::ShardHost::Create(cluster, i, &metrics_, &threads_);
      shard->WaitUntilReady();
      shards_.push_back(std::make_shared<OrderedShard>(i, std::move(shard)));
    }
    const std::vector<std::shared_ptr<host::ShardBackend>> backends(shards_.begin(), shards_.end());
    for (int i = 0; i < 2; ++i) {
      coordinators_.push_back(
          std::make_unique<Coordinator>(cluster, i, backends, &metrics_, &threads_));
    }
  }

  absl::StatusOr<uint64_t> Declare(int coordinator, const std::string& name) {
    v1::DeclareModelRequest request;
    *request.mutable_config() = *config::ParseModel(absl::StrCat("name: '", name, R"('
      enable_variable_deduplication: true
      tables { name: "t" vocabulary_size: 20 embedding_dim: 8 combiner: SUM resource { name: "r" }
               optimizer { sgd {} learning_rate: 1 } initializer { row_id {} } }
      features { name: "f" table: "t" })"));
    rpc::CallContext context(absl::InfiniteFuture());
    const auto declared = coordinators_[coordinator]->DeclareModel(request, &context);
    if (!declared.ok()) return declared.status();
    return declared->model_id();
  }

  void Drop(int coordinator, const std::string& name) {
    v1::DropModelRequest request;
    request.set_name(name);
    rpc::CallContext context(absl::InfiniteFuture());
    const auto dropped = coordinators_[coordinator]->DropModel(request, &context);
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    EXPECT_TRUE(dropped->dropped());
  }

  static v1::Tensor Ids() {
    std::vector<int64_t> ids;
    for (int64_t id = 0; id < kRows; ++id) ids.push_back(id);
    v1::Tensor tensor;
    tensor.set_dtype(v1::INT64);
    tensor.add_shape(kRows);
    tensor.set_data(ids.data(), ids.size() * sizeof(int64_t));
    return tensor;
  }

  // All rows, of both shards.
  std::vector<float> Read(uint64_t model) {
    v1::ReadRowsRequest request;
    request.set_model_id(model);
    request.set_table("t");
    *request.mutable_ids() = Ids();
    rpc::CallContext context(absl::InfiniteFuture());
    const auto read = coordinators_[0]->resources().rows->ReadRows(request, &context);
    EXPECT_TRUE(read.ok()) << read.status();
    std::vector<float> rows(kRows * kDim);
    if (!read.ok() || read->values().data().size() != rows.size() * sizeof(float)) return {};
    std::memcpy(rows.data(), read->values().data().data(), rows.size() * sizeof(float));
    return rows;
  }

  // A model "trained" whose rows have changed on both shards. Returns those of before.
  std::vector<float> Train() {
    const auto model = Declare(1, "trained");
    EXPECT_TRUE(model.ok()) << model.status();
    if (!model.ok()) return {};
    const std::vector<float> initial = Read(*model);
    const std::vector<float> changed(kRows * kDim, 100.0f);
    v1::AssignRowsRequest request;
    request.set_model_id(*model);
    request.mutable_mutation()->set_client_id("test");
    request.mutable_mutation()->set_sequence(++sequence_);
    request.set_table("t");
    *request.mutable_ids() = Ids();
    request.mutable_values()->set_dtype(v1::FLOAT32);
    request.mutable_values()->add_shape(kRows);
    request.mutable_values()->add_shape(kDim);
    request.mutable_values()->set_data(changed.data(), changed.size() * sizeof(float));
    rpc::CallContext context(absl::InfiniteFuture());
    const auto assigned = coordinators_[1]->resources().rows->AssignRows(request, &context);
    EXPECT_TRUE(assigned.ok()) << assigned.status();
    EXPECT_EQ(Read(*model), changed);
    return initial;
  }

  ops::Metrics metrics_{"test"};
  ThreadPools threads_{2};
  std::vector<std::shared_ptr<OrderedShard>> shards_;
  std::vector<std::unique_ptr<Coordinator>> coordinators_;
  uint64_t sequence_ = 0;
};

TEST_F(SharedRowsTest, AModelThatJoinsRowsOnOneShardBeforeTheyGoBeginsAnew) {
  const std::vector<float> initial = Train();
  shards_[1]->BeforeNext(ShardVerb::kCreateModel, [&] { Drop(1, "trained"); });
  const auto model = Declare(0, "joins");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(Read(*model), initial);
}

// As above, but on shard 0 the other coordinator finds what the first one has made.
TEST_F(SharedRowsTest, WhoeverFinishesADeclarationSeesWhatItJoined) {
  const std::vector<float> initial = Train();
  shards_[1]->BeforeNext(ShardVerb::kCreateModel, [&] {
    Drop(1, "trained");
    const auto model = Declare(1, "joins");
    EXPECT_TRUE(model.ok()) << model.status();
  });
  const auto model = Declare(0, "joins");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(Read(*model), initial);
}

TEST_F(SharedRowsTest, AModelThatJoinsRowsWhereTheyHaveNotGoneYetIsRefused) {
  const std::vector<float> initial = Train();
  shards_[1]->BeforeNext(ShardVerb::kDropModel, [&] {
    const absl::Status refused = Declare(0, "joins").status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kAborted) << refused;
    EXPECT_THAT(std::string(refused.message()),
                ::testing::AllOf(HasSubstr("share rows with [] on shard 0, but with [trained"),
                                 HasSubstr("] on shard 1")));
  });
  ASSERT_NO_FATAL_FAILURE(Drop(1, "trained"));
  const auto model = Declare(0, "joins");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(Read(*model), initial);
}

}  // namespace shared_rows_test
}  // namespace emberd::coordinator
