// Runs emberctl in a test.
#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/testing/paths.h"
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
  const std::string path = TempPath(name);
  std::ofstream(path) << text;
  return path;
}

}  // namespace emberd::emberctl
