// The verbs of `emberctl checkpoint`, file by file.
#pragma once

#include <memory>
#include <string>

#include "client/emberctl/verbs/verb.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::emberctl {

// Work on tables takes as long as it takes; who does not answer at all is found out by other means.
inline constexpr absl::Duration kLong = absl::Hours(24);

// What most of them are told on the command line.
struct CheckpointTarget {
  std::string model;
  std::string name;  // empty: the newest, or one that the cluster chooses
};

// "run-7 from step 1000, run-8 from step 3"; "-" of none.
std::string GroupsText(const google::protobuf::RepeatedPtrField<v1::GroupStep>& groups);

void AddCheckpointViews(CLI::App& checkpoint, Session& session, Command& command);
void AddCheckpointExport(CLI::App& checkpoint, Session& session, Command& command);
void AddCheckpointImport(CLI::App& checkpoint, Session& session, Command& command);

}  // namespace emberd::emberctl
