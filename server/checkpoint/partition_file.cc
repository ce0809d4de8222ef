#include "server/checkpoint/partition_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include <fcntl.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/crc32c.h"
#include "base/safetensors.h"
#include "base/status.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "preprocess/plan/plan.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace {

constexpr char kFormat[] = "emberd.checkpoint.1";
constexpr char kValues[] = "values";
constexpr char kRowRanges[] = "row_ranges";
constexpr int64_t kRangeBytes = 2 * sizeof(int32_t);
constexpr int64_t kPage = 4096;

const char* TypeName(v1::DataType dtype) {
  return dtype == v1::BFLOAT16 ? "BF16" : dtype == v1::FLOAT16 ? "F16" : "F32";
}

// The partition as a slice of the variable that all of them make, in TensorFlow's terms.
std::map<std::string, std::string> Metadata(const PartitionArray& array) {
  const int64_t all_rows = array.rows_per_partition * array.partitions;
  const int64_t first_row = array.rows_per_partition * array.partition;
  return {
      {"format", kFormat},
      {"model", array.model},
      {"stack", array.stack},
      {"array", array.array},
      {"partition", absl::StrCat(array.partition)},
      {"partitions", absl::StrCat(array.partitions)},
      {"variable",
       array.array == kWeightsArray ? array.stack : absl::StrCat(array.stack, "/", array.array)},
      {"full_shape", absl::StrCat("[", all_rows, ", ", array.columns, "]")},
      {"slice_spec", absl::StrCat(all_rows, " ", array.columns, " ", first_row, ",",
                                  array.rows_per_partition, ":0,", array.columns)},
  };
}

// Tensors `values` [rows, columns] and then `row_ranges` int32 [ranges, 2].
struct PartitionHeader {
  int64_t rows = 0;
  int64_t ranges = 0;
};

SafetensorsHeader Header(const PartitionArray& array, const PartitionHeader& header) {
  const int64_t values = header.rows * array.row_bytes();
  return {
      .metadata = Metadata(array),
      .tensors = {
          {kValues, TypeName(array.dtype), {header.rows, array.columns}, 0, values},
          {kRowRanges, "I32", {header.ranges, 2}, values, values + header.ranges * kRangeBytes}}};
}

// "STACK.ARRAY.p0007.safetensors". Escaped together, two long names still make a short one.
std::string PartitionFileName(const PartitionArray& array) {
  const std::string names = files::EscapeFileName(absl::StrCat(array.stack, ".", array.array));
  return absl::StrFormat("%s.p%04d.safetensors", names, array.partition);
}

// Bytes of the header of any file of the array: it is written when all else is.
int64_t PartitionHeaderSize(const PartitionArray& array) {
  const PartitionHeader longest = {array.rows_per_partition, array.rows_per_partition};
  const std::string header = EncodeSafetensorsHeader(Header(array, longest));
  // Rows begin with a page.
  return preprocess::RoundUp(static_cast<int64_t>(header.size()), kPage);
}

// The header of a file with `data_bytes` behind it, without its first 8 bytes. INVALID_ARGUMENT
// unless it is one of this array.
absl::StatusOr<PartitionHeader> ParsePartitionHeader(absl::string_view text,
                                                     const PartitionArray& array,
                                                     int64_t data_bytes) {
  ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensorsHeader(text, data_bytes));
  for (const auto& [name, value] : Metadata(array)) {
    if (header.metadata[name] == value) continue;
    return absl::InvalidArgumentError(absl::StrCat("its ", name, " is \"", header.metadata[name],
                                                   "\", not \"", value,
                                                   "\": it is the wrong file"));
  }
  const auto tensor = [&](size_t i, absl::string_view name, absl::string_view dtype,
                          int64_t columns) {
    const SafetensorsTensor& found = header.tensors[i];
    return found.name == name && found.dtype == dtype && found.shape.size() == 2 &&
           found.shape[1] == columns;
  };
  if (header.tensors.size() != 2) {
    return absl::InvalidArgumentError("it does not hold the two tensors values and row_ranges");
  }
  if (!tensor(0, kValues, TypeName(array.dtype), array.columns)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "its first tensor is not values, ", TypeName(array.dtype), " [rows, ", array.columns, "]"));
  }
  if (!tensor(1, kRowRanges, "I32", 2)) {
    return absl::InvalidArgumentError("its second tensor is not row_ranges, I32 [ranges, 2]");
  }
  return PartitionHeader{header.tensors[0].shape[0], header.tensors[1].shape[0]};
}

constexpr int64_t kBlockBytes = int64_t{1} << 20;

int64_t RowsPerBlock(const PartitionArray& array) {
  return std::max<int64_t>(1, kBlockBytes / array.row_bytes());
}

absl::Status WrongChecksum(const std::string& path) {
  return files::DamagedFile(path, "its checksum is not that of the manifest: it was changed");
}

// Pages. A save may have a file of each array and partition open at once, and no budget has these.
constexpr size_t kBufferBytes = size_t{256} << 10;
// So many bytes are told to go to the disk at once: Finish then has little to wait for.
constexpr int64_t kWritebackBytes = int64_t{8} << 20;

}  // namespace

int64_t PartitionArray::row_bytes() const { return columns * config::WeightBytes(dtype); }

absl::StatusOr<PartitionArray> FindPartitionArray(const v1::CheckpointManifest& manifest,
                                                  absl::string_view stack, absl::string_view array,
                                                  int partition) {
  for (const v1::StackPlan& plan : manifest.plan().stacks()) {
    if (plan.name() != stack || plan.tables().empty()) continue;
    PartitionArray found{.model = manifest.model(),
                         .stack = plan.name(),
                         .array = std::string(array),
                         .partition = partition,
                         .partitions = manifest.plan().partitions(),
                         .columns = plan.embedding_dim(),
                         .rows_per_partition = plan.rows_per_partition()};
    const auto& tables = manifest.config().tables();
    const auto table = std::find_if(tables.begin(), tables.end(), [&](const v1::TableConfig& t) {
      return t.name() == plan.tables(0).name();
    });
    if (table == tables.end()) break;
    if (array == kWeightsArray) {
      found.dtype = table->storage_dtype();
      return found;
    }
    for (const config::SlotInfo& slot : config::OptimizerSlots(table->optimizer())) {
      if (slot.name != array) continue;
      if (slot.one_per_row) found.columns = 1;
      return found;
    }
    break;
  }
  return absl::NotFoundError(absl::StrCat("checkpoint \"", manifest.name(), "\" of model \"",
                                          manifest.model(), "\" has no array \"", array,
                                          "\" of a stack \"", stack, "\""));
}

absl::StatusOr<std::unique_ptr<PartitionFileReader>> PartitionFileReader::Open(
    const std::string& folder, const v1::CheckpointFile& file, const PartitionArray& array) {
  const std::string path = files::PathIn(folder, file.path());
  if (absl::Status status = files::CheckFileName(file.path()); !status.ok()) {
    return files::DamagedFile(path, status.message());
  }
  ASSIGN_OR_RETURN(FileDescriptor descriptor, files::OpenNamedFile(path, file.bytes()));
  std::unique_ptr<PartitionFileReader> reader(
      new PartitionFileReader(array, path, file, std::move(descriptor)));
  RETURN_IF_ERROR(reader->ReadHeader());
  return reader;
}

absl::Status PartitionFileReader::ReadHeader() {
  header_size_ = PartitionHeaderSize(array_);
  if (info_.bytes() < header_size_)
    return files::DamagedFile(path_, "it is too short for its header");
  std::string header(header_size_, '\0');
  RETURN_IF_ERROR(files::ReadAt(file_, path_, 0, header.data(), header_size_));
  if (ExtendCrc32c(0, header) != info_.header_crc32c()) return WrongChecksum(path_);
  const auto prefix = absl::string_view(header).substr(0, kSafetensorsPrefix);
  const auto size = SafetensorsHeaderSize(prefix, info_.bytes());
  if (!size.ok()) return files::DamagedFile(path_, size.status().message());
  if (*size != header_size_) return files::DamagedFile(path_, "its header has another length");
  const auto parsed = ParsePartitionHeader(absl::string_view(header).substr(kSafetensorsPrefix),
                                           array_, info_.bytes() - header_size_);
  if (!parsed.ok()) return files::DamagedFile(path_, parsed.status().message());
  if (parsed->rows != info_.rows()) {
    return files::DamagedFile(path_, absl::StrCat("it has ", parsed->rows,
                                                  " rows, but the manifest says ", info_.rows()));
  }
  return ReadRanges(parsed->ranges);
}

absl::Status PartitionFileReader::ReadRanges(int64_t count) {
  ranges_.resize(count);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(LocalRows));
  RETURN_IF_ERROR(files::ReadAt(file_, path_, info_.bytes() - bytes,
                                reinterpret_cast<char*>(ranges_.data()), bytes));
  if (absl::Status status = CheckLocalRows(ranges_, array_.rows_per_partition); !status.ok()) {
    return files::DamagedFile(path_, absl::StrCat("row_ranges: ", status.message()));
  }
  int64_t position = 0;
  for (const LocalRows& range : ranges_) {
    sorted_.push_back({range, position});
    position += range.end - range.begin;
  }
  if (position != info_.rows()) {
    return files::DamagedFile(
        path_, absl::StrCat("row_ranges name ", position, " rows, not ", info_.rows()));
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
    RETURN_IF_ERROR(files::ReadAt(file_, path_, header_size_ + position * row_bytes, bytes.data(),
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
  RETURN_IF_ERROR(files::ReadAt(file_, path_, header_size_ + position * array_.row_bytes(),
                                window_.data(), static_cast<int64_t>(window_.size())));
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
  const std::string path = files::PathIn(folder, name);
  FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file.get() < 0) return files::FileError(errno, path, "cannot be created");
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
  data_crc32c_ = ExtendCrc32c(data_crc32c_, bytes);
  // The last bytes of a file are seldom whole pages.
  if (direct_ && bytes.size() != kBufferBytes) SetDirect(false);
  const int64_t offset = header_size_ + data_bytes_;
  absl::Status status = files::WriteAt(file_, path_, offset, bytes);
  if (direct_ && absl::IsInvalidArgument(status)) {
    SetDirect(false);
    status = files::WriteAt(file_, path_, offset, bytes);
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
  const std::string header = EncodeSafetensorsHeader(
      Header(array_, {rows_, static_cast<int64_t>(ranges_.size())}), header_size_);
  SetDirect(false);
  RETURN_IF_ERROR(files::WriteAt(file_, path_, 0, header));
  RETURN_IF_ERROR(files::SyncFile(file_, path_));
  file_.Close();
  v1::CheckpointFile file;
  file.set_path(name_);
  file.set_stack(array_.stack);
  file.set_array(array_.array);
  file.set_partition(array_.partition);
  file.set_rows(rows_);
  file.set_bytes(header_size_ + data_bytes_);
  file.set_header_crc32c(ExtendCrc32c(0, header));
  file.set_data_crc32c(data_crc32c_);
  return file;
}

absl::StatusOr<PartitionChain> PartitionChain::Open(const CheckpointChain& chain,
                                                    absl::string_view stack,
                                                    absl::string_view array, int partition) {
  PartitionChain opened;
  ASSIGN_OR_RETURN(opened.array_,
                   FindPartitionArray(chain.front().manifest(), stack, array, partition));
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      if (file.partition() != partition || file.stack() != stack || file.array() != array) continue;
      ASSIGN_OR_RETURN(auto reader,
                       PartitionFileReader::Open(source.folder(), file, opened.array_));
      opened.readers_.push_back(std::move(reader));
    }
  }
  return opened;
}

absl::Status PartitionChain::Verify(absl::FunctionRef<absl::Status(int64_t)> read) {
  for (const auto& reader : readers_) RETURN_IF_ERROR(reader->Verify(read));
  return absl::OkStatus();
}

std::vector<LocalRows> PartitionChain::HeldRows() const {
  std::vector<LocalRows> all;
  for (const auto& reader : readers_) {
    all.insert(all.end(), reader->ranges().begin(), reader->ranges().end());
  }
  std::sort(all.begin(), all.end(),
            [](const LocalRows& a, const LocalRows& b) { return a.begin < b.begin; });
  std::vector<LocalRows> held;
  for (const LocalRows& range : all) {
    if (held.empty() || range.begin > held.back().end) {
      held.push_back(range);
    } else {
      held.back().end = std::max(held.back().end, range.end);
    }
  }
  return held;
}

absl::StatusOr<bool> PartitionChain::ReadRow(int64_t row, absl::Span<char> out) {
  for (const auto& reader : readers_) {
    ASSIGN_OR_RETURN(const bool found, reader->ReadRow(row, out));
    if (found) return true;
  }
  return false;
}

}  // namespace emberd::checkpoint
