// For tests: a Rendezvous on a clock that the test moves, and calls whose answers it can look at.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/group/rendezvous.h"

namespace emberd::group::testing {

namespace pb = internal::v1;

// Requests of a rank to the host of a group.
template <typename Request>
Request RequestOf(const GroupId& id, int rank) {
  Request request;
  request.mutable_name()->set_model_id(id.model_id);
  request.mutable_name()->set_group(id.group);
  request.set_rank(rank);
  return request;
}
template <typename Request>
Request RequestOf(const GroupId& id, uint64_t generation, int rank) {
  auto request = RequestOf<Request>(id, rank);
  request.set_generation(generation);
  return request;
}
inline pb::JoinRequest JoinOf(const GroupId& id, int rank, const v1::GroupOptions& options,
                              const std::string& coordinator, uint64_t history = 0) {
  auto request = RequestOf<pb::JoinRequest>(id, rank);
  request.set_history(history);
  *request.mutable_options() = options;
  request.set_coordinator(coordinator);
  return request;
}
inline pb::AllGatherRequest GatherOf(const GroupId& id, uint64_t generation, int rank, int64_t step,
                                     int group_key, const std::string& value) {
  auto request = RequestOf<pb::AllGatherRequest>(id, generation, rank);
  request.set_instance_key(step);
  request.set_group_key(group_key);
  request.set_value(value);
  return request;
}
inline pb::AdvanceRequest AdvanceOf(const GroupId& id, uint64_t generation, int rank,
                                    int64_t next_step, int64_t wait_for) {
  auto request = RequestOf<pb::AdvanceRequest>(id, generation, rank);
  request.set_next_step(next_step);
  request.set_wait_for(wait_for);
  return request;
}
inline pb::LeaveRequest LeaveOf(const GroupId& id, uint64_t generation, int rank,
                                const std::string& reason, bool finished) {
  auto request = RequestOf<pb::LeaveRequest>(id, generation, rank);
  request.set_reason(reason);
  request.set_finished(finished);
  return request;
}

// A call under way. `result` is its answer; `answers` counts how often there was one.
template <typename Result>
struct Asked {
  struct State {
    std::optional<Result> result;
    int answers = 0;
  };

  bool waits() const { return state->answers == 0; }
  // The status of the answer; UNKNOWN while there is none.
  absl::Status status() const {
    if (waits()) return absl::UnknownError("no answer yet");
    if constexpr (std::is_same_v<Result, absl::Status>) {
      return *state->result;
    } else {
      return state->result->status();
    }
  }
  bool ok() const { return status().ok(); }
  const auto& operator*() const { return **state->result; }
  const auto* operator->() const { return &**state->result; }

  auto Callback() const {
    return [state = state](Result result) {
      state->result = std::move(result);
      ++state->answers;
    };
  }

  std::shared_ptr<State> state = std::make_shared<State>();
  Withdraw withdraw;
};

using AskedJoin = Asked<absl::StatusOr<pb::JoinResponse>>;
using AskedGather = Asked<absl::StatusOr<pb::AllGatherResponse>>;
using AskedStatus = Asked<absl::Status>;

inline v1::GroupOptions MakeOptions(int size, v1::Consistency consistency = v1::SYNC,
                                    int64_t step_timeout_ms = 500) {
  v1::GroupOptions options;
  options.set_size(size);
  options.set_consistency(consistency);
  options.set_step_timeout_ms(step_timeout_ms);
  return options;
}

class TestingHost {
 public:
  explicit TestingHost(RendezvousOptions options = {})
      : rendezvous_(WithClock(std::move(options))) {}

  Rendezvous* operator->() { return &rendezvous_; }
  void Pass(absl::Duration time) {
    now_ += time;
    rendezvous_.ExpireNow();
  }
  absl::Time now() const { return now_; }

  AskedJoin Join(const GroupId& id, int rank, const v1::GroupOptions& options,
                 uint64_t history = 0) {
    AskedJoin join;
    join.withdraw = rendezvous_.Join(
        JoinOf(id, rank, options, "coordinator of " + std::to_string(rank), history),
        join.Callback());
    return join;
  }
  // All ranks; the generation.
  uint64_t JoinAll(const GroupId& id, const v1::GroupOptions& options) {
    AskedJoin last;
    for (int rank = 0; rank < options.size(); ++rank) last = Join(id, rank, options);
    return last.ok() ? last->generation() : 0;
  }
  AskedGather AllGather(const GroupId& id, uint64_t generation, int rank, int group_key,
                        int64_t step, const std::string& value) {
    AskedGather gather;
    gather.withdraw = rendezvous_.AllGather(GatherOf(id, generation, rank, step, group_key, value),
                                            gather.Callback());
    return gather;
  }
  AskedStatus Advance(const GroupId& id, uint64_t generation, int rank, int64_t next_step,
                      int64_t wait_for) {
    AskedStatus advance;
    advance.withdraw = rendezvous_.Advance(AdvanceOf(id, generation, rank, next_step, wait_for),
                                           advance.Callback());
    return advance;
  }
  absl::Status Leave(const GroupId& id, uint64_t generation, int rank, const std::string& reason,
                     bool finished) {
    const AskedStatus leave;
    rendezvous_.Leave(LeaveOf(id, generation, rank, reason, finished), leave.Callback());
    return leave.status();
  }
  AskedStatus Watch(const GroupId& id, uint64_t generation, int rank = 0) {
    AskedStatus watch;
    watch.withdraw =
        rendezvous_.Watch(RequestOf<pb::WatchRequest>(id, generation, rank), watch.Callback());
    return watch;
  }

 private:
  RendezvousOptions WithClock(RendezvousOptions options) {
    options.clock = [this] { return now_; };
    return options;
  }

  absl::Time now_ = absl::FromUnixMicros(1'000'000'000);
  Rendezvous rendezvous_;
};

}  // namespace emberd::group::testing
