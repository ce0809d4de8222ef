// What shards say of the changes that they have made, and what that means. Catches: a loss that
// nobody notices, and a loss where a change is only on its way to a shard.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/coordinator/shard_models.h"
#include "server/coordinator/testing_shard.h"

namespace emberd::step {
namespace returned_rows_test {

using internal::v1::FindMutationResponse;

// Says what it was told to say, and finds the mutations of `knows`.
class TellingShard : public coordinator::TestingShard {
 public:
  explicit TellingShard(int index) : coordinator::TestingShard(index) {
    Answer(host::ShardVerb::kListMade, &TellingShard::OnListMade);
    Answer(host::ShardVerb::kFindMutation, &TellingShard::OnFind);
  }
  absl::StatusOr<internal::v1::ListMadeResponse> OnListMade(const internal::v1::ListMadeRequest&) {
    return made;
  }
  absl::StatusOr<FindMutationResponse> OnFind(const internal::v1::FindMutationRequest& request) {
    EXPECT_EQ(request.attempt(), 0) << "it puts an attempt in charge";
    asked.push_back(request.mutation().sequence());
    if (!found.ok()) return found.status();
    FindMutationResponse response;
    response.set_state(*found);
    return response;
  }

  void AddMutation(uint64_t sequence) {
    internal::v1::MutationName* name = made.add_mutations();
    name->set_client_id("c");
    name->set_sequence(sequence);
  }
  internal::v1::HeldStep* AddGroup(int64_t next_step, int64_t held_step = -1) {
    internal::v1::HeldStep* group = made.add_groups();
    group->set_group("g");
    group->set_known(true);
    group->set_next_step(next_step);
    group->set_held_step(held_step);
    group->set_complete(held_step >= 0);
    group->set_generation(3);
    return group;
  }

  internal::v1::ListMadeResponse made;
  absl::StatusOr<FindMutationResponse::State> found = FindMutationResponse::UNKNOWN;
  std::vector<uint64_t> asked;
};

class ReturnedRowsTest : public ::testing::Test {
 protected:
  std::string Lost() {
    const auto lost = coordinator::FindLostChange({{ahead_, behind_}, &threads_}, 1, 2, &context_);
    return lost.ok() ? *lost : std::string(lost.status().message());
  }

  BlockingPool threads_;
  rpc::CallContext context_{absl::InfiniteFuture()};
  const std::shared_ptr<TellingShard> ahead_ = std::make_shared<TellingShard>(0);
  const std::shared_ptr<TellingShard> behind_ = std::make_shared<TellingShard>(1);
};

TEST_F(ReturnedRowsTest, AStepThatIsHeldIsNotLost) {
  EXPECT_EQ(Lost(), "");
  ahead_->AddGroup(58);
  internal::v1::HeldStep* const group = behind_->AddGroup(57, /*held_step=*/57);
  EXPECT_EQ(Lost(), "");
  group->set_complete(false);
  EXPECT_EQ(Lost(), "group 'g': shard 0 has applied the steps before 58, shard 1 those before 57");
  group->set_complete(true);
  group->set_next_step(30);
  group->set_held_step(30);
  EXPECT_EQ(Lost(), "group 'g': shard 0 has applied the steps before 58, shard 1 those before 30");
  group->set_next_step(58);
  EXPECT_EQ(Lost(), "");
}

TEST_F(ReturnedRowsTest, AGroupThatWasDroppedIsNotLost) {
  ahead_->AddGroup(58);
  EXPECT_EQ(Lost(), "group 'g': shard 0 has applied the steps before 58, shard 1 none");
  behind_->made.set_forgotten_generation(2);
  EXPECT_EQ(Lost(), "group 'g': shard 0 has applied the steps before 58, shard 1 none");
  behind_->made.set_forgotten_generation(3);
  EXPECT_EQ(Lost(), "");
  behind_->AddGroup(1)->set_generation(4);
  EXPECT_EQ(Lost(), "");
  ahead_->made.mutable_groups(0)->set_generation(4);
  EXPECT_EQ(Lost(), "group 'g': shard 0 has applied the steps before 58, shard 1 those before 1");
  for (const auto& shard : {ahead_, behind_}) shard->made.mutable_groups(0)->set_known(false);
  EXPECT_EQ(Lost(), "") << "no step was made";
}

TEST_F(ReturnedRowsTest, AMutationIsLostWhereNobodyKnowsIt) {
  for (const uint64_t sequence : {58, 57, 56}) ahead_->AddMutation(sequence);
  for (const uint64_t sequence : {57, 56}) behind_->AddMutation(sequence);
  EXPECT_EQ(
      Lost(),
      "client 'c': shard 0 has made mutation 58, shard 1 has not, and the newest that it knows "
      "is 57");
  EXPECT_EQ(behind_->asked, std::vector<uint64_t>{58});
  for (const auto state : {FindMutationResponse::STAGED, FindMutationResponse::COMMITTED}) {
    behind_->found = state;
    EXPECT_EQ(Lost(), "");
  }
  behind_->found = absl::FailedPreconditionError("it is older than the record reaches");
  EXPECT_EQ(Lost(), "");
  behind_->found = absl::UnavailableError("it cannot be asked");
  EXPECT_EQ(Lost(), "it cannot be asked");
  behind_->found = FindMutationResponse::UNKNOWN;
  behind_->made.clear_mutations();
  EXPECT_EQ(Lost(),
            "client 'c': shard 0 has made mutation 58, shard 1 has not, and it knows none of this "
            "client");
}

}  // namespace returned_rows_test
}  // namespace emberd::step
