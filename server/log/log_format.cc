#include "server/log/log_format.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "server/files/files.h"

namespace emberd::log {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kHeadMagic[] = "EMBERLOG";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kFrameMagic = 0x4345524c;  // "LREC"
constexpr char kRecordsSuffix[] = ".records";
constexpr char kBlobsSuffix[] = ".blobs";
constexpr char kSpareSuffix[] = ".spare";

struct HeadBytes {
  char magic[8];
  uint32_t crc32c;
  uint32_t version;
  LogHead head;
  char zeros[56];
};
static_assert(sizeof(HeadBytes) == kLogHeadBytes && offsetof(HeadBytes, version) == 12 &&
              sizeof(LogHead) == 56 && offsetof(LogHead, salt) == 36);

struct FrameHead {
  uint32_t magic;
  uint32_t crc32c;
  uint64_t sequence;
  uint64_t durable;
  uint32_t length;
  uint32_t salt;
};
static_assert(sizeof(FrameHead) == kFrameHeadBytes && offsetof(FrameHead, sequence) == 8);

// Of what stands behind the checksum in `bytes`.
template <class Head>
uint32_t ChecksumBehind(absl::string_view bytes) {
  constexpr size_t kSkip = offsetof(Head, crc32c) + sizeof(Head::crc32c);
  return ExtendCrc32c(0, bytes.substr(kSkip));
}

// Segments of the files with this ending.
void AddIfNamed(const std::string& name, absl::string_view suffix, std::vector<uint64_t>* found) {
  absl::string_view number = name;
  uint64_t segment;
  if (absl::ConsumeSuffix(&number, suffix) && absl::SimpleAtoi(number, &segment) && segment > 0 &&
      absl::StrCat(absl::Dec(segment, absl::kZeroPad10), suffix) == name) {
    found->push_back(segment);
  }
}

}  // namespace

std::string EncodeLogHead(const LogHead& head) {
  HeadBytes bytes = {};
  std::memcpy(bytes.magic, kHeadMagic, sizeof(bytes.magic));
  bytes.version = kVersion;
  bytes.head = head;
  const absl::string_view all(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  bytes.crc32c = ChecksumBehind<HeadBytes>(all);
  return std::string(all);
}

absl::StatusOr<std::optional<LogHead>> DecodeLogHead(absl::string_view bytes) {
  HeadBytes head;
  if (bytes.size() < sizeof(head)) return std::nullopt;
  bytes = bytes.substr(0, sizeof(head));
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (std::memcmp(head.magic, kHeadMagic, sizeof(head.magic)) != 0 ||
      head.crc32c != ChecksumBehind<HeadBytes>(bytes)) {
    return std::nullopt;
  }
  if (head.version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("has format version ", head.version,
                                                   ", but this program can only read version ",
                                                   kVersion));
  }
  return head.head;
}

std::string FrameFor(const google::protobuf::MessageLite& record) {
  const size_t length = record.ByteSizeLong();
  std::string frame(RoundUp(static_cast<int64_t>(kFrameHeadBytes + length), kFrameAlignment), '\0');
  record.SerializeWithCachedSizesToArray(
      reinterpret_cast<uint8_t*>(frame.data() + kFrameHeadBytes));
  FrameHead head = {};
  head.magic = kFrameMagic;
  head.length = static_cast<uint32_t>(length);
  std::memcpy(frame.data(), &head, sizeof(head));
  return frame;
}

void SealFrame(uint32_t salt, uint64_t sequence, uint64_t durable, std::string* frame) {
  FrameHead head;
  std::memcpy(&head, frame->data(), sizeof(head));
  head.sequence = sequence;
  head.durable = durable;
  head.salt = salt;
  std::memcpy(frame->data(), &head, sizeof(head));
  const auto bytes = absl::string_view(*frame).substr(0, sizeof(head) + head.length);
  head.crc32c = ChecksumBehind<FrameHead>(bytes);
  std::memcpy(frame->data(), &head, sizeof(head));
}

std::optional<Frame> DecodeFrame(absl::string_view bytes, std::optional<uint32_t> salt) {
  FrameHead head;
  if (bytes.size() < sizeof(head)) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.magic != kFrameMagic || head.length > bytes.size() - sizeof(head)) return std::nullopt;
  if (salt.has_value() && head.salt != *salt) return std::nullopt;
  const absl::string_view frame = bytes.substr(0, sizeof(head) + head.length);
  if (head.crc32c != ChecksumBehind<FrameHead>(frame) && !Mistake("log.checksum_not_asked")) {
    return std::nullopt;
  }
  Frame decoded;
  decoded.sequence = head.sequence;
  decoded.durable = head.durable;
  decoded.payload = frame.substr(sizeof(head));
  decoded.bytes = RoundUp(static_cast<int64_t>(frame.size()), kFrameAlignment);
  return decoded;
}

std::string RecordsName(uint64_t segment) {
  return absl::StrCat(absl::Dec(segment, absl::kZeroPad10), kRecordsSuffix);
}

std::string BlobsName(uint64_t segment) {
  return absl::StrCat(absl::Dec(segment, absl::kZeroPad10), kBlobsSuffix);
}

std::string SpareName(uint64_t segment) {
  return absl::StrCat(absl::Dec(segment, absl::kZeroPad10), kSpareSuffix);
}

uint64_t LogFolder::newest() const {
  return std::max(records.empty() ? 0 : records.back(), blobs.empty() ? 0 : blobs.back());
}

std::vector<std::pair<uint64_t, std::string>> LogFolder::files() const {
  std::vector<std::pair<uint64_t, std::string>> all;
  for (const uint64_t segment : records) all.emplace_back(segment, RecordsName(segment));
  for (const uint64_t segment : blobs) all.emplace_back(segment, BlobsName(segment));
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  return all;
}

absl::StatusOr<LogFolder> ListLog(const std::string& folder) {
  LogFolder found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    AddIfNamed(name, kRecordsSuffix, &found.records);
    AddIfNamed(name, kBlobsSuffix, &found.blobs);
    AddIfNamed(name, kSpareSuffix, &found.spares);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return files::FileError(error.value(), folder, "cannot be listed");
  }
  std::sort(found.records.begin(), found.records.end());
  std::sort(found.blobs.begin(), found.blobs.end());
  std::sort(found.spares.begin(), found.spares.end());
  return found;
}

int64_t LogFileBytes(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  return error ? 0 : static_cast<int64_t>(bytes);
}

}  // namespace emberd::log
