#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include <fcntl.h>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/partition_file.h"

namespace emberd::server {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
// So many bytes are told to go to the disk at once: Finish then has little to wait for.
constexpr int64_t kWritebackBytes = int64_t{8} << 20;

}  // namespace

absl::Status CheckLocalRows(absl::Span<const LocalRows> ranges, int64_t rows_per_partition) {
  std::vector<LocalRows> sorted(ranges.begin(), ranges.end());
  const auto by_begin = [](const LocalRows& a, const LocalRows& b) { return a.begin < b.begin; };
  if (!std::is_sorted(sorted.begin(), sorted.end(), by_begin)) {
    std::sort(sorted.begin(), sorted.end(), by_begin);
  }
  int64_t end = 0;
  for (const LocalRows& range : sorted) {
    if (range.begin < end || range.end <= range.begin || range.end > rows_per_partition) {
      return absl::InvalidArgumentError(absl::StrCat("rows [", range.begin, ", ", range.end,
                                                     ") must lie in [", end, ", ",
                                                     rows_per_partition, "), behind those before"));
    }
    end = range.end;
  }
  return absl::OkStatus();
}

PartitionFileWriter::PartitionFileWriter(const PartitionArray& array, std::string name,
                                         std::string path, FileDescriptor file, MappedMemory buffer)
    : array_(array),
      name_(std::move(name)),
      path_(std::move(path)),
      file_(std::move(file)),
      header_size_(PartitionHeaderSize(array)),
      buffer_(std::move(buffer)) {
  SetDirect(true);
}

// Copying rows into the system's cache takes longer than anything else here, and nobody reads them
// there. Not every file system can do without.
void PartitionFileWriter::SetDirect(bool direct) {
  direct_ = fcntl(file_.get(), F_SETFL, direct ? O_DIRECT : 0) == 0 && direct;
}

absl::StatusOr<std::unique_ptr<PartitionFileWriter>> PartitionFileWriter::Create(
    const std::string& folder, const PartitionArray& array) {
  const std::string name = PartitionFileName(array);
  const std::string path = PathIn(folder, name);
  FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file.get() < 0) return FileError(errno, path, "cannot be created");
  ASSIGN_OR_RETURN(MappedMemory buffer, MappedMemory::Map(kBufferBytes, /*huge_pages=*/false));
  return std::unique_ptr<PartitionFileWriter>(
      new PartitionFileWriter(array, name, path, std::move(file), std::move(buffer)));
}

absl::Status PartitionFileWriter::Append(int64_t first_row, absl::Span<const char> rows) {
  const auto count = static_cast<int64_t>(rows.size()) / array_.row_bytes();
  if (first_row < 0 || first_row > array_.rows_per_partition - count ||
      count * array_.row_bytes() != static_cast<int64_t>(rows.size())) {
    return absl::InternalError(absl::StrCat(path_, ": ", rows.size(), " bytes from row ", first_row,
                                            " on do not fit ", array_.rows_per_partition,
                                            " rows of ", array_.row_bytes(), " bytes"));
  }
  if (count == 0) return absl::OkStatus();
  if (ranges_.empty() || ranges_.back().end != first_row) {
    ranges_.push_back({static_cast<int32_t>(first_row), static_cast<int32_t>(first_row)});
  }
  ranges_.back().end += static_cast<int32_t>(count);
  rows_ += count;
  return AppendBytes(rows);
}

absl::Status PartitionFileWriter::AppendBytes(absl::Span<const char> bytes) {
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kBufferBytes - buffered_);
    std::memcpy(buffer_.data() + buffered_, bytes.data(), count);
    buffered_ += count;
    bytes.remove_prefix(count);
    if (buffered_ == kBufferBytes) RETURN_IF_ERROR(Flush());
  }
  return absl::OkStatus();
}

absl::Status PartitionFileWriter::Flush() {
  const absl::string_view bytes(buffer_.data(), std::exchange(buffered_, 0));
  data_crc32c_ = ExtendCrc32c(data_crc32c_, absl::MakeConstSpan(bytes.data(), bytes.size()));
  // The last bytes of a file are seldom whole pages.
  if (direct_ && bytes.size() != kBufferBytes) SetDirect(false);
  const int64_t offset = header_size_ + data_bytes_;
  absl::Status status = WriteAt(file_, path_, offset, bytes);
  if (direct_ && absl::IsInvalidArgument(status)) {
    SetDirect(false);
    status = WriteAt(file_, path_, offset, bytes);
  }
  RETURN_IF_ERROR(status);
  const int64_t before = data_bytes_ / kWritebackBytes;
  data_bytes_ += static_cast<int64_t>(bytes.size());
  if (!direct_ && data_bytes_ / kWritebackBytes > before) {
    // Only a hint: what goes wrong is told by fsync.
    sync_file_range(file_.get(), header_size_ + before * kWritebackBytes,
                    data_bytes_ - before * kWritebackBytes, SYNC_FILE_RANGE_WRITE);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::CheckpointFile> PartitionFileWriter::Finish() {
  if (absl::Status status = CheckLocalRows(ranges_, array_.rows_per_partition); !status.ok()) {
    return absl::InternalError(absl::StrCat(path_, ": ", status.message()));
  }
  RETURN_IF_ERROR(AppendBytes(absl::MakeConstSpan(reinterpret_cast<const char*>(ranges_.data()),
                                                  ranges_.size() * sizeof(LocalRows))));
  RETURN_IF_ERROR(Flush());
  const std::string header =
      EncodePartitionHeader(array_, {rows_, static_cast<int64_t>(ranges_.size())});
  SetDirect(false);
  RETURN_IF_ERROR(WriteAt(file_, path_, 0, header));
  RETURN_IF_ERROR(SyncFile(file_, path_));
  file_.Close();
  v1::CheckpointFile file;
  file.set_path(name_);
  file.set_stack(array_.stack);
  file.set_array(array_.array);
  file.set_partition(array_.partition);
  file.set_rows(rows_);
  file.set_bytes(header_size_ + data_bytes_);
  file.set_header_crc32c(ExtendCrc32c(0, absl::MakeConstSpan(header.data(), header.size())));
  file.set_data_crc32c(data_crc32c_);
  return file;
}

}  // namespace emberd::server
