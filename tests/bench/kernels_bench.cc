// The engine's kernels beside what memory allows.
//
// Simulates the inner loops of one shard: gather and pool (forward), and sum gradients and update
// (backward), on a table of 4 million rows in huge pages and batches of 2^20 ids, uniform or Zipf
// 1.05 with the frequent rows scattered over the table. One thread. Not simulated: the network,
// arranging and sorting of batches, tables without huge pages.
//
// `value` is ids per second. `limit` is measured in the same rounds, on the same rows in the same
// order: for forward the best plain gather (for bags of 1: gather and write), for the optimizers
// the best loop that reads the same gradients and reads and writes the same weights and slots. GB/s
// count every row read (forward), and every row read, updated and written back plus gradients
// (backward).
#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <time.h>

#include "shard/forward_kernel.h"
#include "shard/mapped_memory.h"
#include "shard/update_kernel.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/ids.h"
#include "tests/bench/memory_limits.h"

namespace emberd::bench {
namespace {

using shard::Entry;
using shard::MappedMemory;
using shard::Touch;

constexpr int64_t kRows = 4'000'000;
constexpr int64_t kIds = 1 << 20;
constexpr int kRounds = 5;
constexpr int kAhead[] = {16, 32, 40, 48};

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Median seconds of each work, measured in turns so that all of them meet the same noise, and in
// CPU time of this thread, so that it does not count where another process ran.
std::vector<double> MedianOfEach(const std::vector<std::function<void()>>& works) {
  std::vector<std::vector<double>> seconds(works.size());
  for (int round = 0; round <= kRounds; ++round) {
    for (size_t i = 0; i < works.size(); ++i) {
      const double start = CpuSeconds();
      works[i]();
      const double elapsed = CpuSeconds() - start;
      if (round > 0) seconds[i].push_back(elapsed);  // round 0 warms up
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& s : seconds) {
    std::nth_element(s.begin(), s.begin() + kRounds / 2, s.end());
    medians.push_back(s[kRounds / 2]);
  }
  return medians;
}

// Entries sample by sample, rows ascending inside a sample, as the engine arranges them.
std::vector<Entry> MakeEntries(std::vector<uint32_t> ids, int bag) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < ids.size(); i += bag) {
    std::sort(ids.begin() + i, ids.begin() + std::min(ids.size(), i + bag));
  }
  for (const uint32_t id : ids) entries.push_back({id, 0.5f});
  entries.resize(ids.size() + shard::kEntryPadding, Entry{0, 0});
  return entries;
}

std::vector<uint32_t> MakeOffsets(int bag) {
  std::vector<uint32_t> offsets;
  for (int64_t i = 0; i < kIds; i += bag) offsets.push_back(static_cast<uint32_t>(i));
  offsets.push_back(kIds);
  return offsets;
}

std::vector<Touch> MakeTouches(const std::vector<uint32_t>& ids, int bag) {
  std::vector<Touch> touches;
  for (size_t i = 0; i < ids.size(); ++i)
    touches.push_back({ids[i], static_cast<uint32_t>(i / bag), 0.5f});
  std::stable_sort(touches.begin(), touches.end(),
                   [](const Touch& a, const Touch& b) { return a.row < b.row; });
  touches.resize(ids.size() + shard::kTouchPadding, Touch{0, 0, 0});
  return touches;
}

MappedMemory Table(size_t bytes) {
  MappedMemory memory = *MappedMemory::Map(bytes, true);
  // Small values of both signs; any bit pattern of finite floats would do.
  float* values = reinterpret_cast<float*>(memory.data());
  for (size_t i = 0; i < bytes / sizeof(float); ++i)
    values[i] = 1e-3f * static_cast<float>(i % 1024);
  return memory;
}

class KernelBench {
 public:
  explicit KernelBench(Report& report)
      : report_(report), ids_{MakeIds(false, kRows, kIds), MakeIds(true, kRows, kIds)} {}

  void RunWidth(int width) {
    for (const bool bfloat16 : {false, true}) {
      for (const bool zipf : {false, true}) {
        for (const int bag : {1, 10, 50}) {
          Forward(width, bfloat16, zipf, bag);
          if (bag == 50) continue;
          Update(width, bfloat16, zipf, bag, shard::AdagradRule{0.01f}, "adagrad",
                 width * sizeof(float));
          Update(width, bfloat16, zipf, bag, shard::RowwiseAdagradRule{0.01f, 1e-8f},
                 "rowwise_adagrad", 4);
        }
      }
    }
  }

  // Cost per id over table sizes: bags of 10, width 16, float32.
  void RunSizes() {
    if (!report_.Wants("sizes/16/")) return;
    weights_ = Table(int64_t{40'000'000} * 16 * sizeof(float));
    slots_ = MappedMemory();
    floats_ = Table(kIds * 16 * sizeof(float));
    for (const int64_t rows : {100'000, 1'000'000, 10'000'000, 40'000'000}) {
      ForwardOn(MakeIds(false, rows, kIds), "sizes/16/rows" + std::to_string(rows), 16, false, 10);
    }
  }

 private:
  void MakeTables(int width) {
    if (std::exchange(table_width_, width) == width) return;
    for (MappedMemory* memory : {&weights_, &slots_, &floats_}) *memory = MappedMemory();
    weights_ = Table(kRows * width * sizeof(float));
    slots_ = Table(kRows * width * sizeof(float));
    floats_ = Table(kIds * width * sizeof(float));
  }

  static std::string Name(const std::string& kernel, int width, bool bfloat16, bool zipf, int bag) {
    return kernel + "/" + std::to_string(width) + "/" + (bfloat16 ? "bfloat16" : "float32") + "/" +
           (zipf ? "zipf" : "uniform") + "/bag" + std::to_string(bag);
  }

  void Add(const std::string& name, int width, double seconds, double limit_seconds, double bytes) {
    report_.Add({name, kIds / seconds, "ids/s", 1, width, kIds / limit_seconds});
    report_.Add(
        {name + "/bytes", bytes / seconds / 1e9, "GB/s", 1, width, bytes / limit_seconds / 1e9});
  }

  void Forward(int width, bool bfloat16, bool zipf, int bag) {
    const std::string name = Name("forward", width, bfloat16, zipf, bag);
    if (!report_.Wants(name)) return;
    MakeTables(width);
    ForwardOn(ids_[zipf], name, width, bfloat16, bag);
  }

  void ForwardOn(const std::vector<uint32_t>& ids, const std::string& name, int width,
                 bool bfloat16, int bag) {
    const std::vector<Entry> entries = MakeEntries(ids, bag);
    const std::vector<uint32_t> offsets = MakeOffsets(bag);
    shard::ForwardArgs args;
    args.weights = weights_.data();
    args.dtype = bfloat16 ? v1::BFLOAT16 : v1::FLOAT32;
    args.width = width;
    args.entries = entries.data();
    args.offsets = offsets.data();
    args.end = static_cast<int64_t>(offsets.size()) - 1;
    args.sums = reinterpret_cast<float*>(floats_.data());
    const size_t row_bytes = width * (bfloat16 ? 2 : 4);
    std::vector<std::function<void()>> works = {[&] { shard::SumRows(args); }};
    for (const int ahead : kAhead) {
      works.push_back([&, ahead] {
        if (bag == 1) {
          CopyLimit(weights_.data(), row_bytes, entries.data(), kIds, ahead, width * sizeof(float),
                    floats_.data());
        } else {
          volatile float sink =
              GatherLimit(weights_.data(), row_bytes, entries.data(), kIds, ahead);
          (void)sink;
        }
      });
    }
    const std::vector<double> seconds = MedianOfEach(works);
    Add(name, width, seconds[0], *std::min_element(seconds.begin() + 1, seconds.end()),
        static_cast<double>(kIds) * row_bytes);
  }

  void Update(int width, bool bfloat16, bool zipf, int bag, const shard::UpdateRule& rule,
              const std::string& kernel, size_t slot_bytes) {
    const std::string name = Name(kernel, width, bfloat16, zipf, bag);
    if (!report_.Wants(name)) return;
    MakeTables(width);
    const std::vector<Touch> touches = MakeTouches(ids_[zipf], bag);
    const shard::RowRange range{0, kRows, width, 0};
    shard::UpdateArgs args;
    args.touches = touches.data();
    args.touch_count = kIds;
    args.gradients = reinterpret_cast<const float*>(floats_.data());
    args.width = width;
    args.ranges = absl::MakeSpan(&range, 1);
    args.weights = weights_.data();
    args.dtype = bfloat16 ? v1::BFLOAT16 : v1::FLOAT32;
    args.slots[0] = reinterpret_cast<float*>(slots_.data());
    const size_t row_bytes = width * (bfloat16 ? 2 : 4);
    int64_t rows = 0;
    std::vector<std::function<void()>> works = {[&] {
      rows = shard::UpdateRows(args, {{}, rule});
    }};
    for (const int ahead : kAhead) {
      works.push_back([&, ahead] {
        sink_ = UpdateLimit(weights_.data(), row_bytes, slots_.data(), slot_bytes, args.gradients,
                            width * sizeof(float), touches.data(), kIds, ahead);
      });
    }
    const std::vector<double> seconds = MedianOfEach(works);
    Add(name, width, seconds[0], *std::min_element(seconds.begin() + 1, seconds.end()),
        static_cast<double>(rows) * 2 * (row_bytes + slot_bytes) +
            static_cast<double>(kIds) * width * sizeof(float));
  }

  Report& report_;
  const std::vector<uint32_t> ids_[2];
  int table_width_ = 0;
  MappedMemory weights_, slots_, floats_;
  volatile float sink_ = 0;  // keeps the limits' checksums alive
};

}  // namespace
}  // namespace emberd::bench

int main(int argc, char** argv) {
  emberd::bench::Report report(argc, argv);
  emberd::bench::KernelBench bench(report);
  for (const int width : {16, 32, 64, 128}) bench.RunWidth(width);
  bench.RunSizes();
  return report.Finish();
}
