#include "server/ops/process_metrics.h"

#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <dirent.h>
#include <prometheus/metric_family.h>
#include <time.h>
#include <unistd.h>

#include "server/ops/metric_catalogue.h"

namespace emberd::ops {
namespace {

double Seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds since 1970. /proc gives the start in clock ticks after boot as field 22; the second one,
// the program's name, may hold spaces but ends with the last ')'.
std::optional<double> StartSeconds() {
  std::ifstream file("/proc/self/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  size_t at = name_end + 1;
  for (int field = 3; field < 22 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
  if (at == std::string::npos) return std::nullopt;
  const double boot = Seconds(CLOCK_REALTIME) - Seconds(CLOCK_BOOTTIME);
  return boot + std::strtod(stat.c_str() + at, nullptr) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

std::optional<double> OpenFds() {
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return std::nullopt;
  int entries = 0;
  while (readdir(directory) != nullptr) ++entries;
  closedir(directory);
  return entries - 3;  // ".", ".." and the descriptor of the directory itself
}

class ProcessMetrics : public prometheus::Collectable {
 public:
  ProcessMetrics() : start_seconds_(StartSeconds()) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families;
    Add(MetricId::kProcessStartSeconds, start_seconds_, &families);
    Add(MetricId::kProcessCpuSeconds, Seconds(CLOCK_PROCESS_CPUTIME_ID), &families);
    Add(MetricId::kProcessResidentBytes, ResidentBytes(), &families);
    Add(MetricId::kProcessHugePageBytes, HugePageBytes(), &families);
    Add(MetricId::kProcessOpenFds, OpenFds(), &families);
    return families;
  }

 private:
  static void Add(MetricId id, std::optional<double> value,
                  std::vector<prometheus::MetricFamily>* families) {
    if (!value.has_value()) return;
    const MetricInfo& info = Describe(id);
    prometheus::ClientMetric metric;
    const bool counter = info.type == MetricType::kCounter;
    (counter ? metric.counter.value : metric.gauge.value) = *value;
    prometheus::MetricFamily& family = families->emplace_back();
    family.name = std::string(info.name);
    family.help = std::string(info.help);
    family.type = counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
    family.metric.push_back(std::move(metric));
  }

  const std::optional<double> start_seconds_;
};

}  // namespace

std::optional<int64_t> ResidentBytes() {
  std::ifstream statm("/proc/self/statm");  // in pages: total, then resident
  int64_t total = 0;
  int64_t resident = 0;
  if (!(statm >> total >> resident)) return std::nullopt;
  return resident * sysconf(_SC_PAGESIZE);
}

std::optional<int64_t> HugePageBytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");  // "AnonHugePages:   2048 kB"
  std::optional<int64_t> bytes;
  for (std::string line; std::getline(rollup, line);) {
    std::istringstream fields(line);
    std::string name;
    int64_t kilobytes = 0;
    if (!(fields >> name >> kilobytes)) continue;
    if (name == "AnonHugePages:" || name == "ShmemPmdMapped:") {
      bytes = bytes.value_or(0) + kilobytes * 1024;
    }
  }
  return bytes;
}

std::shared_ptr<prometheus::Collectable> MakeProcessMetrics() {
  return std::make_shared<ProcessMetrics>();
}

}  // namespace emberd::ops
