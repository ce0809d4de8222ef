// Tables in files that others read: matrices of float32 in .npy and .safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_descriptor.h"

namespace emberd::emberctl {

// One matrix in a file, row-major.
struct TensorInFile {
  std::string path;
  std::string name;                             // in .npy: that of the file, without its end
  std::map<std::string, std::string> metadata;  // of the file; .npy has none
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t offset = 0;  // in the file
};

// What stands before the values of a .npy file.
struct NpyStart {
  size_t bytes = 0;
  std::string type;  // "'<f4'"
  std::vector<int64_t> shape = {};
};
// Of a file that begins with `content`, of format version 1, 2 or 3 in C order, with 0 to 8
// dimensions. INVALID_ARGUMENT for anything else.
absl::StatusOr<NpyStart> ReadNpyStart(absl::string_view content);
absl::Status MalformedNpy(absl::string_view what);

// What stands before the values of `rows` x `columns`. Both formats want data that begin at a
// multiple of 64 and of 8 bytes.
std::string NpyHeader(int64_t rows, int64_t columns);
std::string SafetensorsStart(const std::string& name,
                             const std::map<std::string, std::string>& metadata, int64_t rows,
                             int64_t columns);

// A new file, PATH.partial until it is complete: a file that had the name before stays until then,
// and one that never becomes complete is removed, unless the process is killed. One process at a
// time writes it. A symbolic link to a file stays. What has the name and is no file, such as a
// pipe, is written to at once.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path);
  ~PartialFile();

  // With the path and what the system says: this or something before has failed.
  absl::Status Write(absl::string_view bytes);
  absl::Status Close();
  // Gives a closed file its name.
  absl::Status Keep();

 private:
  absl::Status Written();

  const std::string path_;
  const std::string target_;  // behind links
  const std::string partial_;
  FileDescriptor lock_;
  std::ofstream file_;
  int error_ = 0;      // what the system has said first; 0: nothing
  bool ours_ = false;  // partial_ has been made here, and is there
};

// The matrices of a file whose name ends with .npy or .safetensors; a vector is a matrix of one
// column. INVALID_ARGUMENT, with the path: it is none, is cut off, or holds something else than
// float32.
absl::StatusOr<std::vector<TensorInFile>> ReadTensorHeaders(const std::string& path);

// Some rows of a matrix.
absl::StatusOr<std::vector<float>> ReadRowsOf(const TensorInFile& tensor, int64_t first_row,
                                              int64_t rows);

}  // namespace emberd::emberctl
