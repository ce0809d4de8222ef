// What the client knows of models, statistics and the cluster, as JSON. Internal to the C
// interface.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "client/c/handles.h"
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
// Of its checkpoint.
std::string DescribeEnd(const client::TrainUpdateResult& result);
// `times` null: there are none.
std::string Describe(const client::BatchStatistics& statistics, const client::StepTimes* times);

// As the result of a call.
inline std::unique_ptr<emberd_text> Keep(std::string text) {
  return std::make_unique<emberd_text>(emberd_text{std::move(text)});
}
template <typename Value>
absl::StatusOr<emberd_call::Result> KeepText(const absl::StatusOr<Value>& value) {
  RETURN_IF_ERROR(value.status());
  return Keep(Describe(*value));
}

}  // namespace emberd::c
