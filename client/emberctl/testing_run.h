// Runs emberctl in a test.
#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "client/emberctl/emberctl.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {

struct Outcome {
  int code = -1;
  std::string out, err;
};

inline Outcome Emberctl(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"emberctl"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  Outcome outcome;
  outcome.code = Run(static_cast<int>(argv.size()), argv.data(), out, err);
  outcome.out = out.str();
  outcome.err = err.str();
  return outcome;
}

// Path of a file of this test with that text.
inline std::string WriteTestFile(const std::string& name, const std::string& text) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string path =
      ::testing::TempDir() + "/" + test->test_suite_name() + "_" + test->name() + "_" + name;
  std::ofstream(path) << text;
  return path;
}

}  // namespace emberd::emberctl
