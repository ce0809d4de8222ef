// A shard whose groups a test opens, steps and forgets.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/host/testing_host.h"

namespace emberd::host {

// A GroupPart, in braces.
struct TestPart {
  std::string group;
  uint64_t generation = 0;
  int rank = 0;
  int size = 1;
  int64_t step = 0;

  operator GroupPart() const {
    GroupPart part;
    part.set_group(group);
    part.set_generation(generation);
    part.set_rank(rank);
    part.set_size(size);
    part.set_step(step);
    return part;
  }
};

class GroupStepsTest : public TestHost {
 protected:
  using TestHost::TestHost;

  absl::StatusOr<internal::v1::OpenGroupResponse> Open(uint64_t generation, int size,
                                                       uint64_t model_id = 5, uint64_t opener = 9) {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(model_id);
    request.set_group("g");
    request.set_generation(generation);
    request.set_opener(opener);
    request.set_size(size);
    request.set_history(kHistory);
    return host_->OpenGroup(request);
  }
  internal::v1::OpenGroupResponse Ask(const std::string& group, int ranks = 0) {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(5);
    request.set_group(group);
    request.set_ranks(ranks);
    request.set_history(kHistory);
    auto answer = host_->OpenGroup(request);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return *std::move(answer);
  }
  absl::StatusOr<std::vector<std::string>> Drop(const std::vector<std::string>& groups) {
    internal::v1::DropGroupsRequest request;
    request.set_model_id(5);
    request.set_history(kHistory);
    request.mutable_groups()->Add(groups.begin(), groups.end());
    auto dropped = host_->DropGroups(request);
    if (!dropped.ok()) return dropped.status();
    return std::vector<std::string>(dropped->dropped().begin(), dropped->dropped().end());
  }

  // Looks a batch up and stages it as the part of one rank.
  absl::StatusOr<ShardHost::StagedApply> StagePart(const TestPart& part,
                                                   const ApplyCommand* changed = nullptr,
                                                   const std::vector<int64_t>& features = {3}) {
    const uint64_t handle = ++last_handle_;
    auto gathered = Gather(handle, absl::Hours(1), features);
    if (!gathered.ok()) return gathered.status();
    ApplyCommand command = changed == nullptr ? Command(handle) : *changed;
    command.batch_handle = handle;
    command.group_part = part;
    auto staged = Stage(std::move(command));
    if (!staged.ok()) {
      EXPECT_TRUE(host_->ReleaseBatch(5, handle).ok());  // the refused part gave it back
    }
    return staged;
  }

  absl::StatusOr<RowCounts> Decide(uint64_t generation, int64_t step, bool commit,
                                   uint64_t history = kHistory) {
    internal::v1::DecideStepRequest request;
    request.set_model_id(5);
    request.set_group("g");
    request.set_generation(generation);
    request.set_step(step);
    request.set_commit(commit);
    request.set_history(history);
    return rpc::WaitForAnswer<absl::StatusOr<RowCounts>>(
        [&](const auto& done) { host_->DecideStep(request, done); });
  }

  uint64_t last_handle_ = 0;
};

}  // namespace emberd::host
