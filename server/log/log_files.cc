#include "server/log/log_files.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fcntl.h>
#include <limits.h>
#include <openssl/crypto.h>
#include <sys/uio.h>
#include <unistd.h>

#include "absl/base/attributes.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/file_descriptor.h"
#include "server/files/files.h"

namespace emberd::log {
namespace {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

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

// ---- The disk

namespace {

constexpr char kCannotBeWritten[] = "cannot be written";

// How many of the vectors `count` bytes have gone through; the one they end in is cut.
size_t Advance(absl::Span<iovec> vectors, size_t count) {
  size_t done = 0;
  while (done < vectors.size() && count >= vectors[done].iov_len) count -= vectors[done++].iov_len;
  if (count > 0) {
    vectors[done].iov_base = static_cast<char*>(vectors[done].iov_base) + count;
    vectors[done].iov_len -= count;
  }
  return done;
}

class DiskFile : public LogFile {
 public:
  DiskFile(std::string path, FileDescriptor file)
      : path_(std::move(path)), file_(std::move(file)) {}

  absl::Status Write(int64_t offset, absl::Span<const absl::Span<const char>> pieces) override {
    std::vector<iovec> vectors;
    vectors.reserve(pieces.size());
    for (const absl::Span<const char> piece : pieces) {
      if (!piece.empty()) vectors.push_back({const_cast<char*>(piece.data()), piece.size()});
    }
    for (absl::Span<iovec> left = absl::MakeSpan(vectors); !left.empty();) {
      const int vectors_now = static_cast<int>(std::min<size_t>(left.size(), IOV_MAX));
      const ssize_t count = pwritev(file_.get(), left.data(), vectors_now, offset);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return files::FileError(errno, path_, kCannotBeWritten);
      offset += count;
      left.remove_prefix(Advance(left, count));
    }
    return absl::OkStatus();
  }

  absl::Status Allocate(int64_t offset, int64_t bytes) override {
    int error;
    do {
      error = posix_fallocate(file_.get(), offset, bytes);
    } while (error == EINTR);
    return error == 0 ? absl::OkStatus() : files::FileError(error, path_, "cannot be enlarged");
  }

  absl::Status Truncate(int64_t bytes) override {
    if (ftruncate(file_.get(), bytes) == 0) return absl::OkStatus();
    return files::FileError(errno, path_, kCannotBeWritten);
  }

  absl::Status Sync() override {
    if (fdatasync(file_.get()) == 0) return absl::OkStatus();
    return files::FileError(errno, path_, kCannotBeWritten);
  }

 private:
  const std::string path_;
  const FileDescriptor file_;
};

class Disk : public LogFiles {
 public:
  absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) override {
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file.get() < 0) return files::FileError(errno, path, "cannot be created");
    return std::make_unique<DiskFile>(path, std::move(file));
  }

  absl::Status Sync(const std::string& path) override {
    const FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) return files::FileError(errno, path, "cannot be opened");
    return files::SyncFile(file, path);
  }

  absl::Status SyncFolder(const std::string& folder) override { return files::SyncFolder(folder); }

  absl::Status Remove(const std::string& path) override {
    if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
    return files::FileError(errno, path, "cannot be removed");
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return files::FileError(errno, from, "cannot be renamed");
  }

  absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) override {
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) return files::FileError(errno, path, "cannot be opened");
    return std::make_unique<DiskFile>(path, std::move(file));
  }

  std::string BootId() override {
    std::string hex;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), hex);
    std::string id(kBootIdBytes, '\0');
    size_t size = 0;
    auto* const bytes = reinterpret_cast<unsigned char*>(id.data());
    if (OPENSSL_hexstr2buf_ex(bytes, id.size(), &size, hex.c_str(), '-') != 1) {
      id.assign(kBootIdBytes, '\0');
    }
    return id;
  }
};

}  // namespace

LogFiles& DiskLogFiles() {
  static auto* const disk = new Disk;
  return *disk;
}

// Weak: the tests' build has others.
ABSL_ATTRIBUTE_WEAK LogFiles& SystemLogFiles() { return DiskLogFiles(); }

}  // namespace emberd::log
