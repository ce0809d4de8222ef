#include "tests/testing/footprint.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace emberd::testing {

Footprint FootprintOf(pid_t pid) {
  Footprint footprint;
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    long long value = 0;
    if (std::sscanf(line.c_str(), "VmRSS: %lld", &value) == 1) footprint.resident_kib = value;
    if (std::sscanf(line.c_str(), "Threads: %lld", &value) == 1) footprint.threads = value;
  }
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    ++footprint.descriptors;
  }
  return footprint;
}

int RegionsOf(pid_t pid, const std::string& name) {
  int count = 0;
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    count += absl::StrContains(line, absl::StrCat("/memfd:", name, " ")) ? 1 : 0;
  }
  return count;
}

}  // namespace emberd::testing
