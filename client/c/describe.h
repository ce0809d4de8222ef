// What the client knows of models, statistics and the cluster, as JSON. Internal to the C
// interface.
#pragma once

#include <string>

#include "client/cpp/batch.h"
#include "client/cpp/checkpoints.h"
#include "client/cpp/model.h"
#include "client/cpp/status.h"
#include "client/cpp/train_stream.h"

namespace emberd::c {

std::string Describe(const client::Model& model);
std::string Describe(const client::ClusterStatus& status);
std::string Describe(const client::SavedCheckpoint& saved);
std::string Describe(const client::CheckpointInfo& checkpoint);
std::string Describe(const client::CheckpointList& list);
std::string Describe(const client::CheckpointProgress& progress);
// `error` empty: it has been saved.
std::string DescribeEnd(const std::string& checkpoint, const std::string& error);
// `times` null: there are none.
std::string Describe(const client::BatchStatistics& statistics, const client::StepTimes* times);

}  // namespace emberd::c
