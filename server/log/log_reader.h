// Reads the log of a shard.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::log {

struct LogPosition {
  uint64_t segment = 0;
  int64_t offset = 0;  // of the record in the segment's file of records
  int64_t bytes = 0;   // that it takes there
  uint64_t sequence = 0;
  uint64_t durable = 0;  // the newest record that the disk was known to have when it was written
};

struct LogEnd {
  // Where a writer goes on.
  uint64_t next_segment = 1;
  uint64_t next_sequence = 1;
  uint64_t first_segment = 0;  // 0: there is no log
  uint64_t durable = 0;        // the newest record that the disk is known to have had
  // By segment: the oldest one whose blobs its records name, where that is an older one.
  std::map<uint64_t, uint64_t> older_blobs;
  // Bytes behind the last record that are no record: what was being written when the process died
  // or the power went. `torn` says where they begin and what is wrong there.
  int64_t torn_bytes = 0;
  std::string torn;
  // Whose log it is, and how its newest segment was written.
  int shard = 0;
  int shards = 0;
  v1::StorageConfig::Fsync fsync = v1::StorageConfig::FSYNC_UNSPECIFIED;
};

using LogVisitor = absl::FunctionRef<absl::Status(const internal::v1::LogRecord& record,
                                                  const LogPosition& position)>;

// Calls `visit` with each record of the log in a folder, in order; an error of it ends the call and
// is returned. No folder, or one without a segment: an empty log. Nothing is visited before the
// whole log is known to be good, except that a segment that is missing at its beginning is reported
// after the last record. Blobs are looked at only where a loss of power may have taken one.
//
// A log may end in the middle of a record (LogEnd says so). It has lost nothing then that was
// answered, except for what a loss of power takes with NEVER or INTERVAL: then also records with
// good ones behind them may be gone, and the log ends before the first of them. Everything else is
// DATA_LOSS, naming file, place and what to do: a bad record with a good one behind it, a segment
// or a record that is missing, one of another shard.
absl::StatusOr<LogEnd> ReadLog(const std::string& folder, LogVisitor visit);
// The same on a machine whose boot (LogFiles::BootId) is this one.
absl::StatusOr<LogEnd> ReadLog(const std::string& folder, absl::string_view boot_id,
                               LogVisitor visit);

// The bytes of a blob that a record names, in `buffer`, aligned to 64. DATA_LOSS if they are not
// what was written, naming file and place.
absl::StatusOr<absl::Span<const char>> ReadBlob(const std::string& folder,
                                                const internal::v1::LogBlob& blob,
                                                Buffer<char>& buffer);

}  // namespace emberd::log
