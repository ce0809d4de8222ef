// Training on a stream: lookups and updates of many steps, several under way at once, alone or as a
// rank of a group of trainers (see train.proto).
//
//   auto stream = client->Train(model, {.group = "run-7", .rank = rank, .size = 2});
//   for (int64_t step = (*stream)->next_step(); step < steps; ++step) {
//     (*stream)->SendLookup(step, ids of the step);
//     absl::StatusOr<TrainLookupResult> found = (*stream)->ReceiveLookup();
//     ... forward and backward on found->activations ...
//     (*stream)->SendUpdate(step, gradients);
//     absl::StatusOr<TrainUpdateResult> updated = (*stream)->ReceiveUpdate();
//   }
//   (*stream)->Finish();
//
// Requests may be sent ahead, each kind in the order of steps: the ids of step k + 1 while step k
// computes. A group that is `pipelined` demands it: Update(k) is answered once Lookup(k + 1) has
// been sent, or Finish called. However many lookups are ahead, an update can be waited for: a
// lookup whose turn is far off is kept here until the updates before it have been sent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/batch.h"

namespace emberd::client {

class Transport;
struct ClientOptions;
struct Model;

enum class Consistency {
  kSync,     // all ranks form one batch per step
  kAsync,    // each rank's update is applied when it comes
  kBounded,  // as kAsync, but no rank is more than staleness_bound steps behind another
};

// Which rank of which group this trainer is. Every rank gives the same, but for `rank` and
// `coordinator`.
struct TrainOptions {
  // 1 to 128 letters, digits and _-.:/ ; joining under the same name continues the run. It must be
  // given.
  std::string group;
  int rank = 0;  // 0 <= rank < size
  int size = 1;  // 1 to 1024
  Consistency consistency = Consistency::kSync;
  int64_t staleness_bound = 0;  // kBounded only, 0 to 2^31 - 1
  bool pipelined = false;       // kSync only: Lookup(k) sees the updates of the steps before k - 1
  int64_t first_step = 0;       // of a group that is new, >= 0
  // How long a step waits for another rank: 1 to 2^31 - 1 ms.
  absl::Duration step_timeout = absl::Seconds(60);
  // Index in ClientOptions::addresses; -1: where other calls go.
  int coordinator = -1;
};

// One thread may send while another receives; a single thread may do both. Sending does not wait
// for the server (but half a second at the most, where it has to give more shared memory and is
// silent): what it cannot take yet is queued here.
//
// Once a request has failed, or the connection, every call gives the stream's status with the
// server's message, after the answers that came before it. The caller then opens a new stream and
// goes on from its next_step().
class TrainStream {
 public:
  // Cancels what is in progress.
  virtual ~TrainStream() = default;
  TrainStream(const TrainStream&) = delete;
  TrainStream& operator=(const TrainStream&) = delete;

  // The step to begin with: all before it have been applied.
  virtual int64_t next_step() const = 0;
  // Of the group: grows whenever its members join anew.
  virtual uint64_t generation() const = 0;
  // The generation in which step next_step() - 1 was made. If no stream of the caller has had it,
  // somebody else has made the step. 0: not known.
  virtual uint64_t made_generation() const = 0;

  // `features` holds every feature of the model once, in any order. The ids are copied.
  // INVALID_ARGUMENT for what cannot be sent; the stream goes on.
  virtual absl::Status SendLookup(int64_t step, absl::Span<const FeatureIds> features,
                                  const TrainLookupOptions& options = {}) = 0;
  // Updates every row that the step's lookup touched, of any rank, unless it is to be skipped. A
  // feature without gradients has zero gradients. INVALID_ARGUMENT as above.
  virtual absl::Status SendUpdate(int64_t step, absl::Span<const FeatureGradient> gradients,
                                  const UpdateOptions& options = {}) = 0;

  // Memory for gradients, with any contents, which the coordinator reads in place if it is on this
  // machine: float32 gradients that lie there are sent without a copy, if the update has
  // UpdateOptions::memory. They must not change until it has been answered.
  virtual std::shared_ptr<float> AllocateGradients(size_t floats) = 0;

  // Wait for the answer to the oldest lookup, or update, whose answer has not been received.
  // FAILED_PRECONDITION if there is none. Lookups and updates are received independently.
  virtual absl::StatusOr<TrainLookupResult> ReceiveLookup() = 0;
  virtual absl::StatusOr<TrainUpdateResult> ReceiveUpdate() = 0;
  // True once the call above would not wait: there is an answer, none is awaited, or the stream has
  // ended. False after `timeout`. For callers that do other work in between.
  virtual bool WaitForLookup(absl::Duration timeout) = 0;
  virtual bool WaitForUpdate(absl::Duration timeout) = 0;

  // No more requests: waits until those sent are answered and gives the stream's final status, OK
  // if all went well. Answers can still be received afterwards.
  virtual absl::Status Finish() = 0;
  // Ends the stream soon with CANCELLED, unless it has ended.
  virtual void Cancel() = 0;

 protected:
  TrainStream() = default;

 private:
  friend class Client;
  static absl::StatusOr<std::unique_ptr<TrainStream>> Open(Transport* transport,
                                                           const ClientOptions& client_options,
                                                           const Model& model,
                                                           const TrainOptions& options);
};

}  // namespace emberd::client
