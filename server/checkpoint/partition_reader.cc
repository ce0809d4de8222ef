#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/safetensors.h"
#include "base/status.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/partition_file.h"

namespace emberd::server {
namespace {

constexpr int64_t kBlockBytes = int64_t{1} << 20;

int64_t RowsPerBlock(const PartitionArray& array) {
  return std::max<int64_t>(1, kBlockBytes / array.row_bytes());
}

absl::Status WrongChecksum(const std::string& path) {
  return DamagedFile(path, "its checksum is not that of the manifest: it was changed");
}

}  // namespace

absl::StatusOr<std::unique_ptr<PartitionFileReader>> PartitionFileReader::Open(
    const std::string& folder, const v1::CheckpointFile& file, const PartitionArray& array) {
  const std::string path = PathIn(folder, file.path());
  if (absl::Status status = CheckFileName(file.path()); !status.ok()) {
    return DamagedFile(path, status.message());
  }
  ASSIGN_OR_RETURN(FileDescriptor descriptor, OpenNamedFile(path, file.bytes()));
  std::unique_ptr<PartitionFileReader> reader(
      new PartitionFileReader(array, path, file, std::move(descriptor)));
  RETURN_IF_ERROR(reader->ReadHeader());
  return reader;
}

absl::Status PartitionFileReader::ReadHeader() {
  header_size_ = PartitionHeaderSize(array_);
  if (info_.bytes() < header_size_) return DamagedFile(path_, "it is too short for its header");
  std::string header(header_size_, '\0');
  RETURN_IF_ERROR(ReadAt(file_, path_, 0, header.data(), header_size_));
  if (ExtendCrc32c(0, absl::MakeConstSpan(header.data(), header.size())) != info_.header_crc32c()) {
    return WrongChecksum(path_);
  }
  const auto prefix = absl::string_view(header).substr(0, kSafetensorsPrefix);
  const auto size = SafetensorsHeaderSize(prefix, info_.bytes());
  if (!size.ok()) return DamagedFile(path_, size.status().message());
  if (*size != header_size_) return DamagedFile(path_, "its header has another length");
  const auto parsed = ParsePartitionHeader(absl::string_view(header).substr(kSafetensorsPrefix),
                                           array_, info_.bytes() - header_size_);
  if (!parsed.ok()) return DamagedFile(path_, parsed.status().message());
  if (parsed->rows != info_.rows()) {
    return DamagedFile(path_, absl::StrCat("it has ", parsed->rows, " rows, but the manifest says ",
                                           info_.rows()));
  }
  return ReadRanges(parsed->ranges);
}

absl::Status PartitionFileReader::ReadRanges(int64_t count) {
  ranges_.resize(count);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(LocalRows));
  RETURN_IF_ERROR(
      ReadAt(file_, path_, info_.bytes() - bytes, reinterpret_cast<char*>(ranges_.data()), bytes));
  if (absl::Status status = CheckLocalRows(ranges_, array_.rows_per_partition); !status.ok()) {
    return DamagedFile(path_, absl::StrCat("row_ranges: ", status.message()));
  }
  int64_t position = 0;
  for (const LocalRows& range : ranges_) {
    sorted_.push_back({range, position});
    position += range.end - range.begin;
  }
  if (position != info_.rows()) {
    return DamagedFile(path_,
                       absl::StrCat("row_ranges name ", position, " rows, not ", info_.rows()));
  }
  std::sort(sorted_.begin(), sorted_.end(),
            [](const PlacedRange& a, const PlacedRange& b) { return a.rows.begin < b.rows.begin; });
  return absl::OkStatus();
}

absl::Status PartitionFileReader::Stream(
    absl::FunctionRef<absl::Status(int64_t, absl::Span<const char>)> use) {
  const int64_t row_bytes = array_.row_bytes();
  std::vector<char> block(std::min(info_.rows(), RowsPerBlock(array_)) * row_bytes);
  uint32_t crc = 0;
  size_t range = 0;
  int64_t used = 0;  // rows of the range
  for (int64_t position = 0; position < info_.rows();) {
    const int64_t rows = std::min(info_.rows() - position, RowsPerBlock(array_));
    const auto bytes = absl::MakeSpan(block.data(), rows * row_bytes);
    RETURN_IF_ERROR(ReadAt(file_, path_, header_size_ + position * row_bytes, bytes.data(),
                           static_cast<int64_t>(bytes.size())));
    crc = ExtendCrc32c(crc, bytes);
    for (int64_t row = 0; row < rows;) {
      const int64_t first_row = ranges_[range].begin + used;
      const int64_t count = std::min(rows - row, ranges_[range].end - first_row);
      RETURN_IF_ERROR(use(first_row, bytes.subspan(row * row_bytes, count * row_bytes)));
      row += count;
      used += count;
      if (first_row + count < ranges_[range].end) continue;
      ++range;
      used = 0;
    }
    position += rows;
  }
  crc = ExtendCrc32c(crc, absl::MakeConstSpan(reinterpret_cast<const char*>(ranges_.data()),
                                              ranges_.size() * sizeof(LocalRows)));
  return crc == info_.data_crc32c() ? absl::OkStatus() : WrongChecksum(path_);
}

absl::Status PartitionFileReader::Verify(absl::FunctionRef<absl::Status(int64_t)> read) {
  RETURN_IF_ERROR(read(info_.bytes() - info_.rows() * array_.row_bytes()));
  return Stream([&](int64_t, absl::Span<const char> rows) {
    return read(static_cast<int64_t>(rows.size()));
  });
}

const PartitionFileReader::PlacedRange* PartitionFileReader::Find(int64_t row) {
  const auto holds = [&](size_t i) {
    return i < sorted_.size() && row >= sorted_[i].rows.begin && row < sorted_[i].rows.end;
  };
  if (holds(last_found_)) return &sorted_[last_found_];
  const auto after = std::upper_bound(
      sorted_.begin(), sorted_.end(), row,
      [](int64_t value, const PlacedRange& range) { return value < range.rows.begin; });
  if (after == sorted_.begin()) return nullptr;
  const size_t found = after - sorted_.begin() - 1;
  if (!holds(found)) return nullptr;
  last_found_ = found;
  return &sorted_[found];
}

// From `position` on: what ascending rows will ask for next. Where the file goes on with lower
// rows, they will not.
absl::Status PartitionFileReader::LoadWindow(const PlacedRange& range, int64_t position) {
  int64_t end = range.position + (range.rows.end - range.rows.begin);
  const int64_t most = position + RowsPerBlock(array_);
  for (size_t i = &range - sorted_.data() + 1; i < sorted_.size() && end < most; ++i) {
    if (sorted_[i].position != end) break;
    end += sorted_[i].rows.end - sorted_[i].rows.begin;
  }
  const int64_t rows = std::min(end, most) - position;
  window_rows_ = 0;
  window_.resize(rows * array_.row_bytes());
  RETURN_IF_ERROR(ReadAt(file_, path_, header_size_ + position * array_.row_bytes(), window_.data(),
                         static_cast<int64_t>(window_.size())));
  window_begin_ = position;
  window_rows_ = rows;
  return absl::OkStatus();
}

absl::StatusOr<bool> PartitionFileReader::ReadRow(int64_t row, absl::Span<char> out) {
  const PlacedRange* const range = Find(row);
  if (range == nullptr) return false;
  const int64_t position = range->position + (row - range->rows.begin);
  if (position < window_begin_ || position >= window_begin_ + window_rows_) {
    RETURN_IF_ERROR(LoadWindow(*range, position));
  }
  std::memcpy(out.data(), window_.data() + (position - window_begin_) * array_.row_bytes(),
              array_.row_bytes());
  return true;
}

}  // namespace emberd::server
