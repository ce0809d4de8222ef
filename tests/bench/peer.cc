#include "tests/bench/peer.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>

#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/paths.h"

namespace emberd::bench {
namespace {

void WriteIds(const std::string& path, const std::vector<uint32_t>& ids) {
  const std::vector<int64_t> wide(ids.begin(), ids.end());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(wide.data()), wide.size() * sizeof(int64_t));
}

}  // namespace

std::string PeerPython(bool tensorflow) {
  const char* named = std::getenv(tensorflow ? "EMBERD_BENCH_TENSORFLOW" : "EMBERD_BENCH_PYTHON");
  if (named != nullptr) return named;
  const std::string made =
      BuildPath(tensorflow ? "python-tensorflow/bin/python" : "python-torchrec/bin/python");
  return access(made.c_str(), X_OK) == 0 ? made : EMBERD_PYTHON;
}

std::vector<PeerSeconds> RunPeer(const std::string& script, int64_t rows, int width,
                                 const std::vector<PeerBatch>& batches, const PeerWays& ways) {
  const std::string python = PeerPython(script == "tensorflow_steps.py");
  const absl::StatusOr<TempDir> folder = TempDir::Create();
  if (!folder.ok()) return {};
  // -W ignore: newer versions of PyTorch warn about the sparse gradients that they make.
  std::string command =
      absl::StrCat(ways.huge_pages ? "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 " : "", python,
                   " -B -W ignore ", SourcePath("tests/bench/"), script, " ", rows, " ", width, " ",
                   ways.tables, " ", ways.threads);
  for (const PeerBatch& batch : batches) {
    const std::string path = folder->Path(batch.name);
    WriteIds(path, batch.ids);
    absl::StrAppend(&command, " ", batch.name, " ", batch.bag, " ", path);
  }
  std::vector<PeerSeconds> results;
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return {};
  char name[64];
  PeerSeconds seconds;
  while (std::fscanf(output, "%63s %lf %lf %d %d", name, &seconds.forward, &seconds.step,
                     &seconds.threads, &seconds.tables) == 5) {
    results.push_back(seconds);
  }
  const int status = pclose(output);
  if (status == 0 && results.size() == batches.size()) return results;
  std::cerr << script << ": left out, for "
            << (WEXITSTATUS(status) == 3 ? "what it needs is not installed in " : "it fails with ")
            << python << " (tests/bench/README.md)" << std::endl;
  return {};
}

}  // namespace emberd::bench
