#include "base/temp_dir.h"

#include <filesystem>
#include <fstream>
#include <utility>

#include <gtest/gtest.h>

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

}  // namespace temp_dir_test
}  // namespace emberd
