// Folders of checkpoints: what is in them, who may change them, and what dead processes left there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_descriptor.h"

namespace emberd::server {

// Names of the folders in a folder, sorted; none if it does not exist. FAILED_PRECONDITION: a link
// on the way to it leads nowhere (see CheckLinks).
absl::StatusOr<std::vector<std::string>> FoldersIn(const std::string& folder);
// The same of what is no folder.
absl::StatusOr<std::vector<std::string>> FilesIn(const std::string& folder);
// FAILED_PRECONDITION, naming the link, if one on the way to `path`, itself included, leads
// nowhere: a disk that is not mounted must not look like one that is empty.
absl::Status CheckLinks(const std::string& path);
// Bytes of the files in a folder.
int64_t BytesIn(const std::string& folder);
// With everything in it; what is gone already is no error.
absl::Status RemoveFolder(const std::string& folder);

// Makes a folder, and those that it stands in; what is there already is no error.
absl::Status MakeFolders(const std::string& folder);
// A new one in `parent`: `prefix` and a random number.
absl::StatusOr<std::string> MakeFolder(const std::string& parent, absl::string_view prefix);
// A name for such a folder.
std::string RandomName(const std::string& parent, absl::string_view prefix);

// Somebody is at work in the folder.
absl::Status TouchFolder(const std::string& folder);
// When that was said last, in seconds by the clock of the file system. NOT_FOUND: there is no such
// folder.
absl::StatusOr<int64_t> TouchedAt(const std::string& folder);

// Among all processes, on all machines: only one at a time has it. Held until it goes out of scope;
// a process that dies gives it up.
class FolderLock {
 public:
  // NOT_FOUND: there is no such folder.
  static absl::StatusOr<FolderLock> Take(const std::string& folder);

 private:
  explicit FolderLock(FileDescriptor file) : file_(std::move(file)) {}
  FileDescriptor file_;
};

}  // namespace emberd::server
