// The verbs of `emberctl checkpoint`, file by file.
#pragma once

#include <string>

#include "client/emberctl/verbs/verb.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::emberctl {

// Work on tables takes as long as it takes; who does not answer at all is found out by other means.
inline constexpr absl::Duration kLong = absl::Hours(24);

// "run-7 from step 1000, run-8 from step 3"; "-" of none.
std::string GroupsText(const google::protobuf::RepeatedPtrField<v1::GroupStep>& groups);

// "3 checkpoints: 1.2 GiB on disk, of which 800.0 MiB were saved automatically".
std::string StoredText(const v1::ListCheckpointsResponse& list);

// Runs a call of the CheckpointService to its end, and shows progress.
absl::StatusOr<v1::CheckpointProgress> RunCall(Session& session,
                                               const google::protobuf::Message& request);

// Of what was read or written: "1.2 GiB in 3.20 s (390.0 MiB/s)".
std::string Work(const v1::CheckpointProgress& result);

void AddCheckpointExport(CLI::App& checkpoint, Session& session);
void AddCheckpointImport(CLI::App& checkpoint, Session& session);

}  // namespace emberd::emberctl
