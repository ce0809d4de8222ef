// What groups of trainers rely on is nowhere but on the shards, and these are started again, on
// machines with other clocks: which generation is the newest, how far the ranks of a BOUNDED group
// are, and which of them have finished.
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/group_training.h"

namespace emberd::testing {
namespace group_restart_test {

constexpr int kShards = 2;
constexpr int kSparsecores = 4;

class GroupRestartTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = kShards,
                  .sparsecores_per_shard = kSparsecores,
                  .config = absl::StrCat("storage { directory: \"", storage_.path(),
                                         "\" durability: CHECKPOINT every_seconds: 100000 }")},
                 GroupModel("m", 0));
  }

  // A rank of a BOUNDED group, again and again until the rows are back.
  std::unique_ptr<client::TrainStream> Join(int rank) {
    client::TrainOptions options{.group = "run",
                                 .rank = rank,
                                 .size = 2,
                                 .consistency = client::Consistency::kBounded,
                                 .staleness_bound = 1};
    options.step_timeout = absl::Seconds(4);
    auto stream = Await([&] { return client_->Train(model_, options); });
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }
  static absl::Status Run(client::TrainStream& stream, int rank, int64_t begin, int64_t end) {
    return RunSteps(stream, rank, 2, begin, end, /*pipelined=*/false);
  }
  void Save() {
    auto saved = client_->SaveCheckpoint("m", {});
    ASSERT_TRUE(saved.ok()) << saved.status();
  }

  const TempDir storage_ = *TempDir::Create();
};

// Whichever shard the group's host is; with a checkpoint from before the rank had finished, or from
// after it.
class BoundedRestartTest : public GroupRestartTest,
                           public ::testing::WithParamInterface<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Shards, BoundedRestartTest,
                         ::testing::Combine(::testing::Values(0, 1), ::testing::Bool()));

TEST_P(BoundedRestartTest, GoesOnWithoutTheRankThatHasFinished) {
  const auto [shard, saved_after_the_end] = GetParam();
  auto first = Join(0);
  auto second = Join(1);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  for (int64_t step = 0; step < 4; ++step) {
    ASSERT_TRUE(Run(*first, 0, step, step + 1).ok());
    ASSERT_TRUE(Run(*second, 1, step, step + 1).ok());
  }
  if (!saved_after_the_end) Save();
  ASSERT_TRUE(Run(*first, 0, 4, 5).ok());
  ASSERT_TRUE(Run(*second, 1, 4, 5).ok());
  ASSERT_TRUE(second->Finish().ok());
  // Further than the bound would let it, were the other rank still there.
  const absl::Status ahead = Run(*first, 0, 5, 12);
  ASSERT_TRUE(ahead.ok()) << ahead;
  if (saved_after_the_end) Save();

  cluster_->KillShard(shard);
  ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  ASSERT_FALSE(Run(*first, 0, 12, 13).ok()) << "its rows went back to the checkpoint";
  first = Join(0);
  ASSERT_NE(first, nullptr);
  const int64_t next = first->next_step();
  EXPECT_EQ(next, saved_after_the_end ? 12 : 4);
  const absl::Status status = Run(*first, 0, next, next + 6);
  EXPECT_TRUE(status.ok()) << status;

  // One that comes back all the same is waited for again, from where the checkpoint has it.
  second = Join(1);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->next_step(), saved_after_the_end ? 5 : 4);
  const absl::Status waits = Run(*first, 0, next + 6, next + 8);
  EXPECT_EQ(waits.code(), absl::StatusCode::kDeadlineExceeded) << waits;
}

// A rank that was not at work when the host came back has not finished, only because nobody has
// heard of it; and is not at its first step.
TEST_F(GroupRestartTest, ABoundedGroupStillWaitsForARankThatHasNotFinished) {
  for (const int shard : {0, 1}) {
    SCOPED_TRACE(shard);
    auto first = Join(0);
    auto second = Join(1);
    ASSERT_TRUE(first != nullptr && second != nullptr);
    const int64_t begin = first->next_step();
    for (int64_t step = begin; step < begin + 4; ++step) {
      ASSERT_TRUE(Run(*first, 0, step, step + 1).ok());
      ASSERT_TRUE(Run(*second, 1, step, step + 1).ok());
    }
    Save();
    cluster_->KillShard(shard);
    ASSERT_TRUE(cluster_->RestartShard(shard).ok());
    second.reset();
    first = Join(0);
    ASSERT_NE(first, nullptr);
    ASSERT_EQ(first->next_step(), begin + 4);
    // The bound is one step: two begin before the other has made any.
    const absl::Status near = Run(*first, 0, begin + 4, begin + 6);
    EXPECT_TRUE(near.ok()) << near;
    const absl::Status far = Run(*first, 0, begin + 6, begin + 7);
    EXPECT_EQ(far.code(), absl::StatusCode::kDeadlineExceeded) << far;
    EXPECT_THAT(std::string(far.message()),
                ::testing::HasSubstr(absl::StrCat("rank 1 is in step ", begin + 4)));
    first.reset();
    second = Join(1);
    first = Join(0);
    ASSERT_TRUE(first != nullptr && second != nullptr);
    ASSERT_TRUE(Run(*second, 1, begin + 4, begin + 6).ok());
  }
}

// What the host knows of ranks that are not there is of the rows that were: they had finished, or
// were further.
TEST_F(GroupRestartTest, TheBoundHoldsForOtherRowsToo) {
  const auto train = [&](int64_t steps) {
    auto first = Join(0);
    auto second = Join(1);
    ASSERT_TRUE(first != nullptr && second != nullptr);
    for (int64_t step = first->next_step(), end = step + steps; step < end; ++step) {
      ASSERT_TRUE(Run(*first, 0, step, step + 1).ok());
      ASSERT_TRUE(Run(*second, 1, step, step + 1).ok());
    }
    ASSERT_TRUE(first->Finish().ok() && second->Finish().ok());
  };
  const auto expect_bound = [&](int64_t begin) {
    auto first = Join(0);
    ASSERT_NE(first, nullptr);
    ASSERT_EQ(first->next_step(), begin);
    const absl::Status near = Run(*first, 0, begin, begin + 2);
    EXPECT_TRUE(near.ok()) << near;
    const absl::Status far = Run(*first, 0, begin + 2, begin + 3);
    EXPECT_EQ(far.code(), absl::StatusCode::kDeadlineExceeded) << far;
    EXPECT_THAT(std::string(far.message()),
                ::testing::HasSubstr(absl::StrCat("rank 1 is in step ", begin)));
  };
  ASSERT_NO_FATAL_FAILURE(train(4));
  ASSERT_TRUE(client_->ResetModel("m").ok());
  ASSERT_NO_FATAL_FAILURE(expect_bound(0));

  ASSERT_TRUE(client_->DropModel("m").ok());
  const auto declared = client_->DeclareModel(GroupModel("m", 0));
  ASSERT_TRUE(declared.ok()) << declared.status();
  model_ = *declared;
  ASSERT_NO_FATAL_FAILURE(expect_bound(0));
}

class AloneRestartTest : public GroupRestartTest {
 protected:
  void SetUp() override {
    StartCluster({.shards = kShards,
                  .sparsecores_per_shard = kSparsecores,
                  .config = absl::StrCat("storage { directory: \"", storage_.path(),
                                         "\" durability: LOG }")},
                 GroupModel("m", 0));
  }
};

// With a log nothing is lost, and a rank that needs no others would not notice that its host does
// not know it any more.
TEST_F(AloneRestartTest, ARankAloneJoinsAgain) {
  for (const auto consistency : {client::Consistency::kSync, client::Consistency::kAsync}) {
    const std::string name = absl::StrCat("alone-", static_cast<int>(consistency));
    SCOPED_TRACE(name);
    const client::TrainOptions options{.group = name, .consistency = consistency};
    auto stream = Await([&] { return client_->Train(model_, options); });
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE(RunSteps(**stream, 0, 1, 0, 1, /*pipelined=*/false).ok());
    for (int shard = 0; shard < kShards; ++shard) {
      cluster_->KillShard(shard);
      ASSERT_TRUE(cluster_->RestartShard(shard).ok());
    }
    // Until the coordinator has found the shards again, so that no lookup fails for that.
    const auto serves = Await([&] { return Digest(*client_, model_); });
    ASSERT_TRUE(serves.ok()) << serves.status();
    int64_t step = 1;
    absl::Status status;
    EXPECT_TRUE(Eventually([&] {
      status = RunSteps(**stream, 0, 1, step, step + 1, /*pipelined=*/false);
      step += status.ok() ? 1 : 0;
      return !status.ok();
    }));
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("join again"));
    stream = client_->Train(model_, options);
    ASSERT_TRUE(stream.ok()) << stream.status();
    EXPECT_EQ((*stream)->next_step(), step);
    EXPECT_EQ(client_->DropGroup("m", name).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(RunSteps(**stream, 0, 1, step, step + 1, /*pipelined=*/false).ok());
  }
}

// Its batch went with the shards.
TEST_F(AloneRestartTest, ShardsThatAreStartedAgainBeforeAnUpdateMeanJoinAgain) {
  auto stream = client_->Train(model_, {.group = "alone"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE(RunSteps(**stream, 0, 1, 0, 1, /*pipelined=*/false).ok());
  const auto restart = [&](const client::TrainLookupResult&) {
    for (int shard = 0; shard < kShards; ++shard) {
      cluster_->KillShard(shard);
      EXPECT_TRUE(cluster_->RestartShard(shard).ok());
    }
    EXPECT_TRUE(Await([&] { return Digest(*client_, model_); }).ok());
  };
  const absl::Status refused = RunSteps(**stream, 0, 1, 1, 2, /*pipelined=*/false, restart);
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("join again"));
  stream = client_->Train(model_, {.group = "alone"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->next_step(), 1);
  EXPECT_TRUE(RunSteps(**stream, 0, 1, 1, 2, /*pipelined=*/false).ok());
}

// Nobody hears that the rank leaves, nor that it has finished, as long as the shards stand still.
TEST_F(GroupRestartTest, ARankMayFinishWhileTheShardsStandStill) {
  auto first = Join(0);
  auto second = Join(1);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  ASSERT_TRUE(Run(*first, 0, 0, 1).ok());
  ASSERT_TRUE(Run(*second, 1, 0, 1).ok());
  for (int shard = 0; shard < kShards; ++shard) cluster_->SuspendShard(shard);
  const absl::Status finished = second->Finish();
  EXPECT_TRUE(finished.ok()) << finished;
  const auto lost = [&] {
    return absl::StrContains(cluster_->CoordinatorLog(0), "it is told again finished=true");
  };
  EXPECT_TRUE(Eventually(lost));
  for (int shard = 0; shard < kShards; ++shard) cluster_->ResumeShard(shard);
  const auto goes_on = [&] {
    first = Join(0);
    return first != nullptr && Run(*first, 0, first->next_step(), first->next_step() + 5).ok();
  };
  EXPECT_TRUE(Eventually(goes_on));
  ASSERT_TRUE(first->Finish().ok());
  EXPECT_TRUE(client_->DropGroup("m", "run").ok());
}

// The shards have heard of a generation from a host whose clock was ten minutes ahead, or which was
// started again on a machine whose clock is ten minutes behind. Joins had to wait until it had
// caught up.
TEST_F(GroupRestartTest, NoClockSaysWhichGenerationIsNext) {
  const Api api(cluster_->address());
  v1::DescribeModelRequest describe;
  describe.set_model_id(model_.id);
  v1::DescribeModelResponse described;
  ASSERT_TRUE(Call(&v1::EmbeddingService::Stub::DescribeModel, api, describe, &described).ok());
  internal::v1::OpenGroupRequest request;
  request.set_model_id(model_.id);
  request.set_history(described.history());
  request.set_group("run");
  request.set_generation(absl::ToUnixMicros(absl::Now() + absl::Minutes(10)));
  request.set_opener(1);
  request.set_size(1);
  for (int shard = 0; shard < kShards; ++shard) {
    internal::v1::ShardPlace place;
    place.set_shard(shard);
    place.set_shards(kShards);
    place.set_sparsecores_per_shard(kSparsecores);
    for (int other = 0; other < kShards; ++other) place.add_others(0);
    grpc::ClientContext context;
    context.AddMetadata("emberd-shard-place-bin", place.SerializeAsString());
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    internal::v1::OpenGroupResponse response;
    const grpc::Status opened =
        internal::v1::ShardService::NewStub(
            grpc::CreateChannel(cluster_->shard_address(shard), grpc::InsecureChannelCredentials()))
            ->OpenGroup(&context, request, &response);
    ASSERT_TRUE(opened.ok()) << opened.error_message();
  }
  uint64_t last = request.generation();
  for (int64_t step = 0; step < 3; ++step) {
    auto stream = client_->Train(model_, {.group = "run"});
    ASSERT_TRUE(stream.ok()) << stream.status();
    EXPECT_EQ((*stream)->next_step(), step);
    EXPECT_GT((*stream)->generation(), last);
    last = (*stream)->generation();
    const absl::Status status = RunSteps(**stream, 0, 1, step, step + 1, /*pipelined=*/false);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE((*stream)->Finish().ok());
  }
}

}  // namespace group_restart_test
}  // namespace emberd::testing
