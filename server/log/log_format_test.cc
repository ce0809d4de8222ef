#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "base/temp_dir.h"
#include "emberd/internal/v1/log.pb.h"
#include "server/files/files.h"
#include "server/log/log_files.h"

namespace emberd::log {
namespace log_format_test {

using internal::v1::LogRecord;

LogHead SampleHead() {
  LogHead head;
  head.shard = 2;
  head.shards = 4;
  head.segment = 7;
  head.first_sequence = 1000;
  head.durable = 998;
  head.fsync = v1::StorageConfig::ALWAYS;
  head.salt = 0x01020304;
  absl::string_view("0123456789abcdef").copy(head.boot_id.data(), kBootIdBytes);
  return head;
}

// Logs outlive the program that wrote them: these bytes are those of version 1 for good.
TEST(LogFormatTest, BytesStayWhatTheyAre) {
  EXPECT_EQ(absl::BytesToHexString(EncodeLogHead(SampleHead()).substr(0, 72)),
            "454d4245524c4f47"
            "59885762"
            "01000000"
            "02000000"
            "04000000"
            "0700000000000000"
            "e803000000000000"
            "e603000000000000"
            "03000000"
            "04030201"
            "30313233343536373839616263646566");
  LogRecord record;
  record.mutable_model_removed()->set_model_id(0x1122334455667788);
  std::string frame = FrameFor(record);
  SealFrame(0x01020304, 5, 4, &frame);
  EXPECT_EQ(absl::BytesToHexString(frame),
            "4c5245433a2b8df5050000000000000004000000000000000b000000040302011a09098877665544332211"
            "0000000000");
}

TEST(LogFormatTest, AHeadIsReadBack) {
  const std::string bytes = EncodeLogHead(SampleHead());
  ASSERT_EQ(bytes.size(), static_cast<size_t>(kLogHeadBytes));
  const LogHead head = (*DecodeLogHead(bytes)).value();
  EXPECT_EQ(EncodeLogHead(head), bytes);
  EXPECT_EQ(head.segment, 7u);
  EXPECT_EQ(head.fsync, v1::StorageConfig::ALWAYS);
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] ^= 0x10;
    const auto decoded = DecodeLogHead(changed);
    EXPECT_TRUE(decoded.ok() && !decoded->has_value()) << i;
    EXPECT_FALSE((*DecodeLogHead(bytes.substr(0, i))).has_value()) << i;
  }
}

TEST(LogFormatTest, ARecordIsReadBackOrNotAtAll) {
  LogRecord record;
  for (const size_t length : {0, 1, 7, 8, 100}) {
    record.mutable_group_ended()->set_group(std::string(length, 'g'));
    std::string frame = FrameFor(record);
    SealFrame(9, 5, 4, &frame);
    ASSERT_EQ(frame.size() % kFrameAlignment, 0u);
    const std::string bytes = frame + "what follows";
    const Frame decoded = DecodeFrame(bytes, 9).value();
    EXPECT_EQ(decoded.sequence, 5u);
    EXPECT_EQ(decoded.durable, 4u);
    EXPECT_EQ(decoded.payload, record.SerializeAsString());
    EXPECT_EQ(decoded.bytes, static_cast<int64_t>(frame.size()));
    EXPECT_FALSE(DecodeFrame(bytes, 8).has_value());
    EXPECT_TRUE(DecodeFrame(bytes, std::nullopt).has_value());
    const size_t end = kFrameHeadBytes + decoded.payload.size();
    for (size_t i = 0; i < end; ++i) {
      std::string changed = bytes;
      changed[i] ^= 0x40;
      EXPECT_FALSE(DecodeFrame(changed, 9).has_value()) << i;
      EXPECT_FALSE(DecodeFrame(bytes.substr(0, i), 9).has_value()) << i;
    }
  }
}

TEST(LogFormatTest, OnlyFilesOfTheLogAreListed) {
  const TempDir dir = *TempDir::Create();
  EXPECT_EQ(ListLog(dir.Path("none"))->newest(), 0u);
  for (const char* name : {"0000000002.blobs", "0000000003.records", "0000000003.blobs", "x",
                           "3.records", "0000000004.record", "0000000000.records",
                           "00000000005.records", "-000000006.records", ".records"}) {
    ASSERT_TRUE(files::WriteFileWhole(dir.path(), name, "").ok());
  }
  const LogFolder found = *ListLog(dir.path());
  EXPECT_EQ(found.records, std::vector<uint64_t>{3});
  EXPECT_EQ(found.blobs, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(found.newest(), 3u);
  const std::vector<std::pair<uint64_t, std::string>> kFiles = {
      {2, "0000000002.blobs"}, {3, "0000000003.records"}, {3, "0000000003.blobs"}};
  EXPECT_EQ(found.files(), kFiles);
  EXPECT_EQ(RecordsName(12345678901), "12345678901.records");
}

}  // namespace log_format_test
}  // namespace emberd::log
