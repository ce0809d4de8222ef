// What a test's code logs, line by line: what tests of this folder share.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/temp_dir.h"
#include "server/ops/logging.h"

namespace emberd::security {

// From its construction to its end, the log goes to a file.
class LogFile {
 public:
  LogFile() {
    v1::LoggingConfig config;
    config.set_file(directory_.Path("log"));
    EXPECT_TRUE(ops::SetUpLogging(config, "test").ok());
  }
  ~LogFile() { EXPECT_TRUE(ops::SetUpLogging({}, "emberd").ok()); }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  std::vector<std::string> Lines() const {
    std::ifstream file(directory_.Path("log"));
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

 private:
  const TempDir directory_ = TempDir::Create().value();
};

}  // namespace emberd::security
