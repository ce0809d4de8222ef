// The files of a log: their names, their bytes, and what is done to them on the disk, in whose
// place tests can put another one. A folder holds segments, numbered from 1 without a gap; the
// older ones go when nobody needs them. Each is two files:
//
//   0000000001.records   a head of 128 bytes, then records, each beginning at a multiple of 8 and
//                        as large as its frame; zeros behind the last one
//   0000000001.blobs     bulk bytes in no order, which records name by place, size and CRC-32C
//
// and maybe files like 0000000001.spare, which were blobs and will be blobs of later segments.
//
// head     char[8] "EMBERLOG", u32 CRC-32C of what follows, u32 version (1), u32 shard, u32 shards,
//          u64 segment, u64 sequence of its first record, u64 newest record known to be on the
//          disk, u32 fsync (StorageConfig.Fsync), u32 salt, char[16] boot id of the machine, zeros
// record   u32 "LREC", u32 CRC-32C of what follows, u64 sequence, u64 newest record known to be on
//          the disk, u32 length, u32 salt, then so many bytes: a LogRecord
//
// Sequences are 1, 2, 3, ... over all segments. A head says with its first one where the log before
// it ends: what older segments hold from there on does not count. The salt is random, so that no
// bytes that somebody put into a record look like a record. Numbers are little-endian.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/message_lite.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::log {

inline constexpr int64_t kLogHeadBytes = 128;
inline constexpr int64_t kFrameHeadBytes = 32;
inline constexpr int64_t kFrameAlignment = 8;
inline constexpr int64_t kBlobAlignment = 64;
inline constexpr size_t kBootIdBytes = 16;
inline constexpr int64_t kMostRecordBytes = int64_t{1} << 30;

inline int64_t RoundUp(int64_t bytes, int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// As its fields stand in the file.
struct LogHead {
  uint32_t shard = 0;
  uint32_t shards = 0;
  uint64_t segment = 0;
  uint64_t first_sequence = 0;
  uint64_t durable = 0;
  v1::StorageConfig::Fsync fsync = v1::StorageConfig::FSYNC_UNSPECIFIED;
  uint32_t salt = 0;
  std::array<char, kBootIdBytes> boot_id = {};
};

std::string EncodeLogHead(const LogHead& head);
// None if the checksum is wrong. INVALID_ARGUMENT for a version that is not known here.
absl::StatusOr<std::optional<LogHead>> DecodeLogHead(absl::string_view bytes);

struct Frame {
  uint64_t sequence = 0;
  uint64_t durable = 0;
  absl::string_view payload;
  int64_t bytes = 0;  // with its head, and zeros to the next one
};

// The record as it stands in the file, but for what SealFrame fills in.
std::string FrameFor(const google::protobuf::MessageLite& record);
void SealFrame(uint32_t salt, uint64_t sequence, uint64_t durable, std::string* frame);
// The record at the beginning of `bytes`; none if there is no good one. Without a salt, any will
// do.
std::optional<Frame> DecodeFrame(absl::string_view bytes, std::optional<uint32_t> salt);

// Where a record says that its bulk is; null: it has none.
const internal::v1::LogBlob* BlobOf(const internal::v1::LogRecord& record);
// All blobs that a record names, those in a state included.
std::vector<internal::v1::LogBlob> BlobsOf(const internal::v1::LogRecord& record);
// The oldest segment whose blobs a record needs, states and what they hold included; 0: none.
uint64_t OldestBlobSegment(const internal::v1::LogRecord& record);
// Adds to LogEnd::older_blobs that a record of `segment` needs blobs of `blob_segment`.
void NoteOlderBlob(uint64_t segment, uint64_t blob_segment,
                   std::map<uint64_t, uint64_t>* older_blobs);

// "0000000001.records", "0000000001.blobs", "0000000001.spare".
std::string RecordsName(uint64_t segment);
std::string BlobsName(uint64_t segment);
std::string SpareName(uint64_t segment);

// Which files of the log are in a folder.
struct LogFolder {
  std::vector<uint64_t> records;  // segments with a file of records, ascending
  std::vector<uint64_t> blobs;
  std::vector<uint64_t> spares;  // which are not of the log
  // Of the segments of which any file is there; 0: none.
  uint64_t newest() const;
  // Segments and names of all files of the log, oldest first, records before blobs.
  std::vector<std::pair<uint64_t, std::string>> files() const;
};
// Empty if there is no such folder.
absl::StatusOr<LogFolder> ListLog(const std::string& folder);
// Bytes of a file; 0 if the system does not say.
int64_t LogFileBytes(const std::string& path);

// A file that is open for writing. Thread-safe: several may write to different places at once.
class LogFile {
 public:
  virtual ~LogFile() = default;
  // All of the pieces, one behind another. After an error some of them may be there.
  virtual absl::Status Write(int64_t offset, absl::Span<const absl::Span<const char>> pieces) = 0;
  // Sets room aside, so that writing there does not fail for want of it. New bytes are zeros.
  virtual absl::Status Allocate(int64_t offset, int64_t bytes) = 0;
  virtual absl::Status Truncate(int64_t bytes) = 0;
  // Returns when the disk has all that was written before.
  virtual absl::Status Sync() = 0;
};

// Thread-safe. Errors name the file and are those of FileError (server/files/files.h).
class LogFiles {
 public:
  virtual ~LogFiles() = default;
  // An empty one. ALREADY_EXISTS if there is one.
  virtual absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) = 0;
  // Of a file that some process has written before.
  virtual absl::Status Sync(const std::string& path) = 0;
  // Makes files that were made or removed in the folder survive a loss of power.
  virtual absl::Status SyncFolder(const std::string& folder) = 0;
  // What is gone already is no error.
  virtual absl::Status Remove(const std::string& path) = 0;
  // Nothing may stand under the other name.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // A file that some process has written before; its bytes stay.
  virtual absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) = 0;
  // 16 bytes that are others after the machine has lost power, or was started again for another
  // reason: only then may bytes be gone that a process wrote, but nobody synced.
  virtual std::string BootId() = 0;
};

// The disks of this machine.
LogFiles& DiskLogFiles();
// The same; but the tests' own build of the server has some that can lose what was not synced
// (tests/testing/power_loss.cc).
LogFiles& SystemLogFiles();

}  // namespace emberd::log
