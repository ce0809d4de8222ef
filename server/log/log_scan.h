// Finds out what of a log counts, and whether anything is missing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/log/log_format.h"

namespace emberd::server {

// What to do about a log that cannot be used; follows what is wrong with it.
std::string LogAdvice(const std::string& folder);

// One thread at a time.
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
  absl::Status Run();
  // The records that count, in order.
  absl::Status ForEach(
      absl::FunctionRef<absl::Status(const Segment&, int64_t offset, const Frame&)> use);

  const std::vector<Segment>& segments() const { return segments_; }
  uint64_t next_sequence() const { return next_sequence_; }
  uint64_t durable() const { return durable_; }
  int64_t torn_bytes() const { return torn_bytes_; }
  const std::string& torn() const { return torn_; }

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

  absl::Status List();
  absl::Status ReadHeads();
  absl::Status CheckHead(Segment& segment, const LogHead& head);
  absl::Status CheckBlobFiles();
  absl::StatusOr<size_t> FirstWithRecords();
  absl::Status ScanRecords(Break* broken);
  // True: all that the segment has to offer was there.
  bool ScanSegment(Segment& segment, absl::string_view bytes);
  absl::Status Judge(const Break& broken);
  absl::StatusOr<std::optional<Evidence>> FindBehind(const Break& broken);
  void FindFrames(const Segment& segment, int64_t offset, absl::string_view bytes,
                  std::optional<Evidence>* found) const;
  // Records that a loss of power has left without their blobs do not count.
  absl::Status CutAtLostBlob();
  void EndAt(size_t segment, int64_t offset, uint64_t next_sequence, std::string why);
  // When the segment was written, or the last one before it that can be read.
  std::string BootOf(size_t segment) const;
  bool PowerMayHaveGone(size_t segment) const;  // since then
  absl::StatusOr<absl::string_view> Bytes(size_t segment);
  std::string Path(const Segment& segment) const;
  absl::Status Damaged(const Break& broken, absl::string_view what) const;

  const std::string folder_;
  const std::string boot_id_;
  std::vector<Segment> segments_;
  uint64_t next_sequence_ = 1;
  uint64_t durable_ = 0;
  int64_t torn_bytes_ = 0;
  std::string torn_;
  size_t loaded_ = 0;  // whose bytes these are
  bool any_loaded_ = false;
  std::string bytes_;
};

}  // namespace emberd::server
