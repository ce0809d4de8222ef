// Runs the same batches through PyTorch, FBGEMM, torchrec and TensorFlow, in their own processes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emberd::bench {

struct PeerBatch {
  std::string name;  // a word
  int bag = 1;
  std::vector<uint32_t> ids;  // bag after bag, table after table
};

// Ways to run a peer, of which the fastest counts. Numbers with commas.
struct PeerWays {
  std::string tables = "1";  // of one size, with all rows
  std::string threads = "1";
  bool huge_pages = true;  // malloc is asked for them
};

// Of the fastest way: medians of wall time.
struct PeerSeconds {
  double forward = 0;
  double step = 0;  // forward, backward and Adagrad
  int threads = 0, tables = 0;
};

// The Python that EMBERD_BENCH_PYTHON names, of TensorFlow EMBERD_BENCH_TENSORFLOW; else that of
// the environment python-torchrec or python-tensorflow of the build folder, or EMBERD_PYTHON of
// CMake.
std::string PeerPython(bool tensorflow = false);

// Each batch in float32, by a script of this folder, as "torchrec_steps.py row_wise": in processes
// of its own. Empty, after a line that says so, where what it needs is not installed, or it fails.
std::vector<PeerSeconds> RunPeer(const std::string& script, int64_t rows, int width,
                                 const std::vector<PeerBatch>& batches, const PeerWays& ways);

}  // namespace emberd::bench
