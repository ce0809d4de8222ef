#include "client/emberctl/tensor_file.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/safetensors.h"
#include "base/status.h"

namespace emberd::emberctl {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr absl::string_view kNpyMagic = "\x93NUMPY";
constexpr size_t kMaxNpyHeader = 1 << 20;
constexpr size_t kMaxDimensions = 8;

absl::Status Bad(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

// The disk knows the names in the file's folder then. Not where the file system does not sync
// folders, or this process may write to it and not read it.
std::error_code SyncFolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  const FileDescriptor descriptor(
      open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() >= 0 && fsync(descriptor.get()) == 0) return {};
  const bool cannot = errno == EINVAL || errno == EACCES;
  return cannot ? std::error_code() : std::error_code(errno, std::generic_category());
}

// It is there, and no file or folder.
bool IsOther(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_other(path, ignored);
}

// Where a symbolic link to a file leads, so that the link stays.
std::string TargetOf(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return std::filesystem::is_regular_file(target, error) ? target.string() : path;
}

// The file of that name, made if there is none, for one process at a time. EWOULDBLOCK: another
// one has it.
FileDescriptor OpenLocked(const std::string& path, int* error) {
  while (true) {
    FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    *error = file.get() < 0 ? errno : 0;
    if (*error != 0) return file;
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) *error = errno;  // else locks are not to be had there
      return file;
    }
    // Whoever had it locked may have given it its other name since.
    struct stat held = {};
    struct stat named = {};
    if (fstat(file.get(), &held) != 0 || stat(path.c_str(), &named) != 0) continue;
    if (held.st_ino == named.st_ino && held.st_dev == named.st_dev) return file;
  }
}

struct OpenFile {
  std::ifstream stream;
  int64_t bytes = 0;
};

absl::StatusOr<OpenFile> Open(const std::string& path) {
  OpenFile file;
  errno = 0;
  file.stream.open(path, std::ios::binary);
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory) {
    return absl::NotFoundError(absl::StrCat(path, ": ", error.message()));
  }
  if (error || !file.stream) {
    return Bad(path, error ? error.message() : std::generic_category().message(errno));
  }
  file.bytes = static_cast<int64_t>(size);
  return file;
}

// The next `size` bytes, or what there is of them.
std::string Take(std::ifstream& stream, size_t size) {
  std::string bytes(size, '\0');
  stream.read(bytes.data(), static_cast<std::streamsize>(size));
  bytes.resize(static_cast<size_t>(stream.gcount()));
  return bytes;
}

// `values` bytes of the file begin at tensor->offset.
absl::Status SetShape(std::vector<int64_t> shape, int64_t values, TensorInFile* tensor) {
  if (shape.size() == 1) shape.push_back(1);
  int64_t needed = sizeof(float);
  bool countable = true;
  for (const int64_t size : shape) countable &= !__builtin_mul_overflow(needed, size, &needed);
  if (shape.size() != 2 || !countable) {
    return Bad(tensor->path,
               absl::StrCat("\"", tensor->name, "\" has the shape [", absl::StrJoin(shape, ", "),
                            "]; it must be a matrix of rows"));
  }
  if (needed != values) {
    return Bad(tensor->path, absl::StrCat("\"", tensor->name, "\" has ", values, " bytes, but its ",
                                          "shape needs ", needed, "; is the file cut off?"));
  }
  tensor->rows = shape[0];
  tensor->columns = shape[1];
  return absl::OkStatus();
}

// What stands behind 'key': in the header, to the comma or bracket that ends it.
absl::string_view NpyValue(absl::string_view dict, absl::string_view key) {
  const size_t found = dict.find(absl::StrCat("'", key, "':"));
  if (found == absl::string_view::npos) return "";
  dict.remove_prefix(found + key.size() + 3);
  dict = absl::StripLeadingAsciiWhitespace(dict);
  return dict.substr(0,
                     absl::StartsWith(dict, "(") ? dict.find(')') + 1 : dict.find_first_of(",}"));
}

absl::StatusOr<std::vector<TensorInFile>> ReadNpyHeader(const std::string& path) {
  ASSIGN_OR_RETURN(OpenFile file, Open(path));
  const absl::StatusOr<NpyStart> start = ReadNpyStart(Take(file.stream, kMaxNpyHeader));
  RETURN_IF_ERROR(Annotate(start.status(), path));
  if (start->type != "'<f4'") {
    return Bad(path, absl::StrCat("holds the type ", start->type,
                                  "; it must be '<f4': save array.astype(\"float32\")"));
  }
  TensorInFile tensor;
  tensor.path = path;
  tensor.name = std::filesystem::path(path).stem();
  tensor.offset = static_cast<int64_t>(start->bytes);
  RETURN_IF_ERROR(SetShape(start->shape, file.bytes - tensor.offset, &tensor));
  return std::vector<TensorInFile>{std::move(tensor)};
}

absl::StatusOr<std::vector<TensorInFile>> ReadSafetensorsHeader(const std::string& path) {
  ASSIGN_OR_RETURN(OpenFile file, Open(path));
  const absl::StatusOr<int64_t> size =
      SafetensorsHeaderSize(Take(file.stream, kSafetensorsPrefix), file.bytes);
  if (!size.ok()) return Bad(path, size.status().message());
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(
      Take(file.stream, static_cast<size_t>(*size - kSafetensorsPrefix)), file.bytes - *size);
  if (!header.ok()) return Bad(path, header.status().message());
  std::vector<TensorInFile> tensors;
  for (const SafetensorsTensor& entry : header->tensors) {
    if (entry.dtype != "F32") {
      return Bad(path, absl::StrCat("\"", entry.name, "\" has the type ", entry.dtype,
                                    "; only F32 is read: convert it to float32"));
    }
    TensorInFile& tensor = tensors.emplace_back();
    tensor.path = path;
    tensor.name = entry.name;
    tensor.metadata = header->metadata;
    tensor.offset = *size + entry.begin;
    RETURN_IF_ERROR(SetShape(entry.shape, entry.end - entry.begin, &tensor));
  }
  return tensors;
}

}  // namespace

absl::Status MalformedNpy(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("not a usable .npy file: ", what));
}

absl::StatusOr<NpyStart> ReadNpyStart(absl::string_view content) {
  if (!absl::ConsumePrefix(&content, kNpyMagic)) {
    return MalformedNpy("it does not begin with \\x93NUMPY");
  }
  const int version = content.empty() ? 1 : static_cast<unsigned char>(content[0]);
  if (version < 1 || version > 3) {
    return MalformedNpy(absl::StrCat("its format version is ", version, "; it must be 1 to 3"));
  }
  // Two bytes of version, and the length of the header, a Python dictionary as text.
  const size_t begin = version == 1 ? 4 : 6;
  uint32_t length = 0;
  if (content.size() >= begin) std::memcpy(&length, content.data() + 2, begin - 2);
  if (content.size() < begin + length) return MalformedNpy("it ends inside its header");
  const absl::string_view header = content.substr(begin, length);
  NpyStart start = {.bytes = kNpyMagic.size() + begin + length,
                    .type = std::string(NpyValue(header, "descr"))};
  absl::string_view text = NpyValue(header, "shape");
  if (!absl::ConsumePrefix(&text, "(") || !absl::ConsumeSuffix(&text, ")")) {
    return MalformedNpy("it has no shape");
  }
  for (const absl::string_view size : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(size, &value) || value < 0 || start.shape.size() == kMaxDimensions) {
      return MalformedNpy(absl::StrCat("its shape is (", text, ")"));
    }
    start.shape.push_back(value);
  }
  if (NpyValue(header, "fortran_order") == "False") return start;
  return MalformedNpy("it is in Fortran order; save numpy.ascontiguousarray(array)");
}

std::string NpyHeader(int64_t rows, int64_t columns) {
  std::string dict = absl::StrCat("{'descr': '<f4', 'fortran_order': False, 'shape': (", rows, ", ",
                                  columns, "), }");
  constexpr size_t kPrefix = 10;  // magic, version, and the length of what follows
  dict.append(63 - (kPrefix + dict.size()) % 64, ' ');
  dict.push_back('\n');
  std::string header("\x93NUMPY\x01\x00", 8);
  header.push_back(static_cast<char>(dict.size() & 0xff));
  header.push_back(static_cast<char>(dict.size() >> 8));
  return header + dict;
}

std::string SafetensorsStart(const std::string& name,
                             const std::map<std::string, std::string>& metadata, int64_t rows,
                             int64_t columns) {
  const int64_t bytes = rows * columns * static_cast<int64_t>(sizeof(float));
  return EncodeSafetensorsHeader(
      {.metadata = metadata, .tensors = {{name, "F32", {rows, columns}, 0, bytes}}});
}

PartialFile::PartialFile(const std::string& path)
    : path_(path), target_(TargetOf(path)), partial_(IsOther(path) ? path : target_ + ".partial") {
  if (partial_ != path_) lock_ = OpenLocked(partial_, &error_);
  ours_ = partial_ != path_ && error_ == 0;
  if (error_ == 0) {
    file_.open(partial_, std::ios::binary);
    error_ = file_ ? 0 : errno;
  } else {
    file_.setstate(std::ios::failbit);
  }
}

PartialFile::~PartialFile() {
  file_.close();
  std::error_code ignored;
  if (ours_) std::filesystem::remove(partial_, ignored);
}

absl::Status PartialFile::Write(absl::string_view bytes) {
  file_.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return Written();
}

absl::Status PartialFile::Close() {
  file_.flush();
  RETURN_IF_ERROR(Written());  // closing it forgets what the system has said
  // Before it takes the place of another one, which a loss of power would otherwise leave empty.
  if (partial_ != path_ && fsync(lock_.get()) != 0) {
    error_ = errno;
    file_.setstate(std::ios::failbit);
  }
  file_.close();
  lock_.Close();  // a table may have more files than a process may have open
  return Written();
}

absl::Status PartialFile::Keep() {
  std::error_code error;
  if (partial_ != path_) std::filesystem::rename(partial_, target_, error);
  if (!error) ours_ = false;
  if (!error && partial_ != path_) error = SyncFolderOf(target_);
  return error ? absl::ErrnoToStatus(error.value(), absl::StrCat(path_, ": cannot be written"))
               : Written();
}

absl::Status PartialFile::Written() {
  if (file_) return absl::OkStatus();
  if (error_ == 0) error_ = errno == 0 ? EIO : errno;
  if (error_ == EWOULDBLOCK && partial_ != path_) {
    return absl::FailedPreconditionError(absl::StrCat(path_, ": another process is writing it, to ",
                                                      partial_, "; try again when it has ended"));
  }
  return absl::ErrnoToStatus(error_, absl::StrCat(path_, ": cannot be written"));
}

absl::StatusOr<std::vector<TensorInFile>> ReadTensorHeaders(const std::string& path) {
  if (absl::EndsWith(path, ".npy")) return ReadNpyHeader(path);
  if (absl::EndsWith(path, ".safetensors")) return ReadSafetensorsHeader(path);
  return Bad(path, "must end with .npy or .safetensors, which selects the format");
}

absl::StatusOr<std::vector<float>> ReadRowsOf(const TensorInFile& tensor, int64_t first_row,
                                              int64_t rows) {
  std::ifstream file(tensor.path, std::ios::binary);
  const int64_t row_bytes = tensor.columns * static_cast<int64_t>(sizeof(float));
  std::vector<float> values(static_cast<size_t>(rows * tensor.columns));
  file.seekg(tensor.offset + first_row * row_bytes);
  file.read(reinterpret_cast<char*>(values.data()), rows * row_bytes);
  if (!file) return Bad(tensor.path, "cannot be read completely");
  return values;
}

}  // namespace emberd::emberctl
