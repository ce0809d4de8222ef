#include "client/cpp/checkpoint_codec.h"

namespace emberd::client {

CheckpointInfo DecodeCheckpoint(const v1::CheckpointInfo& message) {
  CheckpointInfo info;
  info.model = message.model();
  info.name = message.name();
  info.saved_at = absl::FromUnixMillis(message.saved_at_ms());
  info.bytes = message.bytes();
  info.rows = message.rows();
  info.parent = message.parent();
  info.chain = message.chain();
  for (const v1::GroupStep& group : message.groups()) {
    info.groups.push_back({group.group(), group.next_step()});
  }
  info.automatic = message.automatic();
  info.changes = message.changes();
  return info;
}

CheckpointList DecodeCheckpoints(const v1::ListCheckpointsResponse& message) {
  CheckpointList list;
  for (const v1::CheckpointInfo& info : message.checkpoints()) {
    list.checkpoints.push_back(DecodeCheckpoint(info));
  }
  list.damaged.assign(message.damaged().begin(), message.damaged().end());
  return list;
}

CheckpointProgress DecodeProgress(const v1::CheckpointProgress& message) {
  return {message.phase(), message.bytes(), message.total_bytes(),
          absl::Milliseconds(message.elapsed_ms())};
}

}  // namespace emberd::client
