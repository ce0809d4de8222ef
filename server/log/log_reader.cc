#include "server/log/log_reader.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "server/checkpoint/files.h"
#include "server/log/log_files.h"
#include "server/log/log_format.h"
#include "server/log/log_scan.h"

namespace emberd::server {
namespace {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

// The first record of a segment is its state, and no other is.
absl::Status CheckKind(const LogRecord& record, int64_t offset) {
  const bool is_state = record.kind_case() == LogRecord::kState;
  if (record.kind_case() == LogRecord::KIND_NOT_SET) {
    return absl::DataLossError("is of a kind that this program does not know");
  }
  if (is_state == (offset == kLogHeadBytes)) return absl::OkStatus();
  return absl::DataLossError(is_state ? "is a state, but does not begin a segment"
                                      : "begins a segment, but is not a state");
}

LogEnd EndOf(const LogScan& scan) {
  LogEnd end;
  end.next_sequence = scan.next_sequence();
  end.durable = scan.durable();
  end.torn_bytes = scan.torn_bytes();
  end.torn = scan.torn();
  if (scan.segments().empty()) return end;
  end.first_segment = scan.segments().front().number;
  end.next_segment = scan.segments().back().number + 1;
  for (const LogScan::Segment& segment : scan.segments()) {
    if (!segment.head.has_value()) continue;
    end.shard = static_cast<int>(segment.head->shard);
    end.shards = static_cast<int>(segment.head->shards);
    end.fsync = segment.head->fsync;
  }
  return end;
}

}  // namespace

absl::StatusOr<LogEnd> ReadLog(const std::string& folder, LogVisitor visit) {
  return ReadLog(folder, SystemLogFiles().BootId(), visit);
}

absl::StatusOr<LogEnd> ReadLog(const std::string& folder, absl::string_view boot_id,
                               LogVisitor visit) {
  LogScan scan(folder, boot_id);
  RETURN_IF_ERROR(scan.Run());
  LogRecord record;
  LogPosition position;
  std::map<uint64_t, uint64_t> older_blobs;
  RETURN_IF_ERROR(
      scan.ForEach([&](const LogScan::Segment& segment, int64_t offset, const Frame& frame) {
        const auto damaged = [&](absl::string_view what) {
          return DamagedFile(PathIn(folder, RecordsName(segment.number)),
                             absl::StrCat("byte ", offset, ": record ", frame.sequence, " ", what,
                                          LogAdvice(folder)));
        };
        if (!record.ParseFromArray(frame.payload.data(), static_cast<int>(frame.payload.size()))) {
          return damaged("cannot be read, although its checksum is right");
        }
        if (absl::Status status = CheckKind(record, offset); !status.ok()) {
          return damaged(status.message());
        }
        NoteOlderBlob(segment.number, OldestBlobSegment(record), &older_blobs);
        position = {segment.number, offset, frame.bytes, frame.sequence, frame.durable};
        return visit(record, position);
      }));
  LogEnd end = EndOf(scan);
  end.older_blobs = std::move(older_blobs);
  return end;
}

absl::StatusOr<absl::Span<const char>> ReadBlob(const std::string& folder, const LogBlob& blob,
                                                Buffer<char>& buffer) {
  // Nothing was written for it, so nothing of it can be lost.
  if (blob.bytes() == 0) return absl::Span<const char>();
  const std::string path = PathIn(folder, BlobsName(blob.segment()));
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) {
    return DamagedFile(path, absl::StrCat("is missing, but a record names it", LogAdvice(folder)));
  }
  if (file.get() < 0) return FileError(errno, path, "cannot be opened");
  struct stat status;
  if (fstat(file.get(), &status) != 0) return FileError(errno, path, "cannot be read");
  const auto size = static_cast<uint64_t>(status.st_size);
  if (blob.offset() > size || blob.bytes() > size - blob.offset()) {
    return DamagedFile(path, absl::StrCat("ends at byte ", size, ", but a record names ",
                                          blob.bytes(), " bytes at byte ", blob.offset(),
                                          ": it was cut off", LogAdvice(folder)));
  }
  const auto bytes = static_cast<int64_t>(blob.bytes());
  char* const data = buffer.Reserve(bytes);
  RETURN_IF_ERROR(ReadAt(file, path, static_cast<int64_t>(blob.offset()), data, bytes));
  const absl::Span<const char> read(data, bytes);
  if (ExtendCrc32c(0, read) == blob.crc32c()) return read;
  return DamagedFile(path, absl::StrCat("byte ", blob.offset(), ": the next ", bytes,
                                        " bytes are not what was written", LogAdvice(folder)));
}

const LogBlob* BlobOf(const LogRecord& record) {
  if (record.has_vote() && record.vote().has_blob()) return &record.vote().blob();
  if (record.has_part() && record.part().has_blob()) return &record.part().blob();
  return nullptr;
}

std::vector<LogBlob> BlobsOf(const LogRecord& record) {
  std::vector<LogBlob> blobs;
  if (const LogBlob* const blob = BlobOf(record)) blobs.push_back(*blob);
  for (const internal::v1::LogHeldVote& held : record.state().votes()) {
    if (held.vote().has_blob()) blobs.push_back(held.vote().blob());
  }
  for (const internal::v1::LogGroup& group : record.state().groups()) {
    for (const internal::v1::LogPart& part : group.parts()) {
      if (part.has_blob()) blobs.push_back(part.blob());
    }
  }
  return blobs;
}

uint64_t OldestBlobSegment(const LogRecord& record) {
  if (record.has_state()) return record.state().oldest_blob_segment();
  const LogBlob* const blob = BlobOf(record);
  return blob == nullptr ? 0 : blob->segment();
}

void NoteOlderBlob(uint64_t segment, uint64_t blob_segment,
                   std::map<uint64_t, uint64_t>* older_blobs) {
  if (blob_segment == 0 || blob_segment >= segment) return;
  const auto [oldest, is_new] = older_blobs->try_emplace(segment, blob_segment);
  oldest->second = std::min(oldest->second, blob_segment);
}

}  // namespace emberd::server
