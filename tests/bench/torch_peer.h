// Runs the same batches through PyTorch, and through FBGEMM, in processes of their own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emberd::bench {

struct TorchBatch {
  std::string name;  // a word
  int bag = 1;
  std::vector<uint32_t> ids;  // bag after bag
};

struct TorchSeconds {
  double forward = 0;
  double step = 0;  // forward, backward and Adagrad
};

// EMBERD_PYTHON of CMake, unless EMBERD_BENCH_PYTHON in the environment names another one.
std::string PeerPython();

// Median CPU seconds of each batch, one thread, float32; `huge_pages` asks malloc for them. Empty
// where PyTorch is not installed or fails.
std::vector<TorchSeconds> RunTorch(int64_t rows, int width, const std::vector<TorchBatch>& batches,
                                   bool huge_pages);

// The same by FBGEMM's table-batched embeddings on the CPU (fbgemm_gpu).
std::vector<TorchSeconds> RunFbgemm(int64_t rows, int width, const std::vector<TorchBatch>& batches,
                                    bool huge_pages);

}  // namespace emberd::bench
