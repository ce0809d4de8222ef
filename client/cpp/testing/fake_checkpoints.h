// A CheckpointService for tests of clients, part of a FakeService. It has no checkpoints: it keeps
// what it was asked and says what the test wants.
#pragma once

#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"

namespace emberd::client::testing {

// Thread-safe but for its public fields, which a test sets before it calls.
class FakeCheckpoints final : public v1::CheckpointService::Service {
 public:
  using Progress = grpc::ServerWriter<v1::CheckpointProgress>;

  // What SaveCheckpoint, RestoreCheckpoint, ServeCheckpoint, VerifyCheckpoint and MergeCheckpoint
  // send.
  std::vector<v1::CheckpointProgress> progress;
  // How every call ends after its answers.
  grpc::Status status;
  // The next calls end with UNAVAILABLE before they have answered, this often.
  int unavailable = 0;
  v1::CheckpointManifest manifest;
  // Every GetCheckpoint after the first answers with the next checkpoint_id.
  bool saved_anew = false;
  v1::ListCheckpointsResponse list;
  v1::DiffCheckpointsResponse diff;
  // ExportCheckpoint: column c of id e of the tables of `manifest` is e + c / 100, of a slot 1000
  // more, in parts of so many rows. A slot named "row" has one column.
  int export_rows = 3;

  // Every call that arrived: "SaveCheckpoint model: \"m\" name: \"a\"".
  std::vector<std::string> calls() const;

  grpc::Status SaveCheckpoint(grpc::ServerContext* context,
                              const v1::SaveCheckpointRequest* request, Progress* writer) override;
  grpc::Status RestoreCheckpoint(grpc::ServerContext* context,
                                 const v1::RestoreCheckpointRequest* request,
                                 Progress* writer) override;
  grpc::Status ServeCheckpoint(grpc::ServerContext* context,
                               const v1::ServeCheckpointRequest* request,
                               Progress* writer) override;
  grpc::Status VerifyCheckpoint(grpc::ServerContext* context,
                                const v1::VerifyCheckpointRequest* request,
                                Progress* writer) override;
  grpc::Status MergeCheckpoint(grpc::ServerContext* context,
                               const v1::MergeCheckpointRequest* request,
                               Progress* writer) override;
  grpc::Status DiffCheckpoints(grpc::ServerContext* context,
                               const v1::DiffCheckpointsRequest* request,
                               v1::DiffCheckpointsResponse* response) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context,
                               const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override;
  grpc::Status GetCheckpoint(grpc::ServerContext* context, const v1::GetCheckpointRequest* request,
                             v1::CheckpointManifest* response) override;
  grpc::Status DeleteCheckpoint(grpc::ServerContext* context,
                                const v1::DeleteCheckpointRequest* request,
                                v1::DeleteCheckpointResponse* response) override;
  grpc::Status ExportCheckpoint(grpc::ServerContext* context,
                                const v1::ExportCheckpointRequest* request,
                                grpc::ServerWriter<v1::ExportCheckpointResponse>* writer) override;

 private:
  // Keeps the call; not OK: what it ends with at once.
  grpc::Status Begin(const char* method, const google::protobuf::Message& request);
  grpc::Status Answer(const char* method, const google::protobuf::Message& request,
                      Progress* writer);

  mutable absl::Mutex mutex_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::client::testing
