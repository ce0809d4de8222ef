#include "base/temp_dir.h"

#include <filesystem>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include "base/file_descriptor.h"

namespace emberd {
namespace temp_dir_test {

TEST(TempDirTest, GoesAwayWithItsFilesAndOnlyOnce) {
  std::string path;
  {
    TempDir first = *TempDir::Create();
    path = first.path();
    EXPECT_NE(TempDir::Create()->path(), path);
    std::filesystem::create_directory(first.Path("folder"));
    std::ofstream(first.Path("folder/file")) << "x";
    EXPECT_TRUE(std::filesystem::exists(path + "/folder/file"));
    const TempDir second = std::move(first);
    EXPECT_TRUE(std::filesystem::exists(second.path()));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

// Otherwise systemd-tmpfiles removes its files when they are old, while they are in use.
TEST(TempDirTest, IsLockedWhileItLives) {
  TempDir dir = *TempDir::Create();
  const TempDir moved = std::move(dir);
  const FileDescriptor cleaner(open(moved.path().c_str(), O_RDONLY | O_DIRECTORY));
  ASSERT_GE(cleaner.get(), 0);
  EXPECT_NE(flock(cleaner.get(), LOCK_SH | LOCK_NB), 0);
}

}  // namespace temp_dir_test
}  // namespace emberd
