#include "server/coordinator/train/stream_checkpoints.h"

#include <utility>

#include "server/checkpoint/manifest.h"
#include "server/ops/logging.h"

namespace emberd::server {

void StreamCheckpoints::Outcomes::Add(const std::string& name, const absl::Status& status) {
  MutexLock lock(&mutex);
  known.push_back({name, status});
}

void StreamCheckpoints::BeforeStep(const std::string& name, const GroupPart& part,
                                   rpc::CallContext* context) {
  pause_ = nullptr;
  if (name.empty()) return;
  save_ = {.name = name, .incremental = true};
  save_.before.emplace().set_group(part.group);
  save_.before->set_next_step(part.step + 1);
  absl::Status status = checkpoints_->CheckEnabled();
  if (status.ok()) status = CheckNewCheckpointName(name);
  if (status.ok()) {
    pause_ = checkpoints_->MakePause(model_);
    status = pause_->HoldGroup(part.group, part.step, context);
  }
  if (status.ok()) return;
  pause_ = nullptr;
  outcomes_->Add(name, status);
}

void StreamCheckpoints::AfterStep(rpc::CallContext* context) {
  if (pause_ == nullptr) return;
  auto save = checkpoints_->BeginSave(model_, save_, std::move(pause_), context);
  if (!save.ok()) return outcomes_->Add(save_.name, save.status());
  checkpoints_->FinishLater(*std::move(save),
                            [outcomes = outcomes_, name = save_.name](const absl::Status& status) {
                              outcomes->Add(name, status);
                            });
}

void StreamCheckpoints::Tell(v1::TrainUpdateResult* result) {
  MutexLock lock(&outcomes_->mutex);
  if (outcomes_->known.empty()) return;
  const Outcome outcome = std::move(outcomes_->known.front());
  outcomes_->known.pop_front();
  result->set_checkpoint(outcome.name);
  if (!outcome.status.ok()) {
    result->set_checkpoint_error(std::string(outcome.status.message()));
  }
}

}  // namespace emberd::server
