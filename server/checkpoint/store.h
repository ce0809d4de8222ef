// The folder of all checkpoints: which there are, and how they come and go. At every moment, also
// after a kill or a loss of power, a checkpoint is there whole or not at all.
//
// Beside the checkpoints of a model stand .saving-* (one that is being written), .deleted-* (one
// that is being removed) and .lock. A file .begins-HISTORY in a checkpoint: see SetBeginning.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/checkpoint/manifest.h"
#include "server/checkpoint/partition_file.h"

namespace emberd::checkpoint {

// Thread-safe; many processes may use one directory at once. NOT_FOUND: there is no such
// checkpoint. DATA_LOSS, with the file's name: it is damaged. What is read may be named "newest".
class CheckpointStore {
 public:
  explicit CheckpointStore(std::string directory) : directory_(std::move(directory)) {}

  // Newest first, of one model or (empty) of all; and what looks like a checkpoint and is none, or
  // cannot be read.
  // `unreadable`, if it is not null: the first error but for damage.
  absl::StatusOr<v1::ListCheckpointsResponse> List(const std::string& model,
                                                   absl::Status* unreadable = nullptr) const;
  // The same for whoever decides by it: the error, if there is something that cannot be read, for
  // that may be the newest one.
  absl::StatusOr<v1::ListCheckpointsResponse> ListAll(const std::string& model) const;
  absl::StatusOr<v1::CheckpointManifest> Read(const std::string& model,
                                              const std::string& name) const;
  // The same for people: `chain` says how many it needs now, as in List.
  absl::StatusOr<v1::CheckpointManifest> Describe(const std::string& model,
                                                  const std::string& name) const;
  // The newest one that has all that it builds on. DATA_LOSS: there are only damaged ones.
  absl::StatusOr<v1::CheckpointManifest> Newest(const std::string& model) const;
  // The same with all that it builds on. `damaged`, if it is not null: what is wrong with those
  // that were passed over. The newest may be among them: one without a manifest has no date.
  using Damages = google::protobuf::RepeatedPtrField<std::string>;
  absl::StatusOr<CheckpointChain> NewestChain(const std::string& model,
                                              Damages* damaged = nullptr) const;
  // With all that it builds on: it first, the whole one last.
  absl::StatusOr<CheckpointChain> Chain(const std::string& model, const std::string& name) const;

  // A new folder for the files of a checkpoint. ALREADY_EXISTS: there is a checkpoint of this name.
  // `name` may be empty: it is not known yet. Whoever writes calls Heartbeat at least every 20
  // seconds; a folder for which nobody did for a minute is removed by the next to begin.
  absl::StatusOr<std::string> BeginSave(const std::string& model, const std::string& name) const;
  absl::Status Heartbeat(const std::string& folder) const;
  // Makes the folder, with all files that the manifest lists, the checkpoint that the manifest
  // names. Moves its saved_at_ms, if need be, behind those of all others of the model and what was
  // given up, so that the newest is the one that was committed last, whatever clocks say.
  // ALREADY_EXISTS: somebody else was faster. FAILED_PRECONDITION: the one that it builds on is
  // gone. Asks `still_wanted`, if given, while nobody else can commit, or note that rows are gone.
  absl::Status Commit(const std::string& folder, v1::CheckpointManifest* manifest,
                      const std::function<absl::Status()>& still_wanted = nullptr) const;
  // Removes the folder. Idempotent.
  void Abandon(const std::string& folder) const;

  // Makes a checkpoint whole: moves the files in the folder, which BeginSave gave without a name,
  // into the checkpoint of the manifest, under names of their own, replaces its manifest, and
  // removes the files that it does not list any more. ABORTED: the checkpoint was deleted or merged
  // meanwhile.
  absl::Status CommitMerge(const std::string& folder, v1::CheckpointManifest manifest) const;

  // From now on logs of rows of this history (storage.durability LOG) begin with the checkpoint. If
  // rows are restored, call it before the first log does so; if they are saved, after the last one
  // does.
  absl::Status SetBeginning(const v1::CheckpointManifest& checkpoint, uint64_t history) const;

  // Whether SetBeginning was called for rows of this history, and some checkpoint of the model.
  absl::StatusOr<bool> HasBeginning(const std::string& model, uint64_t history) const;

  // Returns the bytes that it took. FAILED_PRECONDITION: another one builds on it, or a log of rows
  // of this history may begin with it. `history`: of the rows that have logs; 0: there are none.
  // `may_go`: asked for an intact one; its error is another reason not to delete it.
  using MayGo = std::function<absl::Status(const v1::CheckpointManifest&)>;
  absl::StatusOr<int64_t> Delete(const std::string& model, const std::string& name,
                                 uint64_t history = 0, const MayGo& may_go = nullptr) const;
  // The rows of a model are given up on purpose: none of the checkpoints that it has, damaged or
  // not, is to bring them back by itself. With a `history`: only if the newest is of these rows.
  absl::Status GiveUp(const std::string& model, uint64_t history = 0) const;
  // Only checkpoints saved later than this, in ms since 1970, may. 0: all.
  absl::StatusOr<int64_t> GivenUpUntil(const std::string& model) const;

  // Deletes the automatic ones beyond the newest `keep` of them, and those saved until `given_up`,
  // except those that Delete refuses. Returns the bytes that they took.
  absl::StatusOr<int64_t> RemoveAutomatic(const std::string& model, int keep, uint64_t history = 0,
                                          int64_t given_up = 0,
                                          const MayGo& may_go = nullptr) const;

 private:
  std::string ModelFolder(const std::string& model) const;
  std::string FolderOf(const std::string& model, const std::string& name) const;
  // When it was saved, but later than all others of the model. Under the lock of its folder.
  absl::StatusOr<int64_t> DateAfterOthers(const v1::CheckpointManifest& manifest) const;
  absl::StatusOr<std::string> MakeWorkFolder(const std::string& model) const;
  // FAILED_PRECONDITION if a log may begin with it. `list`: of the model.
  absl::Status CheckNoLogBegins(const v1::ListCheckpointsResponse& list, const std::string& name,
                                uint64_t history) const;
  void RemoveLitter(const std::string& model_folder, int64_t now) const;

  const std::string directory_;
};

// Of the first of a chain. It needs the others, which may be fewer than when it was saved.
v1::CheckpointInfo InfoOf(const CheckpointChain& chain);

}  // namespace emberd::checkpoint
