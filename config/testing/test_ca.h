// A certificate authority of its own for a test, by deploy/make_test_ca.sh.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <stdlib.h>

#include "base/testing/paths.h"

namespace emberd::config {

// The files go with the object.
class TestCa {
 public:
  // `hosts`: names and addresses of the servers, separated by blanks.
  explicit TestCa(const std::string& hosts = "localhost 127.0.0.1") {
    directory_ = (std::filesystem::temp_directory_path() / "emberd_ca_XXXXXX").string();
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    const std::string command = SourcePath("deploy/make_test_ca.sh") + " '" + directory_ + "' " +
                                hosts + " >'" + directory_ + ".log' 2>&1";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    std::filesystem::remove(directory_ + ".log");
  }
  ~TestCa() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  TestCa(const TestCa&) = delete;
  TestCa& operator=(const TestCa&) = delete;

  // Of a file that the script makes, such as "ca.pem", or of one that the test adds.
  std::string Path(const std::string& file) const { return directory_ + "/" + file; }
  // Adds a file and gives its path.
  std::string Write(const std::string& file, const std::string& text) const {
    std::ofstream(Path(file)) << text;
    return Path(file);
  }

 private:
  std::string directory_;
};

}  // namespace emberd::config
