// What all files of checkpoints share: names, errors, small files that are written and read whole.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::files {

// "PATH: WHAT: what the system says". A disk or quota that is full is RESOURCE_EXHAUSTED, what may
// not be written PERMISSION_DENIED, a disk that fails FAILED_PRECONDITION.
absl::Status FileError(int error, absl::string_view path, absl::string_view what);
// "PATH: what": DATA_LOSS.
absl::Status DamagedFile(absl::string_view path, absl::string_view what);
// Whether something will never be read, so that something older may take its place: it does not
// exist, or its bytes are wrong. What an error of the disk keeps from being read may come back.
bool IsGone(const absl::Status& status);
// True also for a link that leads nowhere.
absl::StatusOr<bool> IsThere(const std::string& path);

// A name of any characters as part of a file name: others than letters, digits and _-. as %XX.
// Different names stay different, and none becomes too long or begins with a dot.
std::string EscapeFileName(absl::string_view name);
// "FOLDER/NAME".
std::string PathIn(absl::string_view folder, absl::string_view name);
// INVALID_ARGUMENT unless `name` is that of a file right in a folder.
absl::Status CheckFileName(absl::string_view name);

// Opens for reading a file that a manifest names. DATA_LOSS if it is missing or has not `bytes`
// bytes.
absl::StatusOr<FileDescriptor> OpenNamedFile(const std::string& path, int64_t bytes);
// All of `size` bytes at `offset`. DATA_LOSS if they are not there.
absl::Status ReadAt(const FileDescriptor& file, absl::string_view path, int64_t offset, char* bytes,
                    int64_t size);
// All of `bytes` at `offset`.
absl::Status WriteAt(const FileDescriptor& file, absl::string_view path, int64_t offset,
                     absl::string_view bytes);
absl::Status SyncFile(const FileDescriptor& file, absl::string_view path);
// Makes names that were made, changed or removed in a folder survive a loss of power.
absl::Status SyncFolder(const std::string& folder);

// Under FOLDER/NAME there is the old file or the new one, never a part; also after a loss of power.
absl::Status WriteFileWhole(const std::string& folder, const std::string& name,
                            absl::string_view bytes);
// NOT_FOUND: there is none.
absl::StatusOr<std::string> ReadFileWhole(const std::string& path);
// So many bytes from its beginning, or all that it has.
absl::StatusOr<std::string> ReadFileBegin(const std::string& path, int64_t most);

// The same of a file that a manifest lists with its checksum.
absl::StatusOr<v1::CheckpointFile> WriteListedFile(const std::string& folder,
                                                   const std::string& name,
                                                   absl::string_view bytes);
// DATA_LOSS if it is missing, cut off or changed.
absl::StatusOr<std::string> ReadListedFile(const std::string& folder,
                                           const v1::CheckpointFile& file);

// Folders of checkpoints: what is in them, who may change them, and what dead processes left there.

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

// Notes that somebody is at work in the folder.
absl::Status TouchFolder(const std::string& folder);
// When that was noted last, in seconds by the clock of the file system. NOT_FOUND: there is no such
// folder.
absl::StatusOr<int64_t> TouchedAt(const std::string& folder);

// Among all processes, on all machines: only one at a time has it. Held until it goes out of scope;
// a process that dies gives it up.
class FolderLock {
 public:
  // NOT_FOUND: there is no such folder. UNAVAILABLE: another one has kept it for `patience`.
  static absl::StatusOr<FolderLock> Take(const std::string& folder,
                                         absl::Duration patience = absl::Minutes(1));

 private:
  explicit FolderLock(FileDescriptor file) : file_(std::move(file)) {}
  FileDescriptor file_;
};

}  // namespace emberd::files
