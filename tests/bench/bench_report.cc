#include "tests/bench/bench_report.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include <nlohmann/json.hpp>

namespace emberd::bench {

namespace {

double WallClock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double CpuClock() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double Median(double (*clock)(), int repeats, const std::function<void()>& work) {
  work();
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = clock();
    work();
    seconds.push_back(clock() - start);
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}

}  // namespace

double MedianSeconds(int repeats, const std::function<void()>& work) {
  return Median(WallClock, repeats, work);
}

double MedianCpuSeconds(int repeats, const std::function<void()>& work) {
  return Median(CpuClock, repeats, work);
}

Report::Report(int argc, char** argv) {
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 < argc && flag == "--json") {
      json_path_ = argv[i + 1];
    } else if (i + 1 < argc && flag == "--filter") {
      filter_ = argv[i + 1];
    } else {
      std::fprintf(stderr, "usage: ./run bench %s [--json FILE] [--filter TEXT]\n", argv[0]);
      std::exit(2);
    }
  }
  std::printf("%-56s %14s %-8s %8s %6s %14s %7s\n", "name", "value", "unit", "threads", "width",
              "limit", "ratio");
}

bool Report::Wants(const std::string& name) const {
  return name.find(filter_) != std::string::npos;
}

void Report::Add(const Row& row) {
  rows_.push_back(row);
  std::printf("%-56s %14.4g %-8s %8d %6d %14.4g %7.2f\n", row.name.c_str(), row.value,
              row.unit.c_str(), row.threads, row.width, row.limit, row.ratio());
  std::fflush(stdout);
}

int Report::Finish() const {
  if (rows_.empty() && !filter_.empty()) {
    std::fprintf(stderr,
                 "--filter '%s': nothing was measured; rows begin with the names of measurements, "
                 "and a run without --filter makes all that can be made here\n",
                 filter_.c_str());
    return 2;
  }
  if (json_path_.empty()) return 0;
  nlohmann::json rows = nlohmann::json::array();
  for (const Row& row : rows_) {
    rows.push_back({{"name", row.name},
                    {"value", row.value},
                    {"unit", row.unit},
                    {"threads", row.threads},
                    {"width", row.width},
                    {"limit", row.limit},
                    {"ratio", row.ratio()}});
  }
  std::ofstream file(json_path_);
  file << rows.dump(1) << '\n';
  if (file.good()) return 0;
  std::fprintf(stderr, "cannot write %s\n", json_path_.c_str());
  return 1;
}

}  // namespace emberd::bench
