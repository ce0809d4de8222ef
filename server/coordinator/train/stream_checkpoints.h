// The checkpoints that a training stream asks for. Each holds exactly the steps up to one of the
// stream's own: later steps of the group are held back before that one can be made, and go on when
// the moment has been fixed. The files are written in the background.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "emberd/v1/train.pb.h"
#include "server/coordinator/checkpoints.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// Used by the one thread that makes the stream's updates.
class StreamCheckpoints {
 public:
  // `checkpoints` must outlive it.
  StreamCheckpoints(Checkpoints* checkpoints, std::shared_ptr<const ServedModel> model)
      : checkpoints_(checkpoints), model_(std::move(model)) {}

  // Before the part, which is the stream's own, is given to any shard. Names of "" ask for nothing.
  void BeforeStep(const std::string& name, const GroupPart& part, rpc::CallContext* context);
  // The part's step has been made on all shards. Returns when the moment is fixed.
  void AfterStep(rpc::CallContext* context);
  // Says what became of one that was asked for, if that is known and has not been said.
  void Tell(v1::TrainUpdateResult* result);

 private:
  struct Outcome {
    std::string name;
    absl::Status status;
  };
  // Shared with the background, which may outlive the stream.
  struct Outcomes {
    Mutex mutex;
    std::deque<Outcome> known ABSL_GUARDED_BY(mutex);
    void Add(const std::string& name, const absl::Status& status);
  };

  Checkpoints* const checkpoints_;
  const std::shared_ptr<const ServedModel> model_;
  SaveOptions save_;                    // that the current step asks for
  std::unique_ptr<ChangePause> pause_;  // null: it does not
  const std::shared_ptr<Outcomes> outcomes_ = std::make_shared<Outcomes>();
};

}  // namespace emberd::server
