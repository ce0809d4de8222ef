// Runs the fuzz target NAME on every file of a folder, without a fuzzer: fuzz_replay NAME FOLDER.
// Catches: a fault that fuzzing once found and that came back, and a seed that is refused, or read
// only in part, since a format has changed, so that fuzzing no longer gets past the first checks.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "tests/fuzz/fuzz_target.h"

namespace emberd::fuzz {
namespace {

using TryInput = int (*)(const uint8_t* data, size_t size);

std::map<std::string, TryInput>& Targets() {
  static auto& targets = *new std::map<std::string, TryInput>;
  return targets;
}

bool IsSeed(const std::string& name) {
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return name.size() != 12 || !std::all_of(name.begin(), name.end(), is_hex);
}

int Replay(TryInput try_input, const char* folder) {
  int inputs = 0;
  int refused_seeds = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string input((std::istreambuf_iterator<char>(file)), {});
    // Shown if the target ends the program.
    std::fprintf(stderr, "%s\n", entry.path().c_str());
    accepted = false;
    try_input(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    ++inputs;
    if (accepted || !IsSeed(entry.path().filename())) continue;
    std::fprintf(stderr, "refused, although it is a seed: %s\n", entry.path().c_str());
    ++refused_seeds;
  }
  std::printf("%d inputs, %d refused seeds\n", inputs, refused_seeds);
  return inputs == 0 || refused_seeds > 0 ? 1 : 0;
}

}  // namespace

Target::Target(const char* name, TryInput try_input) { Targets()[name] = try_input; }

}  // namespace emberd::fuzz

int main(int argc, char** argv) {
  const auto& targets = emberd::fuzz::Targets();
  const auto target = targets.find(argc == 3 ? argv[1] : "");
  if (target != targets.end()) return emberd::fuzz::Replay(target->second, argv[2]);
  std::fprintf(stderr, "usage: %s NAME FOLDER; targets:\n", argv[0]);
  for (const auto& [name, run] : targets) std::fprintf(stderr, "  %s\n", name.c_str());
  return 2;
}
