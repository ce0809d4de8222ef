#include "server/shard/change_gate.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/group/group_rules.h"

namespace emberd::server {
namespace {

constexpr int64_t kMostLeaseMs = 60'000;

}  // namespace

bool ChangeGate::HoldsBack(const Gate& gate, const std::optional<GroupPart>& part) {
  if (gate.pause_id == 0) return false;
  if (gate.group.empty()) return true;
  return part.has_value() && part->group == gate.group && part->step > gate.after_step;
}

ChangeGate::Pass ChangeGate::MakePass(uint64_t model_id) {
  ++gates_[model_id].entered;
  return Pass(this, [this, model_id](const void*) { Leave(model_id); });
}

void ChangeGate::Leave(uint64_t model_id) {
  MutexLock lock(&mutex_);
  const auto found = gates_.find(model_id);
  --found->second.entered;
  if (found->second.entered == 0 && found->second.pause_id == 0) gates_.erase(found);
}

void ChangeGate::Enter(uint64_t model_id, const std::optional<GroupPart>& part, Go go) {
  Pass pass;
  {
    MutexLock lock(&mutex_);
    Gate& gate = gates_[model_id];
    if (HoldsBack(gate, part)) {
      gate.waiting.push_back({part, std::move(go)});
      return;
    }
    pass = MakePass(model_id);
  }
  go(std::move(pass));
}

absl::StatusOr<int> ChangeGate::Pause(const internal::v1::PauseChangesRequest& request) {
  if (request.pause_id() == 0) {
    return absl::InvalidArgumentError("pause_id is 0; it must be random");
  }
  RETURN_IF_ERROR(CheckInRange("lease_ms", request.lease_ms(), int64_t{1}, kMostLeaseMs));
  MutexLock lock(&mutex_);
  Gate& gate = gates_[request.model_id()];
  if (gate.pause_id != 0 && gate.pause_id != request.pause_id()) {
    return absl::AbortedError("another checkpoint of the model is being taken; try again");
  }
  gate.pause_id = request.pause_id();
  gate.until = SteadyNow() + absl::Milliseconds(request.lease_ms());
  gate.group = request.group();
  gate.after_step = request.after_step();
  return gate.entered;
}

std::vector<ChangeGate::Waiting> ChangeGate::Open(Gate* gate) {
  gate->pause_id = 0;
  return std::exchange(gate->waiting, {});
}

void ChangeGate::LetIn(uint64_t model_id, std::vector<Waiting> waiting) {
  for (Waiting& change : waiting) Enter(model_id, change.part, std::move(change.go));
}

void ChangeGate::Resume(uint64_t model_id, uint64_t pause_id) {
  std::vector<Waiting> waiting;
  {
    MutexLock lock(&mutex_);
    const auto found = gates_.find(model_id);
    if (found == gates_.end() || found->second.pause_id != pause_id) return;
    waiting = Open(&found->second);
    if (found->second.entered == 0) gates_.erase(found);
  }
  LetIn(model_id, std::move(waiting));
}

bool ChangeGate::Closed(uint64_t model_id, uint64_t pause_id) {
  MutexLock lock(&mutex_);
  const auto found = gates_.find(model_id);
  if (found == gates_.end()) return false;
  const Gate& gate = found->second;
  return gate.pause_id == pause_id && gate.group.empty() && gate.entered == 0 &&
         SteadyNow() < gate.until;
}

void ChangeGate::Sweep(absl::Time now) {
  std::vector<std::pair<uint64_t, uint64_t>> over;
  {
    MutexLock lock(&mutex_);
    for (const auto& [model_id, gate] : gates_) {
      if (gate.pause_id != 0 && gate.until <= now) over.emplace_back(model_id, gate.pause_id);
    }
  }
  for (const auto& [model_id, pause_id] : over) Resume(model_id, pause_id);
}

}  // namespace emberd::server
