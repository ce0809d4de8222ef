// Runs a fuzz target on every file of the folders given, without a fuzzer. Catches: a fault that
// fuzzing once found and that came back, and a seed that is refused, or read only in part, since a
// format has changed, so that fuzzing no longer gets past the first checks.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/fuzz/fuzz_target.h"

namespace {

bool IsSeed(const std::string& name) {
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return name.size() != 12 || !std::all_of(name.begin(), name.end(), is_hex);
}

}  // namespace

int main(int argc, char** argv) {
  int inputs = 0;
  int refused_seeds = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string input((std::istreambuf_iterator<char>(file)), {});
      // Shown if the target ends the program.
      std::fprintf(stderr, "%s\n", entry.path().c_str());
      emberd::fuzz::accepted = false;
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
      ++inputs;
      if (emberd::fuzz::accepted || !IsSeed(entry.path().filename())) continue;
      std::fprintf(stderr, "refused, although it is a seed: %s\n", entry.path().c_str());
      ++refused_seeds;
    }
  }
  std::printf("%d inputs, %d refused seeds\n", inputs, refused_seeds);
  return inputs == 0 || refused_seeds > 0 ? 1 : 0;
}
