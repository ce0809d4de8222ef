#include "server/checkpoint/store.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <unistd.h>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/suggest.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace {

// What a folder of a model has.
struct Listing {
  std::vector<v1::CheckpointManifest> manifests;
  std::vector<std::string> damaged;
  absl::Status unreadable;  // of something among them that is not damaged
};

// NOT_FOUND: there is no such folder. Others may delete it, and save another one in its place,
// between two steps of this.
absl::StatusOr<v1::CheckpointManifest> ReadCheckpoint(const std::string& folder) {
  absl::StatusOr<v1::CheckpointManifest> manifest = ReadManifest(folder);
  if (!manifest.ok()) manifest = ReadManifest(folder);
  if (manifest.ok()) return manifest;
  ASSIGN_OR_RETURN(const bool there, files::IsThere(folder));
  if (!there) return absl::NotFoundError(absl::StrCat(folder, ": does not exist"));
  return manifest;
}

// A message with the name of a file, whose bytes may be anything, for a field that is UTF-8.
std::string Utf8(absl::string_view message) {
  return absl::c_all_of(message, absl::ascii_isascii) ? std::string(message)
                                                      : absl::CHexEscape(message);
}

absl::StatusOr<Listing> ReadModelFolder(const std::string& folder) {
  Listing listing;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files::FoldersIn(folder));
  for (const std::string& name : names) {
    if (absl::StartsWith(name, ".")) continue;
    auto manifest = ReadCheckpoint(files::PathIn(folder, name));
    if (manifest.ok()) {
      listing.manifests.push_back(*std::move(manifest));
    } else if (!absl::IsNotFound(manifest.status())) {  // else deleted just now
      listing.damaged.push_back(Utf8(manifest.status().message()));
      if (!files::IsGone(manifest.status())) listing.unreadable.Update(manifest.status());
    }
  }
  return listing;
}

// Of each, how many it needs besides itself: as many as it was saved on, or fewer if one of those
// was made whole.
void CountChains(v1::ListCheckpointsResponse* list) {
  std::map<std::pair<std::string, std::string>, const v1::CheckpointInfo*> by_name;
  for (const v1::CheckpointInfo& info : list->checkpoints()) {
    by_name[{info.model(), info.name()}] = &info;
  }
  for (v1::CheckpointInfo& info : *list->mutable_checkpoints()) {
    int chain = 0;
    const v1::CheckpointInfo* next = &info;
    while (!next->parent().empty() && chain < info.chain()) {
      ++chain;
      const auto found = by_name.find({info.model(), next->parent()});
      if (found == by_name.end()) break;
      next = found->second;
    }
    info.set_chain(chain);
  }
}

bool Newer(const v1::CheckpointInfo& a, const v1::CheckpointInfo& b) {
  const auto key = [](const v1::CheckpointInfo& info) {
    return std::tuple(info.saved_at_ms(), info.changes(), info.chain());
  };
  return key(a) != key(b) ? key(a) > key(b)
                          : std::pair(a.model(), a.name()) < std::pair(b.model(), b.name());
}

constexpr char kGivenUpFile[] = ".given_up";  // of a model
constexpr char kSaving[] = ".saving-";
constexpr char kDeleted[] = ".deleted-";
constexpr char kMerging[] = ".merging";  // in a checkpoint: it may have files that it does not list
constexpr char kBegins[] = ".begins-";
constexpr int64_t kAbandonedAfterSeconds = 60;

absl::Status Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  if (Mistake("files.rename_unchecked")) return absl::OkStatus();
  return files::FileError(errno, from, absl::StrCat("cannot be renamed to ", to));
}

// Of a folder, within the one that it stands in; to survive a loss of power. After an error it has
// its old name.
absl::Status RenameOrNot(const std::string& from, const std::string& to, const char* failpoint) {
  RETURN_IF_ERROR(Rename(from, to));
  ReachFailpoint(failpoint);
  const absl::Status synced = files::SyncFolder(to.substr(0, to.rfind('/')));
  if (!synced.ok()) RETURN_IF_ERROR(Rename(to, from));
  return synced;
}

// Without a name, the folder of a model would be that of all models, and their folders checkpoints.
absl::Status CheckModelName(const std::string& model) {
  return model.empty() ? absl::InvalidArgumentError("model: empty; give its name")
                       : absl::OkStatus();
}

absl::Status AlreadyThere(const std::string& model, const std::string& name) {
  return absl::AlreadyExistsError(absl::StrCat("model \"", model, "\" already has a checkpoint \"",
                                               name,
                                               "\"; delete it first, or choose another name"));
}

std::string BeginsName(uint64_t history) {
  return absl::StrCat(kBegins, absl::Hex(history, absl::kZeroPad16));
}

absl::Status CheckIsThere(const std::string& folder, const v1::CheckpointFile& file) {
  return files::OpenNamedFile(files::PathIn(folder, file.path()), file.bytes()).status();
}

// Files that a merge moved in before it died, or did not come to remove.
void RemoveUnlisted(const std::string& folder, const v1::CheckpointManifest& manifest) {
  std::set<std::string> listed = {kManifestFile};
  for (const v1::CheckpointFile& file : manifest.files()) listed.insert(file.path());
  for (const v1::CheckpointFile& file : manifest.states()) listed.insert(file.path());
  const auto names = files::FilesIn(folder);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const bool ours = absl::EndsWith(name, ".safetensors") || absl::EndsWith(name, ".tmp");
    if (ours && listed.count(name) == 0) unlink(files::PathIn(folder, name).c_str());
  }
  unlink(files::PathIn(folder, kMerging).c_str());
}

}  // namespace

std::string CheckpointStore::ModelFolder(const std::string& model) const {
  return files::PathIn(directory_, files::EscapeFileName(model));
}

std::string CheckpointStore::FolderOf(const std::string& model, const std::string& name) const {
  return files::PathIn(ModelFolder(model), name);
}

absl::StatusOr<v1::ListCheckpointsResponse> CheckpointStore::ListAll(
    const std::string& model) const {
  absl::Status unreadable;
  auto list = List(model, &unreadable);
  RETURN_IF_ERROR(unreadable);
  return list;
}

absl::StatusOr<v1::ListCheckpointsResponse> CheckpointStore::List(const std::string& model,
                                                                  absl::Status* unreadable) const {
  std::vector<std::string> folders;
  if (model.empty()) {
    ASSIGN_OR_RETURN(folders, files::FoldersIn(directory_));
    for (std::string& folder : folders) folder = files::PathIn(directory_, folder);
  } else {
    folders.push_back(ModelFolder(model));
  }
  v1::ListCheckpointsResponse list;
  for (const std::string& folder : folders) {
    absl::StatusOr<Listing> read = ReadModelFolder(folder);
    if (!read.ok() && model.empty()) {  // as lost+found: the models are there all the same
      read = Listing{
          .manifests = {}, .damaged = {Utf8(read.status().message())}, .unreadable = read.status()};
    }
    ASSIGN_OR_RETURN(const Listing listing, std::move(read));
    for (const auto& manifest : listing.manifests) *list.add_checkpoints() = InfoOf(manifest);
    for (const std::string& damaged : listing.damaged) list.add_damaged(damaged);
    if (unreadable != nullptr) unreadable->Update(listing.unreadable);
  }
  std::sort(list.mutable_checkpoints()->begin(), list.mutable_checkpoints()->end(), Newer);
  CountChains(&list);
  return list;
}

absl::StatusOr<v1::CheckpointManifest> CheckpointStore::Read(const std::string& model,
                                                             const std::string& name) const {
  RETURN_IF_ERROR(CheckModelName(model));
  RETURN_IF_ERROR(CheckCheckpointName(name));
  if (name == kNewestCheckpoint) return Newest(model);
  auto manifest = ReadCheckpoint(FolderOf(model, name));
  if (!absl::IsNotFound(manifest.status())) return manifest;
  std::vector<std::string> names;
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, List(model));
  for (const v1::CheckpointInfo& info : list.checkpoints()) names.push_back(info.name());
  return absl::NotFoundError(
      absl::StrCat("model \"", model, "\" has no checkpoint \"", name, "\"",
                   names.empty() ? std::string("; it has none")
                                 : absl::StrCat("; ", KnownNames("checkpoints", name, names))));
}

v1::CheckpointInfo InfoOf(const CheckpointChain& chain) {
  v1::CheckpointInfo info = InfoOf(chain.front().manifest());
  info.set_chain(static_cast<int>(chain.size()) - 1);
  return info;
}

absl::StatusOr<v1::CheckpointManifest> CheckpointStore::Describe(const std::string& model,
                                                                 const std::string& name) const {
  ASSIGN_OR_RETURN(v1::CheckpointManifest manifest, Read(model, name));
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, List(model));
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    if (info.name() == manifest.name()) manifest.set_chain(info.chain());
  }
  return manifest;
}

absl::StatusOr<v1::CheckpointManifest> CheckpointStore::Newest(const std::string& model) const {
  ASSIGN_OR_RETURN(CheckpointChain chain, NewestChain(model));
  return std::move(*chain.front().mutable_manifest());
}

absl::StatusOr<CheckpointChain> CheckpointStore::NewestChain(const std::string& model,
                                                             Damages* damaged) const {
  RETURN_IF_ERROR(CheckModelName(model));
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, ListAll(model));
  Damages found;
  if (damaged == nullptr) damaged = &found;
  *damaged = list.damaged();
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    auto chain = Chain(model, info.name());
    if (!files::IsGone(chain.status())) return chain;  // else damaged, or deleted just now
    if (absl::IsDataLoss(chain.status())) *damaged->Add() = std::string(chain.status().message());
  }
  if (damaged->empty()) {
    return absl::NotFoundError(absl::StrCat("model \"", model, "\" has no checkpoints"));
  }
  const auto named_end = damaged->begin() + std::min(damaged->size(), 8);
  return absl::DataLossError(
      absl::StrCat("model \"", model, "\" has no intact checkpoint, only ", damaged->size(),
                   " damaged: ", absl::StrJoin(damaged->begin(), named_end, "; ")));
}

absl::StatusOr<CheckpointChain> CheckpointStore::Chain(const std::string& model,
                                                       const std::string& name) const {
  CheckpointChain chain(1);
  ASSIGN_OR_RETURN(*chain[0].mutable_manifest(), Read(model, name));
  chain[0].set_folder(FolderOf(model, chain[0].manifest().name()));
  while (!chain.back().manifest().parent().empty()) {
    const v1::CheckpointManifest& child = chain.back().manifest();
    auto parent = Read(model, child.parent());
    if (!parent.ok()) {
      if (!files::IsGone(parent.status())) return parent.status();
      return absl::DataLossError(absl::StrCat("checkpoint \"", child.name(), "\" builds on \"",
                                              child.parent(), "\": ", parent.status().message()));
    }
    if (parent->checkpoint_id() != child.parent_id() || parent->chain() >= child.chain()) {
      return absl::DataLossError(absl::StrCat(chain.back().folder(), ": checkpoint \"",
                                              child.name(), "\" builds on an earlier checkpoint \"",
                                              child.parent(), "\", which has been replaced"));
    }
    if (!SameLayout(child, *parent)) {
      return absl::DataLossError(absl::StrCat(chain.back().folder(), ": checkpoint \"",
                                              child.name(), "\" has other arrays than \"",
                                              child.parent(), "\", which it builds on"));
    }
    internal::v1::CheckpointSource source;
    source.set_folder(FolderOf(model, child.parent()));
    *source.mutable_manifest() = *std::move(parent);
    chain.push_back(std::move(source));
  }
  return chain;
}

// How checkpoints come and go.

// Best effort: litter that cannot be removed now is there the next time.
void CheckpointStore::RemoveLitter(const std::string& model_folder, int64_t now) const {
  const auto names = files::FoldersIn(model_folder);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const std::string folder = files::PathIn(model_folder, name);
    if (absl::StartsWith(name, kSaving) || absl::StartsWith(name, kDeleted)) {
      const auto touched = files::TouchedAt(folder);
      if (touched.ok() && now - *touched > kAbandonedAfterSeconds) Abandon(folder);
    } else if (files::IsThere(files::PathIn(folder, kMerging)).value_or(false)) {
      const auto lock = files::FolderLock::Take(model_folder, absl::ZeroDuration());
      const auto manifest = ReadManifest(folder);
      if (lock.ok() && manifest.ok()) RemoveUnlisted(folder, *manifest);
    }
  }
}

absl::StatusOr<std::string> CheckpointStore::MakeWorkFolder(const std::string& model) const {
  const std::string parent = ModelFolder(model);
  RETURN_IF_ERROR(files::MakeFolders(parent));
  ASSIGN_OR_RETURN(const std::string folder, files::MakeFolder(parent, kSaving));
  ASSIGN_OR_RETURN(const int64_t now, files::TouchedAt(folder));
  RemoveLitter(parent, now);
  return folder;
}

absl::StatusOr<std::string> CheckpointStore::BeginSave(const std::string& model,
                                                       const std::string& name) const {
  if (name.empty()) return MakeWorkFolder(model);
  RETURN_IF_ERROR(CheckNewCheckpointName(name));
  ASSIGN_OR_RETURN(const bool taken, files::IsThere(FolderOf(model, name)));
  if (taken) return AlreadyThere(model, name);
  return MakeWorkFolder(model);
}

absl::Status CheckpointStore::Heartbeat(const std::string& folder) const {
  const absl::Status status = files::TouchFolder(folder);
  if (!absl::IsNotFound(status)) return status;
  return absl::AbortedError(absl::StrCat(
      folder, ": was removed by another process, which found no sign of life of this one"));
}

// The clock may have been set back, or be behind that of another coordinator.
absl::StatusOr<int64_t> CheckpointStore::DateAfterOthers(
    const v1::CheckpointManifest& manifest) const {
  // What cannot be read has no date, and is no reason to refuse a save.
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, List(manifest.model()));
  int64_t newest = GivenUpUntil(manifest.model()).value_or(0);
  if (!list.checkpoints().empty()) newest = std::max(newest, list.checkpoints(0).saved_at_ms());
  return std::max(manifest.saved_at_ms(), newest + 1);
}

absl::Status CheckpointStore::Commit(const std::string& folder, v1::CheckpointManifest* made,
                                     const std::function<absl::Status()>& still_wanted) const {
  const v1::CheckpointManifest& manifest = *made;
  ReachFailpoint("save.rows_are_written");
  const std::string parent_folder = ModelFolder(manifest.model());
  const std::string target = FolderOf(manifest.model(), manifest.name());
  RETURN_IF_ERROR(Heartbeat(folder));
  for (const auto& file : manifest.files()) RETURN_IF_ERROR(CheckIsThere(folder, file));
  for (const auto& file : manifest.states()) RETURN_IF_ERROR(CheckIsThere(folder, file));

  ASSIGN_OR_RETURN(const files::FolderLock lock, files::FolderLock::Take(parent_folder));
  if (still_wanted != nullptr) RETURN_IF_ERROR(still_wanted());
  ASSIGN_OR_RETURN(const int64_t date, DateAfterOthers(manifest));
  made->set_saved_at_ms(date);
  ASSIGN_OR_RETURN(const std::string text, EncodeManifest(manifest));
  RETURN_IF_ERROR(files::WriteFileWhole(folder, kManifestFile, text));
  ReachFailpoint("save.manifest_is_written");
  if (!manifest.parent().empty()) {
    const auto parent = Read(manifest.model(), manifest.parent());
    if (!parent.ok() && !files::IsGone(parent.status())) return parent.status();
    if (!parent.ok() || parent->checkpoint_id() != manifest.parent_id()) {
      return absl::FailedPreconditionError(
          absl::StrCat("checkpoint \"", manifest.parent(), "\", which \"", manifest.name(),
                       "\" builds on, does not exist any more; save again"));
    }
    if (!SameLayout(manifest, *parent)) {
      return absl::FailedPreconditionError(
          absl::StrCat("checkpoint \"", manifest.name(), "\" has other arrays than \"",
                       manifest.parent(), "\" and cannot build on it; save all rows"));
    }
  }
  ASSIGN_OR_RETURN(const bool taken, files::IsThere(target));
  if (taken) return AlreadyThere(manifest.model(), manifest.name());
  return RenameOrNot(folder, target, "save.is_renamed");
}

void CheckpointStore::Abandon(const std::string& folder) const {
  (void)files::RemoveFolder(folder);  // what is left goes with the litter
}

absl::Status CheckpointStore::CommitMerge(const std::string& folder,
                                          v1::CheckpointManifest manifest) const {
  ReachFailpoint("merge.files_are_here");
  const std::string parent_folder = ModelFolder(manifest.model());
  const std::string target = FolderOf(manifest.model(), manifest.name());
  RETURN_IF_ERROR(Heartbeat(folder));
  for (const auto& file : manifest.files()) RETURN_IF_ERROR(CheckIsThere(folder, file));

  ASSIGN_OR_RETURN(const files::FolderLock lock, files::FolderLock::Take(parent_folder));
  const auto current = Read(manifest.model(), manifest.name());
  if (!current.ok() && !files::IsGone(current.status())) return current.status();
  if (!current.ok() || current->checkpoint_id() != manifest.checkpoint_id() ||
      current->parent().empty()) {
    return absl::AbortedError(absl::StrCat("checkpoint \"", manifest.name(), "\" of model \"",
                                           manifest.model(),
                                           "\" was deleted, merged or damaged in the meantime"));
  }
  RETURN_IF_ERROR(files::WriteFileWhole(target, kMerging, ""));
  for (v1::CheckpointFile& file : *manifest.mutable_files()) {
    // An incremental checkpoint has no files of such names, so no file of it is lost.
    const std::string name =
        absl::StrCat(absl::StripSuffix(file.path(), ".safetensors"), ".merged.safetensors");
    RETURN_IF_ERROR(Rename(files::PathIn(folder, file.path()), files::PathIn(target, name)));
    file.set_path(name);
  }
  RETURN_IF_ERROR(files::SyncFolder(target));
  ASSIGN_OR_RETURN(const std::string text, EncodeManifest(manifest));
  ReachFailpoint("merge.is_written");
  RETURN_IF_ERROR(files::WriteFileWhole(target, kManifestFile, text));
  ReachFailpoint("merge.is_renamed");
  RemoveUnlisted(target, manifest);
  Abandon(folder);
  return absl::OkStatus();
}

absl::Status CheckpointStore::SetBeginning(const v1::CheckpointManifest& checkpoint,
                                           uint64_t history) const {
  ASSIGN_OR_RETURN(const files::FolderLock lock,
                   files::FolderLock::Take(ModelFolder(checkpoint.model())));
  ASSIGN_OR_RETURN(const v1::CheckpointManifest here, Read(checkpoint.model(), checkpoint.name()));
  if (here.checkpoint_id() != checkpoint.checkpoint_id()) {
    return absl::NotFoundError(absl::StrCat("checkpoint \"", checkpoint.name(), "\" of model \"",
                                            checkpoint.model(),
                                            "\" was removed, and is another one now"));
  }
  return files::WriteFileWhole(FolderOf(checkpoint.model(), checkpoint.name()), BeginsName(history),
                               "");
}

absl::StatusOr<bool> CheckpointStore::HasBeginning(const std::string& model,
                                                   uint64_t history) const {
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, ListAll(model));
  return absl::c_any_of(list.checkpoints(), [&](const v1::CheckpointInfo& info) {
    const std::string folder = FolderOf(model, info.name());
    return files::IsThere(files::PathIn(folder, BeginsName(history))).value_or(false);
  });
}

// A newer one is there for those shards alone that have heard of it, until all have.
absl::Status CheckpointStore::CheckNoLogBegins(const v1::ListCheckpointsResponse& list,
                                               const std::string& name, uint64_t history) const {
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    ASSIGN_OR_RETURN(
        const bool begins,
        files::IsThere(files::PathIn(FolderOf(info.model(), info.name()), BeginsName(history))));
    if (info.name() != name) {
      if (begins) return absl::OkStatus();
      continue;
    }
    const auto manifest = Read(info.model(), name);
    if (!manifest.ok() && !files::IsGone(manifest.status())) return manifest.status();
    const bool may_begin = manifest.ok() && manifest->history() == history;
    if (!begins && !may_begin) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint \"", name,
                     "\" cannot be deleted: the shards' logs continue from it, and without it the "
                     "shards could not recover model \"",
                     info.model(), "\"; save a newer one first (`emberctl checkpoint save ",
                     info.model(), "`)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CheckpointStore::Delete(const std::string& model, const std::string& name,
                                                uint64_t history, const MayGo& may_go) const {
  RETURN_IF_ERROR(CheckModelName(model));
  RETURN_IF_ERROR(CheckCheckpointName(name));
  const std::string parent_folder = ModelFolder(model);
  const std::string folder = FolderOf(model, name);
  ASSIGN_OR_RETURN(const bool there, files::IsThere(folder));
  if (!there) {
    RETURN_IF_ERROR(CheckNewCheckpointName(name));  // what is newest just now may be another soon
    RETURN_IF_ERROR(Read(model, name).status());
  }
  const std::string deleted = files::RandomName(parent_folder, kDeleted);
  int64_t bytes = 0;
  {
    ASSIGN_OR_RETURN(const files::FolderLock lock, files::FolderLock::Take(parent_folder));
    ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, ListAll(model));
    for (const v1::CheckpointInfo& other : list.checkpoints()) {
      if (other.parent() != name) continue;
      return absl::FailedPreconditionError(absl::StrCat("checkpoint \"", other.name(),
                                                        "\" builds on \"", name,
                                                        "\"; merge that one first, or delete it"));
    }
    if (history != 0) RETURN_IF_ERROR(CheckNoLogBegins(list, name, history));
    if (const auto manifest = Read(model, name); may_go != nullptr && manifest.ok()) {
      RETURN_IF_ERROR(may_go(*manifest));
    }
    bytes = files::BytesIn(folder);
    RETURN_IF_ERROR(files::TouchFolder(folder));
    RETURN_IF_ERROR(RenameOrNot(folder, deleted, "delete.is_renamed"));
  }
  Abandon(deleted);
  return bytes;
}

absl::StatusOr<int64_t> CheckpointStore::RemoveAutomatic(const std::string& model, int keep,
                                                         uint64_t history, int64_t given_up,
                                                         const MayGo& may_go) const {
  RETURN_IF_ERROR(CheckModelName(model));
  int64_t removed = 0;
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, ListAll(model));
  int automatic = 0;
  // The newest first, so that a whole chain goes.
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    if (!info.automatic() || (info.saved_at_ms() > given_up && ++automatic <= keep)) continue;
    const auto bytes = Delete(model, info.name(), history, may_go);
    const bool passed = bytes.ok() || absl::IsFailedPrecondition(bytes.status()) ||
                        absl::IsNotFound(bytes.status());
    if (!passed) return bytes.status();
    removed += bytes.value_or(0);
  }
  return removed;
}

absl::Status CheckpointStore::GiveUp(const std::string& model, uint64_t history) const {
  RETURN_IF_ERROR(CheckModelName(model));
  // Of two calls that write the note at once, the earlier date could stay. And a save that is being
  // committed asked for its rows before they are given up: the list must have it.
  const auto lock = files::FolderLock::Take(ModelFolder(model), absl::Seconds(10));
  if (absl::IsNotFound(lock.status())) return files::CheckLinks(ModelFolder(model));
  RETURN_IF_ERROR(lock.status());
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, ListAll(model));
  if (list.checkpoints().empty() && list.damaged().empty()) return absl::OkStatus();
  if (history != 0 && !list.checkpoints().empty()) {
    ASSIGN_OR_RETURN(const auto newest, Read(model, list.checkpoints(0).name()));
    if (newest.history() != history) return absl::OkStatus();
  }
  int64_t until = GivenUpUntil(model).value_or(0);
  if (!list.checkpoints().empty()) until = std::max(until, list.checkpoints(0).saved_at_ms());
  const int64_t now = absl::ToUnixMillis(absl::Now());        // a date
  if (!list.damaged().empty()) until = std::max(until, now);  // the newest may be among them
  return files::WriteFileWhole(ModelFolder(model), kGivenUpFile, absl::StrCat(until));
}

absl::StatusOr<int64_t> CheckpointStore::GivenUpUntil(const std::string& model) const {
  const auto text = files::ReadFileWhole(files::PathIn(ModelFolder(model), kGivenUpFile));
  if (absl::IsNotFound(text.status())) return 0;
  RETURN_IF_ERROR(text.status());
  int64_t until = 0;
  if (absl::SimpleAtoi(*text, &until)) return until;
  return files::DamagedFile(files::PathIn(ModelFolder(model), kGivenUpFile),
                            "does not hold a time");
}

}  // namespace emberd::checkpoint
