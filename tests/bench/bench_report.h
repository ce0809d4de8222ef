// What all benchmarks share: timing, and the rows that they print and write as JSON.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace emberd::bench {

// Defines the benchmark that `./run bench NAME` runs, by its function of (argc, argv), which
// returns the exit code: EMBERD_BENCHMARK(step, argc, argv) { ... }. One to a source.
#define EMBERD_BENCHMARK(name, argc, argv)                         \
  int RunBenchmark(int argc, char** argv);                         \
  const ::emberd::bench::Benchmark benchmark(#name, RunBenchmark); \
  int RunBenchmark(int argc, char** argv)

struct Benchmark {
  Benchmark(const char* name, int (*run)(int argc, char** argv));
};

struct Row {
  std::string name;  // what was measured, e.g. "preprocess/criteo/plain"
  double value = 0;  // median
  std::string unit;  // of value and limit, e.g. "ids/s"
  int threads = 1;
  int width = 0;     // floats of a row; 0 where it plays no part
  double limit = 0;  // what the machine can do at best, measured in the same run; 0: not known
  double ratio() const { return limit > 0 ? value / limit : 0; }
};

// Seconds that one call of `work` takes: the median of `repeats` calls after one to warm up.
double MedianSeconds(int repeats, const std::function<void()>& work);
// The same in seconds of processor time over all threads of the program: what a machine that others
// use too would take, had `work` a core to itself. For work on one thread.
double MedianCpuSeconds(int repeats, const std::function<void()>& work);

// Collects rows; understands `--json FILE` (writes a list of rows) and `--filter TEXT` (see Wants).
// Other arguments end the program with a usage text.
class Report {
 public:
  Report(int argc, char** argv);

  // Whether a measurement of this name is asked for: its name contains the filter.
  bool Wants(const std::string& name) const;
  const std::string& filter() const { return filter_; }
  // Adds a row and prints it.
  void Add(const Row& row);
  // Writes the JSON file, if one was asked for. The exit code of the program: not 0 if nothing was
  // measured.
  int Finish() const;

 private:
  std::string json_path_;
  std::string filter_;
  std::vector<Row> rows_;
};

}  // namespace emberd::bench
