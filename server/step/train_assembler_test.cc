#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/step/request_reader.h"

namespace emberd::step {
namespace train_assembler_test {

using ::testing::HasSubstr;

v1::TrainRequest Lookup(int64_t step, const std::string& feature, bool continues) {
  v1::TrainRequest request;
  request.mutable_lookup()->set_step(step);
  request.mutable_lookup()->set_continues(continues);
  request.mutable_lookup()->set_activation_dtype(v1::BFLOAT16);
  request.mutable_lookup()->add_features()->set_feature(feature);
  return request;
}

v1::TrainRequest Update(int64_t step, const std::string& feature, bool continues) {
  v1::TrainRequest request;
  request.mutable_update()->set_step(step);
  request.mutable_update()->set_continues(continues);
  request.mutable_update()->add_gradients()->set_feature(feature);
  request.mutable_update()->add_hyperparameters()->set_table("of " + feature);
  return request;
}

TEST(TrainAssemblerTest, PutsThePartsOfALookupTogether) {
  TrainAssembler assembler;
  v1::TrainRequest part = Lookup(3, "a", true);
  auto whole = assembler.Add(&part, 100);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_FALSE(whole->has_value());
  EXPECT_TRUE(assembler.in_request());
  part = Lookup(3, "b", false);
  whole = assembler.Add(&part, 50);
  ASSERT_TRUE(whole.ok() && whole->has_value());
  EXPECT_FALSE(assembler.in_request());
  EXPECT_EQ((*whole)->step, 3);
  EXPECT_EQ((*whole)->bytes, 150);
  ASSERT_TRUE((*whole)->lookup.has_value());
  EXPECT_FALSE((*whole)->update.has_value());
  EXPECT_EQ((*whole)->lookup->features_size(), 2);
  EXPECT_EQ((*whole)->lookup->features(1).feature(), "b");
  EXPECT_EQ((*whole)->lookup->activation_dtype(), v1::BFLOAT16);
}

TEST(TrainAssemblerTest, PutsThePartsOfAnUpdateTogether) {
  TrainAssembler assembler;
  v1::TrainRequest part = Update(3, "c", true);
  auto whole = assembler.Add(&part, 10);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_FALSE(whole->has_value());
  EXPECT_TRUE(assembler.in_request());
  part = Update(3, "d", false);
  part.mutable_update()->set_checkpoint("now");
  whole = assembler.Add(&part, 20);
  ASSERT_TRUE(whole.ok() && whole->has_value()) << whole.status();
  EXPECT_FALSE(assembler.in_request());
  EXPECT_FALSE((*whole)->lookup.has_value());
  EXPECT_EQ((*whole)->step, 3);
  EXPECT_EQ((*whole)->bytes, 30);
  const v1::ApplyGradientsRequest& gradients = (*whole)->update->gradients;
  EXPECT_EQ(gradients.step(), 3);
  ASSERT_EQ(gradients.gradients_size(), 2);
  EXPECT_EQ(gradients.gradients(0).feature(), "c");
  EXPECT_EQ(gradients.gradients(1).feature(), "d");
  ASSERT_EQ(gradients.hyperparameters_size(), 2);
  EXPECT_EQ(gradients.hyperparameters(0).table(), "of c");
  EXPECT_EQ((*whole)->update->checkpoint, "now");
}

TEST(TrainAssemblerTest, ASkippedStepHasNoGradients) {
  TrainAssembler assembler;
  v1::TrainRequest skip;
  skip.mutable_update()->set_step(3);
  skip.mutable_update()->set_skip(true);
  auto whole = assembler.Add(&skip, 1);
  ASSERT_TRUE(whole.ok() && whole->has_value()) << whole.status();
  EXPECT_TRUE((*whole)->update->skip);
  v1::TrainRequest plain = Update(4, "a", false);
  EXPECT_FALSE((*assembler.Add(&plain, 1))->update->skip);
  v1::TrainRequest first = Update(5, "a", true);
  ASSERT_TRUE(assembler.Add(&first, 1).ok());
  skip.mutable_update()->set_step(5);
  skip.mutable_update()->set_skip(true);
  const absl::Status refused = assembler.Add(&skip, 1).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(),
            "update.skip is true in step 5, but gradients of feature \"a\" came with it; a skipped "
            "step has none");
}

TEST(TrainAssemblerTest, RefusesWhatDoesNotBelongWhereItStands) {
  struct Case {
    v1::TrainRequest first;
    v1::TrainRequest second;
    std::string message;
  };
  v1::TrainRequest start;
  start.mutable_start()->set_group("g");
  const Case cases[] = {
      {Lookup(3, "a", true), Lookup(4, "a", false),
       "step is 4 in a message of the request of step 3"},
      {Update(3, "a", true), Update(2, "a", false),
       "step is 2 in a message of the request of step 3"},
      {Lookup(3, "a", true), Update(3, "a", false), "before the lookup of step 3 is complete"},
      {Update(3, "a", true), Lookup(4, "a", false), "before the update of step 3 is complete"},
      {Lookup(3, "a", false), start, "start: it was sent already"},
      {Lookup(3, "a", false), v1::TrainRequest(), "neither lookup nor update"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    TrainAssembler assembler;
    v1::TrainRequest first = c.first;
    v1::TrainRequest second = c.second;
    ASSERT_TRUE(assembler.Add(&first, 1).ok());
    const absl::Status status = assembler.Add(&second, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(c.message));
  }
}

}  // namespace train_assembler_test
}  // namespace emberd::step
