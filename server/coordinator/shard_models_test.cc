// What the answers of shards mean for a model. A failure here means that lost rows are taken for a
// model that is not there yet, and so replaced by initial ones, or that a model which is just being
// made or dropped is called lost.
// Covers: model_registry.cc
#include "server/coordinator/shard_models.h"

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::coordinator {
namespace shard_models_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kModel = 5;

ShardModels::Answer Answer(uint64_t history, bool serving, std::vector<uint64_t> dropped = {}) {
  internal::v1::ListModelsResponse response;
  if (history != 0) {
    internal::v1::HostedModel* model = response.add_models();
    model->set_model_id(kModel);
    model->set_name("m");
    model->set_history(history);
    model->set_serving(serving);
  }
  for (const uint64_t other : dropped) response.add_dropped(other);
  return response;
}
ShardModels::Answer Serves(uint64_t history) { return Answer(history, true); }
ShardModels::Answer Made(uint64_t history) { return Answer(history, false); }
ShardModels::Answer Damaged(uint64_t history) {
  ShardModels::Answer answer = Serves(history);
  answer->mutable_models(0)->set_damage("the file is damaged");
  return answer;
}
ShardModels::Answer Pinned(uint64_t history) {
  ShardModels::Answer answer = Serves(history);
  answer->mutable_models(0)->set_pinned(true);
  return answer;
}
ShardModels::Answer PinsLog(uint64_t history) {
  ShardModels::Answer answer = Serves(history);
  answer->mutable_models(0)->set_pins_log(true);
  return answer;
}
ShardModels::Answer Returned(uint64_t history, bool serving = true) {
  ShardModels::Answer answer = Answer(history, serving);
  answer->mutable_models(0)->set_returned(true);
  return answer;
}
ShardModels::Answer Nothing() { return Answer(0, false); }
ShardModels::Answer Dropped(uint64_t history) { return Answer(0, false, {history}); }
ShardModels::Answer Away() { return absl::UnavailableError("shard 9: away"); }

// Of a model that serves checkpoints: versions, those that are not served yet negative.
ShardModels::Answer Holds(const std::vector<int>& versions) {
  internal::v1::ListModelsResponse response;
  for (const int version : versions) {
    internal::v1::HostedModel* model = response.add_models();
    model->set_model_id(kModel);
    model->set_name("m");
    model->set_history(100 - std::abs(version));  // histories are random
    model->set_serving(version > 0);
    model->set_restored(true);
    model->mutable_serves()->set_model("trained");
    model->mutable_serves()->set_checkpoint(absl::StrCat("v", std::abs(version)));
    model->mutable_serves()->set_version(std::abs(version));
  }
  return response;
}

ModelVerdict Judge(std::vector<ShardModels::Answer> answers, uint64_t known = 0) {
  return ShardModels(std::move(answers)).Judge(kModel, known);
}

TEST(ShardModelsTest, AModelThatIsWhole) {
  EXPECT_EQ(Judge({Nothing(), Nothing()}).state, ModelState::kAbsent);
  const ModelVerdict whole = Judge({Serves(7), Serves(7)}, 7);
  EXPECT_EQ(whole.state, ModelState::kServing);
  EXPECT_EQ(whole.history, 7u);
  EXPECT_EQ(Judge({Serves(8), Serves(8)}, 7).history, 8u) << "it was reset";
  EXPECT_EQ(Judge({Serves(7), Away()}, 7).state, ModelState::kServing);
  EXPECT_EQ(Judge({Away(), Away()}, 7).state, ModelState::kUnknown);
}

TEST(ShardModelsTest, AModelThatIsBeingMade) {
  EXPECT_EQ(Judge({Made(7), Nothing()}).state, ModelState::kUnfinished);
  EXPECT_EQ(Judge({Made(7), Made(7)}).state, ModelState::kUnfinished);
  EXPECT_EQ(Judge({Serves(7), Made(7)}).state, ModelState::kUnfinished);
  EXPECT_EQ(Judge({Serves(7), Made(7)}, 7).state, ModelState::kUnfinished);
  EXPECT_EQ(Judge({Answer(8, false, {7}), Made(8)}, 7).state, ModelState::kUnfinished)
      << "a reset, which has told that the old rows are gone on purpose";
  EXPECT_EQ(Judge({Answer(8, false, {7}), Serves(7)}, 7).state, ModelState::kUnfinished);
  EXPECT_EQ(Judge({Dropped(7), Serves(7)}, 7).state, ModelState::kUnfinished) << "half a drop";
}

TEST(ShardModelsTest, RowsThatAClientFillsAreThoseOfItsDeclaration) {
  const auto code = [](std::vector<ShardModels::Answer> answers) {
    return ShardModels(std::move(answers)).CheckUnfilled(kModel, 7).code();
  };
  EXPECT_EQ(code({Made(7), Made(7)}), absl::StatusCode::kOk);
  EXPECT_EQ(code({Serves(7), Returned(7, false)}), absl::StatusCode::kOk) << "it is being served";
  EXPECT_EQ(code({Made(7), Nothing()}), absl::StatusCode::kDataLoss) << "a restart";
  EXPECT_EQ(code({Made(7), Made(8)}), absl::StatusCode::kAborted) << "another declaration";
  EXPECT_EQ(code({Made(7), Away()}), absl::StatusCode::kUnavailable);
}

TEST(ShardModelsTest, AModelThatHasLostRows) {
  EXPECT_THAT(Judge({Serves(7), Nothing(), Serves(7)}).without, ElementsAre(1));
  EXPECT_THAT(Judge({Nothing(), Serves(7)}, 7).without, ElementsAre(0));
  EXPECT_THAT(Judge({Nothing(), Nothing()}, 7).without, ElementsAre(0, 1));
  EXPECT_THAT(Judge({Nothing(), Away()}, 7).without, ElementsAre(0));
  EXPECT_THAT(Judge({Serves(7), Serves(8)}, 7).without, ElementsAre(1));
  EXPECT_EQ(Judge({Made(8), Serves(7)}, 7).state, ModelState::kLost);
}

TEST(ShardModelsTest, AModelWhoseRowsAreDamaged) {
  for (const uint64_t known : {0, 7}) {
    const ModelVerdict lost = Judge({Serves(7), Damaged(7), Serves(7)}, known);
    EXPECT_EQ(lost.state, ModelState::kLost);
    EXPECT_THAT(lost.without, ElementsAre(1));
    EXPECT_EQ(lost.damage, "the file is damaged");
    EXPECT_EQ(Judge({Damaged(7), Damaged(7)}, known).state, ModelState::kLost);
  }
  EXPECT_EQ(Judge({Damaged(7), Serves(8)}, 7).state, ModelState::kLost);
  EXPECT_TRUE(Judge({Serves(7), Nothing()}, 7).damage.empty());
}

TEST(ShardModelsTest, AModelIsPinnedIfAnyShardSaysSo) {
  EXPECT_TRUE(ShardModels({Nothing(), Away(), Pinned(7)}).Merged(kModel).pinned());
  EXPECT_FALSE(ShardModels({Nothing(), Away(), Pinned(7)}).Merged(kModel + 1).pinned());
  EXPECT_FALSE(ShardModels({Serves(7), Away(), Nothing()}).Merged(kModel).pinned());
  EXPECT_EQ(ShardModels({Away(), Away(), Serves(7)}).Merged(kModel).model_id(), kModel);
  EXPECT_EQ(ShardModels({Away(), Away(), Away()}).Merged(kModel).model_id(), 0u) << "nobody says";
  EXPECT_TRUE(ShardModels({Serves(7), Away(), PinsLog(7)}).Merged(kModel).pins_log());
  EXPECT_FALSE(ShardModels({Serves(7), Away(), PinsLog(7)}).Merged(kModel + 1).pins_log());
  EXPECT_FALSE(ShardModels({Pinned(7), Away(), Nothing()}).Merged(kModel).pins_log());
}

TEST(ShardModelsTest, AModelThatWasDropped) {
  const ModelVerdict verdict = Judge({Nothing(), Dropped(7)}, 7);
  EXPECT_EQ(verdict.state, ModelState::kAbsent) << "on purpose";
  EXPECT_THAT(verdict.without, IsEmpty());
  EXPECT_EQ(Judge({Dropped(6), Nothing()}, 7).state, ModelState::kLost);
}

TEST(ShardModelsTest, TheNewestCheckpointThatAllServeIsRead) {
  EXPECT_EQ(Judge({Holds({1}), Holds({1})}).history, 99u);
  EXPECT_EQ(Judge({Holds({1, -2}), Holds({1})}, 99).history, 99u) << "the next one is being loaded";
  EXPECT_EQ(Judge({Holds({1, 2}), Holds({-2, 1})}, 99).history, 99u) << "shard 1 was not told";
  EXPECT_EQ(Judge({Holds({1, 2}), Holds({2, 1})}, 99).history, 98u);
  EXPECT_EQ(Judge({Holds({2}), Holds({2, 1})}, 99).history, 98u) << "old rows are going";
  EXPECT_EQ(Judge({Holds({2}), Away()}, 99).history, 98u);
  EXPECT_THAT(Judge({Holds({1, 2}), Nothing()}, 98).without, ElementsAre(1));
  EXPECT_EQ(Judge({Holds({1, -2}), Holds({-2})}, 99).state, ModelState::kUnfinished)
      << "lost rows are being loaded again";
}

TEST(ShardModelsTest, HistoriesAreListedOnceAndByAge) {
  const ShardModels shards({Holds({2, 1}), Away(), Holds({1, -2, -3})});
  std::vector<std::pair<uint64_t, bool>> histories;
  for (const auto& model : shards.HistoriesOf(kModel)) {
    histories.emplace_back(model.history(), model.serving());
  }
  using Pair = std::pair<uint64_t, bool>;
  EXPECT_THAT(histories, UnorderedElementsAre(Pair(99, true), Pair(98, false), Pair(97, false)));
  EXPECT_EQ(histories.back(), Pair(99, true)) << "what is served comes last";
  EXPECT_EQ(shards.ServesOf(kModel, 98).checkpoint(), "v2");
  EXPECT_EQ(shards.ServesOf(kModel, 5).checkpoint(), "");
  EXPECT_EQ(shards.OnShard(0, "m").history(), 98u);
  EXPECT_EQ(shards.OnShard(2, "m").history(), 99u);
  EXPECT_EQ(shards.AllOnShard(2, "m").size(), 3u);
}

TEST(ShardModelsTest, NamesAreFoundOnAnyShard) {
  const ShardModels shards({Away(), Nothing(), Serves(7)});
  EXPECT_EQ(shards.FindName("m"), kModel);
  EXPECT_EQ(shards.FindName("n"), 0u);
  EXPECT_EQ(shards.OnShard(0, "m").history(), 0u);
  EXPECT_EQ(shards.OnShard(1, "m").history(), 0u);
  EXPECT_EQ(shards.OnShard(2, "m").history(), 7u);
  EXPECT_EQ(shards.complete().message(), "shard 9: away");
}

TEST(ShardModelsTest, RowsThatHaveComeBackAreComparedWhereAllShardsServeThem) {
  ShardModels models({Serves(7), Returned(7), Returned(7)});
  const std::vector<ShardModels::Returned> returned = models.EveryReturned();
  ASSERT_EQ(returned.size(), 1u);
  EXPECT_EQ(returned[0].model_id, kModel);
  EXPECT_EQ(returned[0].history, 7u);
  EXPECT_THAT(returned[0].shards, ElementsAre(1, 2));
  EXPECT_EQ(models.Judge(kModel, 0).state, ModelState::kServing);
  models.SetLostChange(kModel, "shard 1 has lost it");
  EXPECT_EQ(models.Judge(kModel, 0).state, ModelState::kLost);
  EXPECT_EQ(models.Judge(kModel, 0).history, 7u);
  EXPECT_EQ(models.Judge(kModel, 0).lost_change, "shard 1 has lost it");
  EXPECT_THAT(ShardModels({Serves(7), Serves(7)}).EveryReturned(), IsEmpty());
  EXPECT_THAT(ShardModels({Serves(7), Returned(8)}).EveryReturned(), IsEmpty());
  EXPECT_THAT(ShardModels({Serves(7), Returned(7, /*serving=*/false)}).EveryReturned(), IsEmpty());
}

}  // namespace shard_models_test
}  // namespace emberd::coordinator
