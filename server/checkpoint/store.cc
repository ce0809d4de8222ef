#include "server/checkpoint/store.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/suggest.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/folders.h"

namespace emberd::server {
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
  ASSIGN_OR_RETURN(const bool there, IsThere(folder));
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
  ASSIGN_OR_RETURN(const std::vector<std::string> names, FoldersIn(folder));
  for (const std::string& name : names) {
    if (absl::StartsWith(name, ".")) continue;
    auto manifest = ReadCheckpoint(PathIn(folder, name));
    if (manifest.ok()) {
      listing.manifests.push_back(*std::move(manifest));
    } else if (!absl::IsNotFound(manifest.status())) {  // else deleted just now
      listing.damaged.push_back(Utf8(manifest.status().message()));
      if (!IsGone(manifest.status())) listing.unreadable.Update(manifest.status());
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

}  // namespace

std::string CheckpointStore::ModelFolder(const std::string& model) const {
  return PathIn(directory_, EscapeFileName(model));
}

std::string CheckpointStore::FolderOf(const std::string& model, const std::string& name) const {
  return PathIn(ModelFolder(model), name);
}

absl::StatusOr<v1::ListCheckpointsResponse> CheckpointStore::List(const std::string& model) const {
  absl::Status unreadable;
  return List(model, &unreadable);
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
    ASSIGN_OR_RETURN(folders, FoldersIn(directory_));
    for (std::string& folder : folders) folder = PathIn(directory_, folder);
  } else {
    folders.push_back(ModelFolder(model));
  }
  v1::ListCheckpointsResponse list;
  for (const std::string& folder : folders) {
    ASSIGN_OR_RETURN(const Listing listing, ReadModelFolder(folder));
    for (const auto& manifest : listing.manifests) *list.add_checkpoints() = InfoOf(manifest);
    for (const std::string& damaged : listing.damaged) list.add_damaged(damaged);
    unreadable->Update(listing.unreadable);
  }
  std::sort(list.mutable_checkpoints()->begin(), list.mutable_checkpoints()->end(), Newer);
  CountChains(&list);
  return list;
}

absl::StatusOr<v1::CheckpointManifest> CheckpointStore::Read(const std::string& model,
                                                             const std::string& name) const {
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

absl::StatusOr<v1::CheckpointManifest> CheckpointStore::Newest(const std::string& model) const {
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, ListAll(model));
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    auto chain = Chain(model, info.name());
    if (chain.ok()) return std::move(*chain->front().mutable_manifest());
    if (!IsGone(chain.status())) return chain.status();
  }
  const int unusable = list.checkpoints_size() + list.damaged_size();
  return absl::NotFoundError(
      unusable == 0 ? absl::StrCat("model \"", model, "\" has no checkpoints")
                    : absl::StrCat("model \"", model, "\" has no intact checkpoint, only ",
                                   unusable, " damaged"));
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
      if (!IsGone(parent.status())) return parent.status();
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

}  // namespace emberd::server
