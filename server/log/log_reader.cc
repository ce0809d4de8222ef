#include "server/log/log_reader.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "server/files/files.h"
#include "server/log/log_files.h"

namespace emberd::log {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// Behind the last byte that is not zero.
int64_t EndOfBytes(absl::string_view bytes) {
  const size_t last = bytes.find_last_not_of('\0');
  return last == absl::string_view::npos ? 0 : static_cast<int64_t>(last) + 1;
}

absl::string_view From(absl::string_view bytes, int64_t offset) {
  return bytes.substr(std::min(static_cast<size_t>(offset), bytes.size()));
}

std::string RecordsFrom(uint64_t first, uint64_t end) {
  if (end == first + 1) return absl::StrCat("record ", first, " is missing");
  return absl::StrCat("records ", first, " to ", end - 1, " are missing");
}

// What to do about a log that cannot be used; follows what is wrong with it.
std::string LogAdvice(const std::string& folder) {
  return absl::StrCat(
      "; `emberctl log verify ", folder,
      "` shows what is left; to go on without the logs, stop all shards, move their folders "
      "shard-NNNN away, start the shards and restore a checkpoint");
}

// Finds out what of a log counts, and whether anything is missing. One thread at a time.
class LogScan {
 public:
  struct Segment {
    uint64_t number = 0;
    bool has_records = false;
    bool has_blobs = false;
    bool cut = false;             // its records are smaller than they ever were beside blobs
    std::optional<LogHead> head;  // none: not readable
    uint64_t limit = 0;           // records from here on are those of later segments
    int64_t end = kLogHeadBytes;  // behind the last record that counts
    // None of its records counts.
    bool Void() const { return head.has_value() && head->first_sequence >= limit; }
  };

  LogScan(std::string folder, absl::string_view boot_id)
      : folder_(std::move(folder)), boot_id_(boot_id) {}

  // Reads all records. See ReadLog for what is an error.
  absl::Status Run() {
    RETURN_IF_ERROR(List());
    if (segments_.empty()) return absl::OkStatus();
    RETURN_IF_ERROR(ReadHeads());
    Break broken;
    RETURN_IF_ERROR(ScanRecords(&broken));
    RETURN_IF_ERROR(Judge(broken));
    RETURN_IF_ERROR(CutAtLostBlob());
    return CheckBlobFiles();
  }

  // The records that count, in order.
  absl::Status ForEach(absl::FunctionRef<absl::Status(const Segment&, int64_t, const Frame&)> use) {
    for (size_t i = 0; i < segments_.size(); ++i) {
      const Segment& segment = segments_[i];
      if (segment.Void() || segment.end == kLogHeadBytes) continue;
      ASSIGN_OR_RETURN(const absl::string_view bytes, Bytes(i));
      for (int64_t offset = kLogHeadBytes; offset < segment.end;) {
        const auto frame = DecodeFrame(From(bytes, offset), segment.head->salt);
        if (!frame.has_value())
          return Damaged({i, offset, ""}, "the file was changed while it was read");
        RETURN_IF_ERROR(use(segment, offset, *frame));
        offset += frame->bytes;
      }
    }
    return absl::OkStatus();
  }

  // But for older_blobs.
  LogEnd End() const {
    LogEnd end;
    end.next_sequence = next_sequence_;
    end.durable = durable_;
    end.torn_bytes = torn_bytes_;
    end.torn = torn_;
    if (segments_.empty()) return end;
    end.first_segment = segments_.front().number;
    end.next_segment = segments_.back().number + 1;
    for (const Segment& segment : segments_) {
      if (!segment.head.has_value()) continue;
      end.shard = static_cast<int>(segment.head->shard);
      end.shards = static_cast<int>(segment.head->shards);
      end.fsync = segment.head->fsync;
    }
    return end;
  }

 private:
  // Where no good record follows the one before.
  struct Break {
    size_t segment = 0;
    int64_t offset = 0;
    std::string what;
  };
  // Something good behind a break.
  struct Evidence {
    std::string what;
    uint64_t durable = 0;
  };

  absl::Status List() {
    ASSIGN_OR_RETURN(const LogFolder found, ListLog(folder_));
    if (found.newest() == 0) return absl::OkStatus();
    // Blobs before the first records are what DropBefore had no time for.
    const uint64_t first = found.records.empty() ? found.blobs.front() : found.records.front();
    // A number that is no segment's.
    if (found.newest() - first > found.files().size()) {
      uint64_t missing = first;
      while (std::binary_search(found.records.begin(), found.records.end(), missing)) ++missing;
      return files::DamagedFile(files::PathIn(folder_, RecordsName(missing)),
                                absl::StrCat("is missing, and so are others", LogAdvice(folder_)));
    }
    for (uint64_t number = first; number <= found.newest(); ++number) {
      Segment& segment = segments_.emplace_back();
      segment.number = number;
      segment.has_records = std::binary_search(found.records.begin(), found.records.end(), number);
      segment.has_blobs = std::binary_search(found.blobs.begin(), found.blobs.end(), number);
    }
    return absl::OkStatus();
  }

  absl::Status ReadHeads() {
    for (Segment& segment : segments_) {
      if (!segment.has_records) continue;
      ASSIGN_OR_RETURN(const std::string bytes, files::ReadFileBegin(Path(segment), kLogHeadBytes));
      segment.cut = static_cast<int64_t>(bytes.size()) < kLogHeadBytes;
      const absl::StatusOr<std::optional<LogHead>> head = DecodeLogHead(bytes);
      if (!head.ok()) return Annotate(head.status(), Path(segment));
      if (head->has_value()) RETURN_IF_ERROR(CheckHead(segment, **head));
    }
    uint64_t limit = kNoLimit;
    for (auto segment = segments_.rbegin(); segment != segments_.rend(); ++segment) {
      segment->limit = limit;
      if (segment->head.has_value()) limit = std::min(limit, segment->head->first_sequence);
    }
    return absl::OkStatus();
  }

  absl::Status CheckHead(Segment& segment, const LogHead& head) {
    if (head.segment != segment.number) {
      return files::DamagedFile(
          Path(segment),
          absl::StrCat("is segment ", head.segment, " under another name", LogAdvice(folder_)));
    }
    for (const Segment& other : segments_) {
      if (!other.head.has_value()) continue;
      if (other.head->shard == head.shard && other.head->shards == head.shards) break;
      return files::DamagedFile(
          Path(segment),
          absl::StrCat("is of shard ", head.shard, " of ", head.shards, ", but segment ",
                       other.number, " of shard ", other.head->shard, " of ", other.head->shards,
                       LogAdvice(folder_)));
    }
    segment.head = head;
    return absl::OkStatus();
  }

  // Beyond segments that a process began and left without a head, and whose elders are gone.
  absl::StatusOr<size_t> FirstWithRecords() {
    for (size_t i = 0; i < segments_.size(); ++i) {
      if (segments_[i].head.has_value() || segments_[i].limit == kNoLimit) return i;
      ASSIGN_OR_RETURN(const absl::string_view bytes, Bytes(i));
      std::optional<Evidence> found;
      next_sequence_ = 0;  // any record before those of later segments
      FindFrames(segments_[i], kLogHeadBytes, bytes, &found);
      next_sequence_ = 1;
      if (found.has_value()) return i;
    }
    return 0;
  }

  // Ends where a record is missing: in any case behind the last one.
  absl::Status ScanRecords(Break* broken) {
    ASSIGN_OR_RETURN(const size_t first, FirstWithRecords());
    const Segment& oldest = segments_[first];
    if (oldest.head.has_value()) {
      next_sequence_ = std::min(oldest.head->first_sequence, oldest.limit);
    } else if (oldest.number > 1) {
      return Damaged({first, 0, ""}, "the header of the segment is damaged");
    }
    for (size_t i = 0; i < segments_.size(); ++i) {
      Segment& segment = segments_[i];
      if (segment.Void()) continue;
      if (!segment.head.has_value()) {
        if (segment.limit == next_sequence_) continue;
        *broken = {
            i, 0,
            segment.has_records ? "the header of the segment is damaged" : "the file is missing"};
        return absl::OkStatus();
      }
      if (segment.head->first_sequence != next_sequence_) {
        broken->what = RecordsFrom(next_sequence_, segment.head->first_sequence);
        return absl::OkStatus();
      }
      durable_ = std::max(durable_, segment.head->durable);
      ASSIGN_OR_RETURN(const absl::string_view bytes, Bytes(i));
      const bool all = ScanSegment(segment, bytes);
      *broken = {i, segment.end, absl::StrCat("record ", next_sequence_, " is damaged")};
      // Where nothing stands in the place of the next record, it is the next segment that tells
      // more.
      if (!all && EndOfBytes(From(bytes, segment.end)) > 0) return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  // True: all that the segment has to offer was there.
  bool ScanSegment(Segment& segment, absl::string_view bytes) {
    while (next_sequence_ < segment.limit) {
      const auto frame = DecodeFrame(From(bytes, segment.end), segment.head->salt);
      if (!frame.has_value() || frame->sequence != next_sequence_) return false;
      segment.end += frame->bytes;
      durable_ = std::max(durable_, frame->durable);
      ++next_sequence_;
    }
    return true;
  }

  absl::Status Judge(const Break& broken) {
    ASSIGN_OR_RETURN(const std::optional<Evidence> behind, FindBehind(broken));
    if (behind.has_value()) {
      const bool was_durable = behind->durable >= next_sequence_;
      if (was_durable || !PowerMayHaveGone(broken.segment)) {
        return Damaged(broken, absl::StrCat(broken.what, ", but ", behind->what));
      }
    }
    EndAt(broken.segment, broken.offset, next_sequence_, broken.what);
    return absl::OkStatus();
  }

  absl::StatusOr<std::optional<Evidence>> FindBehind(const Break& broken) {
    std::optional<Evidence> found;
    std::string blobs;  // whose records are missing
    for (size_t i = broken.segment; i < segments_.size(); ++i) {
      const Segment& segment = segments_[i];
      if (segment.Void()) continue;
      // The disk has room for a segment's head before there are blobs: without it, records are
      // gone.
      if ((!segment.has_records || segment.cut) && segment.has_blobs) {
        blobs = BlobsName(segment.number);
      }
      if (i > broken.segment && segment.head.has_value()) {
        if (!found.has_value()) {
          found = {absl::StrCat("segment ", segment.number, " begins with record ",
                                segment.head->first_sequence),
                   0};
        }
        found->durable = std::max(found->durable, segment.head->durable);
        // Whoever began it had read all before it from the disk, as the machine had been started
        // since.
        if (BootOf(i) != BootOf(broken.segment)) found->durable = kNoLimit;
      }
      ASSIGN_OR_RETURN(const absl::string_view bytes, Bytes(i));
      FindFrames(segment, i == broken.segment ? broken.offset : kLogHeadBytes, bytes, &found);
    }
    if (!blobs.empty()) {
      if (!found.has_value()) found = {absl::StrCat(blobs, " exists"), 0};
      found->durable = kNoLimit;
    }
    return found;
  }

  void FindFrames(const Segment& segment, int64_t offset, absl::string_view bytes,
                  std::optional<Evidence>* found) const {
    const std::optional<uint32_t> salt =
        segment.head.has_value() ? std::make_optional(segment.head->salt) : std::nullopt;
    const int64_t end = EndOfBytes(bytes);
    for (offset = RoundUp(offset, kFrameAlignment); offset < end;) {
      const auto frame = DecodeFrame(From(bytes, offset), salt);
      // The next record itself is no loss: the state of a segment stands there before its head.
      if (!frame.has_value() || frame->sequence <= next_sequence_ ||
          frame->sequence >= segment.limit) {
        offset += kFrameAlignment;
        continue;
      }
      if (!found->has_value()) {
        *found = {absl::StrCat("record ", frame->sequence, " at byte ", offset, " of ",
                               RecordsName(segment.number), " is good"),
                  0};
      }
      (*found)->durable = std::max((*found)->durable, frame->durable);
      offset += frame->bytes;
    }
  }

  // Records that a loss of power has left without their blobs do not count.
  absl::Status CutAtLostBlob() {
    struct Cut {
      uint64_t segment;
      int64_t offset;
      uint64_t sequence;
    };
    std::optional<Cut> cut;
    Buffer<char> buffer;
    internal::v1::LogRecord record;
    RETURN_IF_ERROR(ForEach([&](const Segment& segment, int64_t offset, const Frame& frame) {
      const size_t index = segment.number - segments_[0].number;
      if (cut.has_value() || frame.sequence <= durable_ || !PowerMayHaveGone(index) ||
          !record.ParseFromArray(frame.payload.data(), static_cast<int>(frame.payload.size()))) {
        return absl::OkStatus();
      }
      const internal::v1::LogBlob* const blob = BlobOf(record);
      // Those of segments that were dropped are not lost.
      if (blob == nullptr || blob->segment() < segments_[0].number) return absl::OkStatus();
      const absl::Status read = ReadBlob(folder_, *blob, buffer).status();
      // What an error of the disk hides has not been lost: it is not to be cut off.
      if (!read.ok() && !files::IsGone(read)) return read;
      if (!read.ok()) cut = {segment.number, offset, frame.sequence};
      return absl::OkStatus();
    }));
    if (cut.has_value()) {
      EndAt(cut->segment - segments_[0].number, cut->offset, cut->sequence,
            absl::StrCat("the blob of record ", cut->sequence, " is missing"));
    }
    return absl::OkStatus();
  }

  // A file without which some record means nothing. A segment of which no record names a blob may
  // have lost its own, with the power or when somebody gave it up.
  absl::Status CheckBlobFiles() {
    const auto missing = [](const Segment& segment) {
      return !segment.Void() && !segment.has_blobs && segment.end != kLogHeadBytes;
    };
    if (std::none_of(segments_.begin(), segments_.end(), missing)) return absl::OkStatus();
    internal::v1::LogRecord record;
    return ForEach([&](const Segment&, int64_t, const Frame& frame) -> absl::Status {
      if (!record.ParseFromArray(frame.payload.data(), static_cast<int>(frame.payload.size()))) {
        return absl::OkStatus();
      }
      const internal::v1::LogBlob* const blob = BlobOf(record);
      if (blob == nullptr || blob->segment() < segments_[0].number) return absl::OkStatus();
      const size_t at = blob->segment() - segments_[0].number;
      if (at >= segments_.size() || !missing(segments_[at])) return absl::OkStatus();
      if (frame.sequence > durable_ && PowerMayHaveGone(at)) return absl::OkStatus();
      return files::DamagedFile(files::PathIn(folder_, BlobsName(segments_[at].number)),
                                absl::StrCat("is missing", LogAdvice(folder_)));
    });
  }

  void EndAt(size_t segment, int64_t offset, uint64_t next_sequence, std::string why) {
    next_sequence_ = next_sequence;
    torn_bytes_ = 0;
    const std::string place = absl::StrCat(Path(segments_[segment]), ": byte ", offset, ": ", why);
    for (size_t i = segment; i < segments_.size(); ++i) {
      Segment& cut = segments_[i];
      if (cut.Void()) continue;
      if (const absl::StatusOr<absl::string_view> bytes = Bytes(i); bytes.ok()) {
        torn_bytes_ += EndOfBytes(From(*bytes, i == segment ? offset : 0));
      }
      cut.end = i == segment ? std::max(offset, kLogHeadBytes) : kLogHeadBytes;
    }
    torn_ = torn_bytes_ == 0 ? "" : place;
  }

  // When the segment was written, or the last one before it that can be read.
  std::string BootOf(size_t segment) const {
    for (size_t i = segment + 1; i-- > 0;) {
      if (!segments_[i].head.has_value()) continue;
      return {segments_[i].head->boot_id.data(), kBootIdBytes};
    }
    return boot_id_;  // the first head is there before anything else
  }

  // Since then.
  bool PowerMayHaveGone(size_t segment) const {
    const std::string boot_id = BootOf(segment);
    return boot_id != boot_id_ || boot_id == std::string(kBootIdBytes, '\0');
  }

  absl::StatusOr<absl::string_view> Bytes(size_t segment) {
    if (loaded_ == segment) return bytes_;
    loaded_.reset();
    bytes_.clear();
    if (segments_[segment].has_records) {
      ASSIGN_OR_RETURN(bytes_, files::ReadFileWhole(Path(segments_[segment])));
    }
    loaded_ = segment;
    return bytes_;
  }

  std::string Path(const Segment& segment) const {
    return files::PathIn(folder_, RecordsName(segment.number));
  }

  absl::Status Damaged(const Break& broken, absl::string_view what) const {
    return files::DamagedFile(Path(segments_[broken.segment]),
                              absl::StrCat("byte ", broken.offset, ": ", what, LogAdvice(folder_)));
  }

  const std::string folder_;
  const std::string boot_id_;
  std::vector<Segment> segments_;
  uint64_t next_sequence_ = 1;
  uint64_t durable_ = 0;
  int64_t torn_bytes_ = 0;
  std::string torn_;
  std::optional<size_t> loaded_;  // whose bytes these are
  std::string bytes_;
};

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
  uint64_t begins = 0;
  RETURN_IF_ERROR(
      scan.ForEach([&](const LogScan::Segment& segment, int64_t offset, const Frame& frame) {
        const auto damaged = [&](absl::string_view what) {
          return files::DamagedFile(files::PathIn(folder, RecordsName(segment.number)),
                                    absl::StrCat("byte ", offset, ": record ", frame.sequence, " ",
                                                 what, LogAdvice(folder)));
        };
        if (!record.ParseFromArray(frame.payload.data(), static_cast<int>(frame.payload.size()))) {
          return damaged("cannot be read, although its checksum is right");
        }
        if (absl::Status status = CheckKind(record, offset); !status.ok()) {
          return damaged(status.message());
        }
        NoteOlderBlob(segment.number, OldestBlobSegment(record), &older_blobs);
        // A program of before has gone on with the log, and may have removed segments.
        if (record.has_state() && record.state().begins() == 0) begins = 0;
        begins = std::max({begins, record.begins().segment(), record.state().begins()});
        position = {segment.number, offset, frame.bytes, frame.sequence, frame.durable};
        return visit(record, position);
      }));
  LogEnd end = scan.End();
  if (begins != 0 && begins < end.first_segment) {
    return files::DamagedFile(
        files::PathIn(folder, RecordsName(begins)),
        absl::StrCat("is missing, but the log says that it begins there", LogAdvice(folder)));
  }
  end.older_blobs = std::move(older_blobs);
  return end;
}

absl::StatusOr<absl::Span<const char>> ReadBlob(const std::string& folder, const LogBlob& blob,
                                                Buffer<char>& buffer) {
  // Nothing was written for it, so nothing of it can be lost.
  if (blob.bytes() == 0) return absl::Span<const char>();
  const std::string path = files::PathIn(folder, BlobsName(blob.segment()));
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) {
    return files::DamagedFile(path,
                              absl::StrCat("is missing, but a record names it", LogAdvice(folder)));
  }
  if (file.get() < 0) return files::FileError(errno, path, "cannot be opened");
  struct stat status;
  if (fstat(file.get(), &status) != 0) return files::FileError(errno, path, "cannot be read");
  const auto size = static_cast<uint64_t>(status.st_size);
  if (blob.offset() > size || blob.bytes() > size - blob.offset()) {
    return files::DamagedFile(path, absl::StrCat("ends at byte ", size, ", but a record names ",
                                                 blob.bytes(), " bytes at byte ", blob.offset(),
                                                 ": it was cut off", LogAdvice(folder)));
  }
  const auto bytes = static_cast<int64_t>(blob.bytes());
  char* const data = buffer.Reserve(bytes);
  RETURN_IF_ERROR(files::ReadAt(file, path, static_cast<int64_t>(blob.offset()), data, bytes));
  const absl::Span<const char> read(data, bytes);
  if (ExtendCrc32c(0, read) == blob.crc32c()) return read;
  return files::DamagedFile(path,
                            absl::StrCat("byte ", blob.offset(), ": the next ", bytes,
                                         " bytes are not what was written", LogAdvice(folder)));
}

}  // namespace emberd::log
