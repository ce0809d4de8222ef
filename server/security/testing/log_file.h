// What a test's code logs, line by line: what tests of this folder share.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <stdlib.h>

#include "server/ops/logging.h"

namespace emberd::security {

// From its construction to its end, the log goes to a file.
class LogFile {
 public:
  LogFile() {
    directory_ = (std::filesystem::temp_directory_path() / "emberd_log_XXXXXX").string();
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    v1::LoggingConfig config;
    config.set_file(directory_ + "/log");
    EXPECT_TRUE(ops::SetUpLogging(config, "test").ok());
  }
  ~LogFile() {
    EXPECT_TRUE(ops::SetUpLogging({}, "emberd").ok());
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  std::vector<std::string> Lines() const {
    std::ifstream file(directory_ + "/log");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

 private:
  std::string directory_;
};

}  // namespace emberd::security
