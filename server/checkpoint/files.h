// What all files of checkpoints share: names, errors, small files that are written and read whole.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_descriptor.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::server {

// "PATH: WHAT: what the system says". A disk or quota that is full is RESOURCE_EXHAUSTED, what may
// not be written PERMISSION_DENIED, a disk that fails FAILED_PRECONDITION.
absl::Status FileError(int error, absl::string_view path, absl::string_view what);
// "PATH: what": DATA_LOSS.
absl::Status DamagedFile(absl::string_view path, absl::string_view what);
// Whether something will never be read, so that something older may take its place: it does not
// exist, or its bytes are wrong. What an error of the disk keeps from being read may come back.
bool IsGone(const absl::Status& status);
// Also a link that leads nowhere.
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

// The same of a file that a manifest lists with its checksum.
absl::StatusOr<v1::CheckpointFile> WriteListedFile(const std::string& folder,
                                                   const std::string& name,
                                                   absl::string_view bytes);
// DATA_LOSS if it is missing, cut off or changed.
absl::StatusOr<std::string> ReadListedFile(const std::string& folder,
                                           const v1::CheckpointFile& file);

}  // namespace emberd::server
