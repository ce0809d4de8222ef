// Files of a log: the input is cut into the records of up to three segments. Catches: bytes that
// crash the reader or make it read beyond them, a log that is used in part without a word, and one
// with which a writer cannot go on.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/temp_dir.h"
#include "server/files/files.h"
#include "server/log/log_files.h"
#include "server/log/log_reader.h"
#include "server/log/log_writer.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace log_fuzz {

using fuzz::Require;
using log::LogEnd;
using log::LogPosition;

// Checksums would keep a fuzzer out: what looks like a head or a record gets the right one.
void Seal(uint64_t segment, std::string* bytes) {
  log::LogHead head;
  head.shards = 1;
  head.segment = segment;
  head.boot_id.fill('b');
  constexpr size_t kMagic = 8;
  if (bytes->size() < static_cast<size_t>(log::kLogHeadBytes)) return;
  if (bytes->compare(0, kMagic, "EMBERLOG") != 0) return;
  std::memcpy(&head.first_sequence, bytes->data() + kMagic, sizeof(head.first_sequence));
  std::memcpy(&head.durable, bytes->data() + 2 * kMagic, sizeof(head.durable));
  bytes->replace(0, log::kLogHeadBytes, log::EncodeLogHead(head));
  size_t at = log::kLogHeadBytes;
  while (at + log::kFrameHeadBytes <= bytes->size() && bytes->compare(at, 4, "LREC") == 0) {
    uint64_t sequence, durable;
    uint32_t length;
    std::memcpy(&sequence, bytes->data() + at + 8, sizeof(sequence));
    std::memcpy(&durable, bytes->data() + at + 16, sizeof(durable));
    std::memcpy(&length, bytes->data() + at + 24, sizeof(length));
    if (length > bytes->size() - at - log::kFrameHeadBytes) return;
    std::string frame = bytes->substr(at, log::kFrameHeadBytes + length);
    log::SealFrame(head.salt, sequence, durable, &frame);
    bytes->replace(at, frame.size(), frame);
    at +=
        static_cast<size_t>(log::RoundUp(static_cast<int64_t>(frame.size()), log::kFrameAlignment));
  }
}

struct Read {
  absl::StatusOr<LogEnd> end = absl::UnknownError("");
  std::vector<LogPosition> positions;
};

Read ReadAll(const std::string& folder, char boot) {
  Read read;
  read.end = log::ReadLog(folder, std::string(log::kBootIdBytes, boot),
                          [&](const internal::v1::LogRecord& record, const LogPosition& position) {
                            Require(record.has_state() == (position.offset == log::kLogHeadBytes),
                                    "a state begins a segment");
                            read.positions.push_back(position);
                            return absl::OkStatus();
                          });
  return read;
}

void CheckRead(const Read& read) {
  if (!read.end.ok()) {
    Require(!read.end.status().message().empty(), "an error says what is wrong");
    return;
  }
  for (size_t i = 0; i < read.positions.size(); ++i) {
    const uint64_t next =
        i + 1 < read.positions.size() ? read.positions[i + 1].sequence : read.end->next_sequence;
    Require(read.positions[i].sequence + 1 == next, "records are without a gap");
  }
}

// Where a log can be read, it goes on, and holds what it held.
void GoOn(const std::string& folder, const Read& before) {
  if (before.end->next_sequence == 0 || before.end->next_sequence > (uint64_t{1} << 40)) return;
  log::LogOptions options;
  options.folder = folder;
  options.fsync = v1::StorageConfig::NEVER;
  options.shard = before.end->shard;
  options.shards = before.end->first_segment == 0 ? 1 : before.end->shards;
  options.reserve_bytes = 4096;
  internal::v1::LogRecord state;
  state.mutable_state();
  auto writer =
      log::LogWriter::Open(options, before.end->next_segment, before.end->next_sequence, state);
  Require(writer.ok(), "a writer goes on");
  writer->reset();
  const Read after = ReadAll(folder, 'b');
  Require(after.end.ok() && after.positions.size() == before.positions.size() + 1,
          "what was read is read again");
}

EMBERD_FUZZ_TARGET(log, data, size) {
  const TempDir dir = *TempDir::Create();
  std::string text(reinterpret_cast<const char*>(data), size);
  for (uint64_t segment = 1; segment <= 3 && !text.empty(); ++segment) {
    const size_t end = segment == 3 ? std::string::npos : text.find("NEXTLOG!");
    std::string bytes = text.substr(0, end);
    text = end == std::string::npos ? "" : text.substr(end + 8);
    Seal(segment, &bytes);
    if (!files::WriteFileWhole(dir.path(), log::RecordsName(segment), bytes).ok() ||
        !files::WriteFileWhole(dir.path(), log::BlobsName(segment), "").ok()) {
      std::abort();
    }
  }
  const Read same = ReadAll(dir.path(), 'b');
  CheckRead(same);
  const Read other = ReadAll(dir.path(), 'c');
  CheckRead(other);
  if (!same.end.ok()) return 0;
  fuzz::Require(other.end.ok(), "a loss of power explains no less");
  fuzz::accepted = same.positions.size() > 1 && same.end->torn_bytes == 0;
  GoOn(dir.path(), same);
  return 0;
}

}  // namespace log_fuzz
}  // namespace emberd
