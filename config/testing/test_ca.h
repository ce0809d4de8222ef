// A certificate authority of its own for a test, by deploy/make_test_ca.sh.
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "base/temp_dir.h"
#include "base/testing/paths.h"

namespace emberd::config {

// The files go with the object.
class TestCa {
 public:
  // `hosts`: names and addresses of the servers, separated by blanks.
  explicit TestCa(const std::string& hosts = "localhost 127.0.0.1") {
    const std::string command = SourcePath("deploy/make_test_ca.sh") + " '" + Path("") + "' " +
                                hosts + " >'" + directory_.Path("log") + "' 2>&1";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
  TestCa(const TestCa&) = delete;
  TestCa& operator=(const TestCa&) = delete;

  // Of a file that the script makes, such as "ca.pem", or of one that the test adds.
  std::string Path(const std::string& file) const { return directory_.Path("ca/" + file); }
  // Adds a file and gives its path.
  std::string Write(const std::string& file, const std::string& text) const {
    std::ofstream(Path(file)) << text;
    return Path(file);
  }

 private:
  const TempDir directory_ = TempDir::Create().value();
};

}  // namespace emberd::config
