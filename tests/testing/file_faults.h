// Disks that fail when a test says so: the tests' own build of the server (file_faults.cc) looks at
// what it does to the files below a folder, counts each kind of call on each kind of path, and lets
// those fail that the test wants to see failing.
//
// Kind of path: relative to the folder; "#" for digits, "*" for names that are chosen at random.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace emberd::testing {

struct FileCall {
  std::string call;  // "open" (for reading), "create" (for writing), "write", "rename" and so on
  std::string path;  // its kind
  int count = 0;
};

// What a test and its servers share: a file that all of them map.
struct FileFaultTable {
  static constexpr int kCalls = 2048;
  struct Call {
    std::atomic<uint64_t> hash{0};  // 0: free
    std::atomic<int> count{0};
    char text[232];  // "CALL PATH"
  };
  std::atomic<uint64_t> failing{0};  // the hash of what fails; 0: nothing
  std::atomic<int> error{0};
  std::atomic<int> first{0};    // the first call that fails, from 1
  std::atomic<int> last{0};     // the last one
  std::atomic<int> reached{0};  // calls since then
  Call calls[kCalls];
};
// Of "CALL PATH"; never 0.
inline uint64_t FileCallHash(absl::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash | 1;
}

// The test's side of it. Belongs to one thread.
class FileFaults {
 public:
  // `control`: a new file; `root`: the folder.
  FileFaults(const std::string& control, const std::string& root);
  ~FileFaults();
  FileFaults(const FileFaults&) = delete;
  FileFaults& operator=(const FileFaults&) = delete;

  // What servers have in EMBERD_FILE_FAULTS.
  const std::string& environment() const { return environment_; }

  // Calls since the beginning or Forget, by text.
  std::vector<FileCall> Recorded() const;
  void Forget();

  // Calls like this one fail with this errno: number `ordinal` from now on, or `lasting`, from that
  // one on.
  void Fail(const FileCall& call, int error, int ordinal, bool lasting);
  // None fails any more.
  void Lift() { table_->failing = 0; }

 private:
  const std::string environment_;
  FileFaultTable* table_;
};

}  // namespace emberd::testing
