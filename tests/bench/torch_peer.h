// Runs the same batches through PyTorch, and through FBGEMM, in processes of their own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emberd::bench {

struct TorchBatch {
  std::string name;  // a word
  int bag = 1;
  std::vector<uint32_t> ids;  // bag after bag, table after table
};

// Ways to run a peer, of which the fastest counts. Numbers with commas.
struct TorchWays {
  std::string tables = "1";  // of one size, with all rows
  std::string threads = "1";
  bool huge_pages = true;  // malloc is asked for them
};

// Of the fastest way: medians of wall time.
struct TorchSeconds {
  double forward = 0;
  double step = 0;  // forward, backward and Adagrad
  int threads = 0, tables = 0;
};

// EMBERD_PYTHON of CMake, unless EMBERD_BENCH_PYTHON in the environment names another one.
std::string PeerPython();

// Each batch in float32. Empty where PyTorch is not installed or fails.
std::vector<TorchSeconds> RunTorch(int64_t rows, int width, const std::vector<TorchBatch>& batches,
                                   const TorchWays& ways);

// The same by FBGEMM's table-batched embeddings on the CPU (fbgemm_gpu).
std::vector<TorchSeconds> RunFbgemm(int64_t rows, int width, const std::vector<TorchBatch>& batches,
                                    const TorchWays& ways);

}  // namespace emberd::bench
