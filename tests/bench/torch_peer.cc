#include "tests/bench/torch_peer.h"

#include <cstdio>
#include <filesystem>
#include <fstream>

#include <stdlib.h>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"

namespace emberd::bench {
namespace {

// A folder that goes away with its files.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "emberd_bench_XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void WriteIds(const std::string& path, const std::vector<uint32_t>& ids) {
  const std::vector<int64_t> wide(ids.begin(), ids.end());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(wide.data()), wide.size() * sizeof(int64_t));
}

}  // namespace

std::vector<TorchSeconds> RunTorch(int64_t rows, int width, const std::vector<TorchBatch>& batches,
                                   bool huge_pages) {
  const ScratchFolder folder;
  std::string command =
      absl::StrCat(huge_pages ? "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 " : "", EMBERD_PYTHON " ",
                   SourcePath("tests/bench/torch_steps.py "), rows, " ", width);
  for (const TorchBatch& batch : batches) {
    const std::string path = absl::StrCat(folder.path(), "/", batch.name);
    WriteIds(path, batch.ids);
    absl::StrAppend(&command, " ", batch.name, " ", batch.bag, " ", path);
  }
  std::vector<TorchSeconds> results;
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return {};
  char name[64];
  TorchSeconds seconds;
  while (std::fscanf(output, "%63s %lf %lf", name, &seconds.forward, &seconds.step) == 3) {
    results.push_back(seconds);
  }
  const int status = pclose(output);
  return status == 0 && results.size() == batches.size() ? results : std::vector<TorchSeconds>();
}

}  // namespace emberd::bench
