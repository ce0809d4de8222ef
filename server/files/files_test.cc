#include "server/files/files.h"

#include <cerrno>
#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/temp_dir.h"

namespace emberd::files {
namespace files_test {

using absl::StatusCode;

// Two stacks whose files had one name would write over each other.
TEST(FilesTest, DifferentNamesStayDifferent) {
  const std::string kLong(300, 'x');
  const std::vector<std::string> names = {"",
                                          "a",
                                          "A",
                                          "a/b",
                                          "a%2Fb",
                                          "a b",
                                          ".a",
                                          "a.",
                                          "..",
                                          "%2E.",
                                          "\xc3\xa4",
                                          "a\n",
                                          kLong,
                                          kLong + "y",
                                          kLong.substr(1),
                                          kLong + "/",
                                          std::string(1, '\0')};
  std::set<std::string> escaped;
  for (const std::string& name : names) {
    const std::string text = EscapeFileName(name);
    EXPECT_TRUE(escaped.insert(text).second) << text;
    EXPECT_LE(text.size(), 180u);
    if (!name.empty()) {
      EXPECT_TRUE(CheckFileName(text).ok()) << text;
    }
  }
  EXPECT_EQ(EscapeFileName("users_items-2.x"), "users_items-2.x");
  EXPECT_EQ(EscapeFileName(".a/b%"), "%2Ea%2Fb%25");
}

TEST(FilesTest, ErrorsSayWhatTheSystemSays) {
  const absl::Status full = FileError(ENOSPC, "/d/f", "cannot be written");
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(full.message(), "/d/f: cannot be written: No space left on device");
  EXPECT_EQ(FileError(EDQUOT, "f", "x").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(FileError(EFBIG, "f", "x").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(FileError(EACCES, "f", "x").code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(FileError(EROFS, "f", "x").code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(FileError(EIO, "f", "x").code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(FileError(EUCLEAN, "f", "x").code(), StatusCode::kFailedPrecondition);
}

TEST(FilesTest, AFileIsReplacedWhole) {
  const TempDir dir = *TempDir::Create();
  ASSERT_TRUE(WriteFileWhole(dir.path(), "f", "old").ok());
  ASSERT_TRUE(WriteFileWhole(dir.path(), "f", "").ok());
  EXPECT_EQ(*ReadFileWhole(dir.Path("f")), "");
  ASSERT_TRUE(WriteFileWhole(dir.path(), "f", "new").ok());
  EXPECT_EQ(*ReadFileWhole(dir.Path("f")), "new");
  // Where it cannot be, nothing is left.
  std::filesystem::create_directory(dir.Path("folder"));
  EXPECT_FALSE(WriteFileWhole(dir.path(), "folder", "new").ok());
  EXPECT_FALSE(std::filesystem::exists(dir.Path("folder.tmp")));
  EXPECT_EQ(ReadFileWhole(dir.Path("none")).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ReadFileWhole(dir.Path("folder")).status().code(), StatusCode::kDataLoss);
}

// As of a process that was stopped while it had the lock: whoever waited had no deadline.
TEST(FilesTest, ALockThatIsKeptIsAnError) {
  const TempDir dir = *TempDir::Create();
  {
    const absl::StatusOr<FolderLock> kept = FolderLock::Take(dir.path());
    ASSERT_TRUE(kept.ok()) << kept.status();
    const absl::Status refused = FolderLock::Take(dir.path(), absl::Milliseconds(1)).status();
    EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << refused;
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr(dir.Path(".lock")));
  }
  EXPECT_TRUE(FolderLock::Take(dir.path()).ok());
}

TEST(FilesTest, AListedFileIsTheOneThatWasWritten) {
  const TempDir dir = *TempDir::Create();
  const v1::CheckpointFile file = *WriteListedFile(dir.path(), "f", "123456789");
  EXPECT_EQ(file.bytes(), 9);
  EXPECT_EQ(file.header_crc32c(), 0u);
  EXPECT_EQ(file.data_crc32c(), 0xe3069283u);
  EXPECT_EQ(*ReadListedFile(dir.path(), file), "123456789");
  for (const char* other : {"12345678", "1234567890", "123456780"}) {
    ASSERT_TRUE(WriteFileWhole(dir.path(), "f", other).ok());
    EXPECT_EQ(ReadListedFile(dir.path(), file).status().code(), StatusCode::kDataLoss) << other;
  }
}

}  // namespace files_test
}  // namespace emberd::files
