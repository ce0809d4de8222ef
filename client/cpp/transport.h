// The coordinators as a client sees them: one channel each, what it shows to them, deadlines,
// retries, cancellation. Internal to the client.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <google/protobuf/message.h>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/buffers.h"
#include "base/local_server.h"
#include "client/cpp/options.h"
#include "emberd/v1/shared_memory.pb.h"

namespace grpc {
class Channel;
class ChannelCredentials;
class ClientContext;
class Status;
}  // namespace grpc

namespace emberd {
class LaneClientCall;
}  // namespace emberd

namespace emberd::client {

class SharedMemory;

// What a client shows to servers, and what it asks of them.
struct Credentials {
  std::shared_ptr<grpc::ChannelCredentials> channel;
  // Value of the metadata "authorization" of each call; empty: none.
  std::string authorization;
};

// Reads the files that valid options name. INVALID_ARGUMENT names the field and the file that is
// wrong.
absl::StatusOr<Credentials> LoadCredentials(const ClientOptions& options);

// gRPC writes a line for each connection that is tried in vain, twenty a second where a certificate
// is wrong. From now on it writes one a minute, unless the environment has GRPC_VERBOSITY. For
// whole programs, and for libraries that hide gRPC.
void LimitGrpcLog();

// The pause before try `attempt` + 1, for attempt = 1, 2, ...; `random` in [0, 1) places it in the
// jitter's range.
absl::Duration BackoffPause(const ClientOptions& options, int attempt, double random);

struct Coordinator;  // coordinator.h: where an attempt calls

// "/emberd.v1.AdminService/Drain" of a v1::DrainRequest: each method of a service has a request of
// its own, which stands in the same file.
std::string MethodOf(const google::protobuf::Message& request);

struct CallSettings {
  absl::Duration deadline = absl::ZeroDuration();  // zero: that of the options
  int coordinator = -1;                            // the only one that can answer; -1: any
  // What would do harm if it were made twice: once it may have been sent, it is not tried again.
  bool once = false;
};

// Thread-safe.
class Transport {
 public:
  // Valid options. Waits until a coordinator accepts a connection. INVALID_ARGUMENT: a file that
  // the options name is wrong.
  static absl::StatusOr<std::unique_ptr<Transport>> Connect(const ClientOptions& options);

  // One try of a call. It may run several times, on other coordinators.
  using Attempt = absl::FunctionRef<grpc::Status(const Coordinator&, grpc::ClientContext*)>;
  // Runs `attempt` until it ends with something else than UNAVAILABLE, the tries are used up, or
  // the next pause would outlast the deadline. Gives the last status, unchanged. `answered` (may be
  // null) gets the index of the coordinator that was tried last.
  absl::Status Call(const CallSettings& settings, Attempt attempt, int* answered = nullptr);

  // A unary call of MethodOf(request), whose answer is a `Response`.
  template <typename Response>
  absl::StatusOr<Response> Call(const google::protobuf::Message& request,
                                const CallSettings& settings = {}) {
    Response response;
    const absl::Status status = CallUnary(request, settings, &response);
    if (!status.ok()) return status;
    return response;
  }
  // The same, for a message of any kind. `response` is empty.
  absl::Status CallUnary(const google::protobuf::Message& request, const CallSettings& settings,
                         google::protobuf::Message* response, int* answered = nullptr);

  // For attempts: makes the call of `context` without gRPC, where the coordinator is on this
  // machine and has a free lane. Nothing: it has to go by gRPC.
  std::optional<grpc::Status> CallOnLane(const Coordinator& coordinator, v1::LaneMethod method,
                                         const google::protobuf::MessageLite& request,
                                         grpc::ClientContext* context,
                                         google::protobuf::MessageLite* response);

  void CancelCalls();
  uint64_t cancellations() const { return cancellations_; }  // how often that was called
  // On a thread that makes the calls of others: what cancellations() was when the other's call
  // began.
  static inline thread_local std::optional<uint64_t> begun_at;

  // What every call sends; Call has done so before an attempt. To be called before a call begins.
  void Authorize(grpc::ClientContext* context) const;

  // `begun_at` of this thread, or what cancellations() is now.
  uint64_t begun() const { return begun_at.value_or(cancellations_); }
  // For calls that go on after the function that began them: CancelCalls cancels a call between
  // AddCall and RemoveCall too, and one whose `begun` was taken before.
  void AddCall(grpc::ClientContext* context, uint64_t begun);
  void RemoveCall(grpc::ClientContext* context);
  // Where calls go that any coordinator can answer.
  int current() const { return current_.load(); }
  // Turns to the next coordinator, unless somebody has done so since `index` was the current one.
  void MoveOn(int index);
  std::shared_ptr<grpc::Channel> channel(int coordinator);
  SharedMemory* memory(int coordinator) const;         // null: all goes by gRPC
  BufferPool* activations() { return &activations_; }  // memory for those of lookups

 private:
  // What says, without reading them, that the files of certificates and token have changed.
  struct FileMarks {
    explicit FileMarks(const ClientOptions& options);
    bool operator==(const FileMarks&) const = default;
    std::string tls, token;
  };
  // `marks`: from before `credentials` were read.
  Transport(const ClientOptions& options, const Credentials& credentials, FileMarks marks);

  // Where calls go from now on; takes what is new in the files, which may be renewed while a client
  // lives.
  std::shared_ptr<const Coordinator> At(int coordinator);
  void RenewCredentials() ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_mutex_);
  std::shared_ptr<const Coordinator> MakeCoordinator(int index, const Credentials& credentials,
                                                     const Coordinator* before);
  std::string authorization() const;

  absl::StatusOr<LocalInvitation> AskForInvitation(int coordinator, absl::Time deadline);
  absl::Status WaitForConnection();
  // Why nobody can be reached.
  absl::Status ConnectionError();
  // False if CancelCalls has been called since a call began, after `begun` of them.
  bool Register(grpc::ClientContext* context, uint64_t begun);
  // Waits before the next try, less if a broken connection is there again. False as in Register.
  bool Pause(grpc::Channel& channel, absl::Duration pause, uint64_t begun);

  const ClientOptions options_;
  std::atomic<int> current_ = 0;  // where calls without a coordinator of their own begin

  absl::Mutex files_mutex_;
  FileMarks marks_ ABSL_GUARDED_BY(files_mutex_);
  absl::Time next_look_ ABSL_GUARDED_BY(files_mutex_) = absl::InfinitePast();
  absl::Time next_complaint_ ABSL_GUARDED_BY(files_mutex_) = absl::InfinitePast();

  mutable absl::Mutex mutex_;
  std::string authorization_ ABSL_GUARDED_BY(mutex_);
  // When certificates have changed, one with another channel takes the place of each. Calls keep
  // the one that they began with.
  std::vector<std::shared_ptr<const Coordinator>> coordinators_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> cancellations_ = 0;  // changed with mutex_ held
  struct Progress {
    LaneClientCall* on_lane = nullptr;  // null: the call goes by gRPC now
    bool cancelled = false;
  };
  absl::flat_hash_map<grpc::ClientContext*, Progress> in_progress_ ABSL_GUARDED_BY(mutex_);
  BufferPool activations_{size_t{64} << 20};
};

}  // namespace emberd::client
