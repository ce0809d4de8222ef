#include "client/cpp/testing/fake_checkpoints.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace emberd::client::testing {

std::vector<std::string> FakeCheckpoints::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

grpc::Status FakeCheckpoints::Begin(const char* method, const google::protobuf::Message& request) {
  absl::MutexLock lock(&mutex_);
  calls_.push_back(absl::StrCat(method, " ", request.ShortDebugString()));
  if (unavailable == 0) return grpc::Status::OK;
  --unavailable;
  return grpc::Status(grpc::UNAVAILABLE, "not now");
}

grpc::Status FakeCheckpoints::Answer(const char* method, const google::protobuf::Message& request,
                                     Progress* writer) {
  if (grpc::Status begun = Begin(method, request); !begun.ok()) return begun;
  for (const v1::CheckpointProgress& message : progress) writer->Write(message);
  return status;
}

grpc::Status FakeCheckpoints::SaveCheckpoint(grpc::ServerContext*,
                                             const v1::SaveCheckpointRequest* request,
                                             Progress* writer) {
  return Answer("SaveCheckpoint", *request, writer);
}

grpc::Status FakeCheckpoints::RestoreCheckpoint(grpc::ServerContext*,
                                                const v1::RestoreCheckpointRequest* request,
                                                Progress* writer) {
  return Answer("RestoreCheckpoint", *request, writer);
}

grpc::Status FakeCheckpoints::ServeCheckpoint(grpc::ServerContext*,
                                              const v1::ServeCheckpointRequest* request,
                                              Progress* writer) {
  return Answer("ServeCheckpoint", *request, writer);
}

grpc::Status FakeCheckpoints::VerifyCheckpoint(grpc::ServerContext*,
                                               const v1::VerifyCheckpointRequest* request,
                                               Progress* writer) {
  return Answer("VerifyCheckpoint", *request, writer);
}

grpc::Status FakeCheckpoints::MergeCheckpoint(grpc::ServerContext*,
                                              const v1::MergeCheckpointRequest* request,
                                              Progress* writer) {
  return Answer("MergeCheckpoint", *request, writer);
}

grpc::Status FakeCheckpoints::DiffCheckpoints(grpc::ServerContext*,
                                              const v1::DiffCheckpointsRequest* request,
                                              v1::DiffCheckpointsResponse* response) {
  if (grpc::Status begun = Begin("DiffCheckpoints", *request); !begun.ok()) return begun;
  *response = diff;
  return status;
}

grpc::Status FakeCheckpoints::ListCheckpoints(grpc::ServerContext*,
                                              const v1::ListCheckpointsRequest* request,
                                              v1::ListCheckpointsResponse* response) {
  if (grpc::Status begun = Begin("ListCheckpoints", *request); !begun.ok()) return begun;
  *response = list;
  return status;
}

grpc::Status FakeCheckpoints::GetCheckpoint(grpc::ServerContext*,
                                            const v1::GetCheckpointRequest* request,
                                            v1::CheckpointManifest* response) {
  if (grpc::Status begun = Begin("GetCheckpoint", *request); !begun.ok()) return begun;
  *response = manifest;
  if (saved_anew) manifest.set_checkpoint_id(manifest.checkpoint_id() + 1);
  return status;
}

grpc::Status FakeCheckpoints::DeleteCheckpoint(grpc::ServerContext*,
                                               const v1::DeleteCheckpointRequest* request,
                                               v1::DeleteCheckpointResponse* response) {
  if (grpc::Status begun = Begin("DeleteCheckpoint", *request); !begun.ok()) return begun;
  response->set_bytes(3 << 20);
  return status;
}

grpc::Status FakeCheckpoints::ExportCheckpoint(
    grpc::ServerContext*, const v1::ExportCheckpointRequest* request,
    grpc::ServerWriter<v1::ExportCheckpointResponse>* writer) {
  if (grpc::Status begun = Begin("ExportCheckpoint", *request); !begun.ok()) return begun;
  for (const v1::TableConfig& table : manifest.config().tables()) {
    if (table.name() != request->table()) continue;
    const int columns = request->slot() == "row" ? 1 : table.embedding_dim();
    for (int64_t row = 0; row < table.vocabulary_size(); row += export_rows) {
      v1::ExportCheckpointResponse part;
      part.set_first_row(row);
      part.set_columns(columns);
      const int64_t end = std::min<int64_t>(row + export_rows, table.vocabulary_size());
      for (int64_t id = row; id < end; ++id) {
        for (int column = 0; column < columns; ++column) {
          const float value = static_cast<float>(id) + static_cast<float>(column) / 100 +
                              (request->slot().empty() ? 0 : 1000);
          part.mutable_values()->append(reinterpret_cast<const char*>(&value), sizeof(value));
        }
      }
      writer->Write(part);
    }
  }
  return status;
}

}  // namespace emberd::client::testing
