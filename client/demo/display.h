// What the demo shows while it runs: a line (or two, where it is narrow) that renews itself on a
// terminal, a line every few seconds elsewhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/demo/monitor.h"

namespace emberd::demo {

struct Progress {
  int64_t examples = 0, total = 0;
  double examples_per_second = 0;
  double loss = 0, auc = 0;  // of the latest training examples
  int64_t rows_touched = 0;
  std::vector<ShardTraffic> shards = {};
};

// "[#####.....] 50%  1.00 M examples  31.2 k/s  loss 0.5123  AUC 0.7890  12.3 M rows touched
// shards 0.51 0.50 0.52 down M rows/s"
std::string ProgressLine(const Progress& progress);
// The line cut where two spaces stand, so that no part of it is wider than `width` (>= 1).
std::string WrapProgress(const std::string& line, size_t width);

// Not thread-safe.
class Display {
 public:
  explicit Display(std::FILE* stream);

  // True if it is time for a new Show.
  bool Due(absl::Time now) const;
  void Show(const Progress& progress, absl::Time now);
  // The end of the work: always shown, and stays.
  void ShowLast(const Progress& progress);
  // A line that stays.
  void Print(const std::string& line);
  // Lets the line that renews itself stay.
  void Finish();

 private:
  void Erase();

  std::FILE* stream_;
  bool terminal_;
  absl::Time last_ = absl::InfinitePast();
  std::string live_;  // what stands at the end of the terminal
};

// "950", "31.2 k", "1.25 M": three digits are enough for eyes.
std::string Short(double number);

}  // namespace emberd::demo
