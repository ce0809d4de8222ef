// manifest.json: what a checkpoint is and which files it has. Its last field is a checksum of all
// bytes before it, so that no byte of it changes unnoticed.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::checkpoint {

inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr int kManifestVersion = 1;

// INVALID_ARGUMENT: a checkpoint cannot have this name.
absl::Status CheckCheckpointName(absl::string_view name);
// Where it is read, this name stands for the newest checkpoint; none is saved or deleted under it.
constexpr absl::string_view kNewestCheckpoint = "newest";
// Where checkpoints are deleted, this stands for the automatic ones that nothing needs.
constexpr absl::string_view kAutomaticCheckpoints = "auto-*";
absl::Status CheckNewCheckpointName(absl::string_view name);

absl::StatusOr<std::string> EncodeManifest(const v1::CheckpointManifest& manifest);
// DATA_LOSS unless `text` was made by EncodeManifest and nothing in it points outside of the
// checkpoint or contradicts itself. FAILED_PRECONDITION: a version of the format that is not known.
absl::StatusOr<v1::CheckpointManifest> ParseManifest(absl::string_view text);

// That of the checkpoint in a folder. DATA_LOSS, with the file's name, also if it is missing or
// that of another checkpoint.
absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& folder);

// Whether rows have the same places and sizes in both.
bool SameLayout(const v1::CheckpointManifest& a, const v1::CheckpointManifest& b);

// FAILED_PRECONDITION unless the rows of a checkpoint can become those of a model with this config:
// the same tables, in name, size, width and initial values.
absl::Status CheckSameTables(const v1::CheckpointManifest& manifest, const v1::ModelConfig& config);

// The config that a model is to have that is restored: the request's, if it has one, and else that
// of the checkpoint. INVALID_ARGUMENT: it is wrong, or of another model. Else as CheckSameTables.
absl::StatusOr<v1::ModelConfig> RestoredConfig(const v1::CheckpointManifest& manifest,
                                               const v1::RestoreCheckpointRequest& request);

v1::CheckpointInfo InfoOf(const v1::CheckpointManifest& manifest);

}  // namespace emberd::checkpoint
