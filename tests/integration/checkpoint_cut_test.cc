// A checkpoint holds one moment between two updates, whoever trains meanwhile: the same updates on
// all shards, of every table, and the groups' steps with them. A failure here means that some shard
// was cut before an update that another one has seen, that an update under way was lost or made
// twice, or that an incremental checkpoint misses rows.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/counting.h"

namespace emberd::testing {
namespace checkpoint_cut_test {

constexpr int kSaves = 12;  // two of three are incremental
constexpr char kModelName[] = "count";

class CheckpointCutTest : public ::testing::Test {
 protected:
  ClusterOptions Options(int shards, int sparsecores, bool embedded) {
    return {.shards = shards,
            .sparsecores_per_shard = sparsecores,
            .coordinators = embedded ? 1 : 2,
            .embedded = embedded,
            .config = absl::StrCat("storage { directory: \"", storage_.path(), "\" }")};
  }
  void Start(const ClusterOptions& options) {
    client_.reset();
    cluster_.reset();
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
  }

  // The checkpoint is a moment; trainers of all kinds go on from it, and nothing of theirs is lost
  // or made twice.
  void ExpectMoment(const client::CheckpointInfo& info, bool train) {
    SCOPED_TRACE(absl::StrCat("checkpoint ", info.name, " on ", info.parent));
    auto restored = client_->RestoreCheckpoint(kModelName, {.name = info.name});
    ASSERT_TRUE(restored.ok()) << restored.status();
    auto model = client_->DescribeModel(kModelName);
    ASSERT_TRUE(model.ok()) << model.status();
    auto counts = ReadCounts(*client_, *model);
    ASSERT_TRUE(counts.ok()) << counts.status();
    const absl::Status whole = CheckMoment(*counts, info);
    EXPECT_TRUE(whole.ok()) << whole;
    if (!train) return;
    CountingTrainers trainers(*cluster_, 0, *model, *counts, absl::StrCat("on ", info.name));
    EXPECT_TRUE(trainers.Await(3));
    const absl::Status stopped = trainers.Stop();
    ASSERT_TRUE(stopped.ok()) << stopped;
    auto after = ReadCounts(*client_, *model);
    ASSERT_TRUE(after.ok()) << after.status();
    EXPECT_EQ(*after, trainers.made());
  }

  TempDir storage_ = *TempDir::Create();
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(CheckpointCutTest, IsOneMomentOfAllTrainers) {
  Start(Options(4, 2, /*embedded=*/false));
  auto model = client_->DeclareModel(CountingModel(kModelName));
  ASSERT_TRUE(model.ok()) << model.status();
  auto begin = ReadCounts(*client_, *model);
  ASSERT_TRUE(begin.ok()) << begin.status();
  std::vector<client::CheckpointInfo> saved;
  {
    CountingTrainers trainers(*cluster_, 1, *model, *begin, "trainer");
    for (int i = 0; i < kSaves; ++i) {
      ASSERT_TRUE(trainers.Await(2));
      const Counts before = trainers.made();
      auto checkpoint = client_->SaveCheckpoint(
          kModelName, {.name = absl::StrCat("c", i), .incremental = i % 3 != 0});
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      // What was acknowledged before it is in it.
      EXPECT_GE(checkpoint->checkpoint.changes, SumOf(before));
      EXPECT_EQ(checkpoint->checkpoint.chain, i % 3);
      saved.push_back(checkpoint->checkpoint);
    }
    const absl::Status stopped = trainers.Stop();
    ASSERT_TRUE(stopped.ok()) << stopped;
    auto counts = ReadCounts(*client_, *model);
    ASSERT_TRUE(counts.ok()) << counts.status();
    EXPECT_EQ(*counts, trainers.made()) << "saving has changed what is trained";
  }
  for (const client::CheckpointInfo& info : saved) ExpectMoment(info, /*train=*/false);
  ExpectMoment(saved.front(), /*train=*/true);
  for (const auto& [shards, sparsecores] :
       {std::pair(2, 4), std::pair(8, 1), std::pair(1, 8), std::pair(8, 2)}) {
    SCOPED_TRACE(absl::StrCat(shards, " shards of ", sparsecores));
    Start(Options(shards, sparsecores, /*embedded=*/true));
    for (size_t i = 0; i < saved.size(); i += 5) ExpectMoment(saved[i], /*train=*/true);
  }
}

// Each checkpoint builds on the one before; the last one is merged while training goes on, and then
// needs none of them. What was restored from it is the parent of what comes next.
TEST_F(CheckpointCutTest, AChainIsMergedAndGoesOn) {
  Start(Options(4, 2, /*embedded=*/false));
  auto model = client_->DeclareModel(CountingModel(kModelName));
  ASSERT_TRUE(model.ok()) << model.status();
  auto begin = ReadCounts(*client_, *model);
  ASSERT_TRUE(begin.ok()) << begin.status();
  const Api api(cluster_->address());
  client::CheckpointInfo last;
  const auto save = [&](CountingTrainers& trainers, const std::string& name) {
    ASSERT_TRUE(trainers.Await(2));
    auto saved = client_->SaveCheckpoint(kModelName, {.name = name, .incremental = true});
    ASSERT_TRUE(saved.ok()) << saved.status();
    last = saved->checkpoint;
  };
  {
    CountingTrainers trainers(*cluster_, 1, *model, *begin, "trainer");
    for (const char* name : {"a", "b", "c", "d"}) ASSERT_NO_FATAL_FAILURE(save(trainers, name));
    EXPECT_EQ(last.chain, 3);
    EXPECT_EQ(client_->DeleteCheckpoint(kModelName, "a").status().code(),
              absl::StatusCode::kFailedPrecondition);
    v1::MergeCheckpointRequest merge;
    merge.set_model(kModelName);
    merge.set_name("d");
    v1::CheckpointProgress merged;
    const grpc::Status status =
        Call(&v1::CheckpointService::Stub::MergeCheckpoint, api, merge, &merged);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(merged.checkpoint().chain(), 0);
    const absl::Status stopped = trainers.Stop();
    ASSERT_TRUE(stopped.ok()) << stopped;
  }
  const client::CheckpointInfo whole = last;
  for (const char* name : {"c", "b", "a"}) {
    auto deleted = client_->DeleteCheckpoint(kModelName, name);
    ASSERT_TRUE(deleted.ok()) << deleted.status();
  }
  ExpectMoment(whole, /*train=*/true);
  // On other shards, with the same partitions: it is known what changes from here on.
  Start(Options(2, 4, /*embedded=*/false));
  ExpectMoment(whole, /*train=*/false);
  model = client_->DescribeModel(kModelName);
  ASSERT_TRUE(model.ok()) << model.status();
  begin = ReadCounts(*client_, *model);
  ASSERT_TRUE(begin.ok()) << begin.status();
  CountingTrainers trainers(*cluster_, 1, *model, *begin, "later");
  ASSERT_NO_FATAL_FAILURE(save(trainers, "e"));
  EXPECT_EQ(last.parent, "d");
  ASSERT_NO_FATAL_FAILURE(save(trainers, "f"));
  EXPECT_EQ(last.parent, "e");
  const absl::Status stopped = trainers.Stop();
  ASSERT_TRUE(stopped.ok()) << stopped;
  Start(Options(1, 8, /*embedded=*/true));
  ExpectMoment(last, /*train=*/true);
}

}  // namespace checkpoint_cut_test
}  // namespace emberd::testing
