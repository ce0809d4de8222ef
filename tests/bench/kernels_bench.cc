// The engine's kernels beside what memory allows, and beside PyTorch.
//
// Simulates the inner loops of one shard on one thread: gather and pool (forward), and sum
// gradients and update (Adagrad, the same as a custom optimizer, row-wise Adagrad), on a table of 4
// million rows in huge pages; ids are uniform, or Zipf 1.05 with the frequent rows scattered over
// the table; batches read 64 MiB of float32 gradients or 128 MiB of float32 rows, whatever the
// width. `sizes` has tables of 10^5 to 4 * 10^7 rows, `targets` each kind of vector instructions
// that this processor has (their limits are those of the best one). Not simulated: the network,
// arranging of batches, tables without huge pages.
//
// `value` is ids per second. `limit` is measured in the same rounds, on the same rows in the same
// order: for forward the best plain gather (for bags of 1: gather and write), for the optimizers
// the best loop that reads the same gradients and reads and writes the same weights and slots; best
// over how far ahead it asks for memory, in one step or in two. (A ratio above 1 says that a better
// loop exists.) For the custom optimizer it is the built-in Adagrad. GB/s count every row read
// (forward), and every row read, updated and written back plus gradients (backward).
//
// `torch` rows, where PyTorch is installed: `value` is ours, `limit` is what one thread of
// EmbeddingBag(sparse=True) does with the same ids, width 64, 16,384 samples; `step` is forward,
// then ordering by row, then Adagrad (there: forward, backward and Adagrad). Its Python is
// EMBERD_PYTHON of CMake, unless EMBERD_BENCH_PYTHON in the environment names another one.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <time.h>

#include "absl/strings/str_cat.h"
#include "base/buffers.h"
#include "base/floats.h"
#include "emberd/v1/model.pb.h"
#include "hwy/targets.h"
#include "shard/batch/batch.h"
#include "shard/gather/pooling.h"
#include "shard/update/update_kernel.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/ids.h"
#include "tests/bench/memory_limits.h"
#include "tests/bench/peer.h"

namespace emberd::bench {
namespace kernels_bench {

using shard::Entry;
using shard::Touch;

constexpr int64_t kRows = 4'000'000;
constexpr int64_t kMostRows = 40'000'000;  // of width kSizesWidth
constexpr int kSizesWidth = 16;
constexpr int64_t kForwardFloats = 1 << 25;
constexpr int64_t kUpdateFloats = 1 << 24;
constexpr int kRounds = 7;
// Rows ahead for which the limits ask: the best one counts.
constexpr int kFarthest = 120;
static_assert(kFarthest <= shard::kEntryPadding && kFarthest <= shard::kTouchPadding);
constexpr Ahead kGatherAhead[] = {{32, 0},  {64, 0},         {8, 32},        {8, 64},
                                  {16, 64}, {16, kFarthest}, {24, kFarthest}};
constexpr Ahead kUpdateAhead[] = {{8, 0},  {16, 0},  {32, 0},        {8, 32},
                                  {8, 64}, {16, 64}, {16, kFarthest}};

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

std::vector<uint32_t> MakeOffsets(int64_t ids, int bag) {
  std::vector<uint32_t> offsets;
  for (int64_t i = 0; i < ids; i += bag) offsets.push_back(static_cast<uint32_t>(i));
  offsets.push_back(static_cast<uint32_t>(ids));
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

// Small values above 0, as float32 and as pairs of bfloat16.
MappedMemory Table(size_t bytes) {
  MappedMemory memory = *MappedMemory::Map(bytes, true);
  uint32_t* words = reinterpret_cast<uint32_t*>(memory.data());
  for (size_t i = 0; i < bytes / sizeof(uint32_t); ++i) {
    words[i] = ToBfloat16(1e-3f * static_cast<float>(i % 1024 + 1)) * 0x10001u;
  }
  return memory;
}

std::string Name(const std::string& kernel, int width, v1::DataType dtype, bool zipf, int bag) {
  return absl::StrCat(kernel, "/", width, "/", dtype == v1::BFLOAT16 ? "bfloat16" : "float32", "/",
                      zipf ? "zipf" : "uniform", "/bag", bag);
}

// While it lives, kernels run on this kind of vector instructions; 0: the best one.
class OnTarget {
 public:
  explicit OnTarget(int64_t target) : chosen_(target != 0) {
    if (chosen_) hwy::SetSupportedTargetsForTest(target);
  }
  ~OnTarget() {
    if (chosen_) hwy::SetSupportedTargetsForTest(0);
  }

 private:
  const bool chosen_;
};

const shard::UpdateRule kAdagrad = shard::AdagradRule{0.01f};
const shard::UpdateRule kRowwiseAdagrad = shard::RowwiseAdagradRule{0.01f, 1e-8f};

// The same as a user's own rule.
shard::UpdateRule CustomAdagrad() {
  v1::OptimizerConfig optimizer;
  optimizer.set_learning_rate(0.01f);
  optimizer.mutable_custom()->set_expression("a = a + g * g; w = w - lr * g / sqrt(a)");
  optimizer.mutable_custom()->add_slots()->set_name("a");
  return shard::MakeStepRule(optimizer, 0).rule;
}

class KernelBench {
 public:
  explicit KernelBench(Report& report) : report_(report) {}

  void RunWidth(int width) {
    for (const bool zipf : {false, true}) {
      const std::vector<uint32_t> ids = MakeIds(zipf, kRows, kForwardFloats / width);
      for (const int bag : {1, 10, 50}) {
        for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16}) {
          Forward(ids, Name("forward", width, dtype, zipf, bag), width, dtype, bag);
        }
        const std::vector<Touch> touches =
            MakeTouches({ids.begin(), ids.begin() + kUpdateFloats / width}, bag);
        for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16}) {
          Update(touches, kRows, Name("adagrad", width, dtype, zipf, bag), width, dtype, kAdagrad);
          Update(touches, kRows, Name("custom_adagrad", width, dtype, zipf, bag), width, dtype,
                 CustomAdagrad());
          Update(touches, kRows, Name("rowwise_adagrad", width, dtype, zipf, bag), width, dtype,
                 kRowwiseAdagrad);
        }
      }
    }
  }

  // Width 64, uniform ids, bags of 10.
  void RunTargets() {
    const std::vector<uint32_t> ids = MakeIds(false, kRows, kForwardFloats / 64);
    const std::vector<Touch> touches =
        MakeTouches({ids.begin(), ids.begin() + kUpdateFloats / 64}, 10);
    for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
      target_ = target;
      for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16}) {
        const auto name = [&](const char* kernel) {
          return Name(absl::StrCat("targets/", hwy::TargetName(target), "/", kernel), 64, dtype,
                      false, 10);
        };
        Forward(ids, name("forward"), 64, dtype, 10);
        Update(touches, kRows, name("adagrad"), 64, dtype, kAdagrad);
        Update(touches, kRows, name("custom_adagrad"), 64, dtype, CustomAdagrad());
        Update(touches, kRows, name("rowwise_adagrad"), 64, dtype, kRowwiseAdagrad);
      }
    }
    target_ = 0;
  }

  // Cost per id over table sizes: uniform ids, bags of 10, float32.
  void RunSizes() {
    for (const int64_t rows : {100'000, 1'000'000, 10'000'000, 40'000'000}) {
      const std::string name = absl::StrCat("/", kSizesWidth, "/rows", rows);
      const std::vector<uint32_t> ids = MakeIds(false, rows, kForwardFloats / kSizesWidth);
      Forward(ids, "sizes/forward" + name, kSizesWidth, v1::FLOAT32, 10);
      const std::vector<Touch> touches =
          MakeTouches({ids.begin(), ids.begin() + kUpdateFloats / kSizesWidth}, 10);
      Update(touches, rows, "sizes/adagrad" + name, kSizesWidth, v1::FLOAT32, kAdagrad);
    }
  }

  void RunTorchRows() {
    if (!report_.Wants("torch/")) return;
    std::vector<PeerBatch> batches;
    for (const bool zipf : {false, true}) {
      for (const int bag : {10, 50}) {
        batches.push_back({absl::StrCat(zipf ? "zipf" : "uniform", "_bag", bag), bag,
                           MakeIds(zipf, kRows, int64_t{kTorchSamples} * bag)});
      }
    }
    std::vector<PeerSeconds> ours;
    for (const PeerBatch& batch : batches) ours.push_back(Step(batch));
    for (const bool huge_pages : {true, false}) {
      const std::vector<PeerSeconds> theirs =
          RunPeer("torch_steps.py", kRows, 64, batches, {.huge_pages = huge_pages});
      if (theirs.empty()) {
        std::printf("torch: no rows, %s has no working PyTorch (python3-torch)\n",
                    PeerPython().c_str());
        return;
      }
      for (size_t i = 0; i < batches.size(); ++i) {
        const std::string name = batches[i].name + (huge_pages ? "/huge_pages" : "/4k_pages");
        const double ids = static_cast<double>(batches[i].ids.size());
        report_.Add({"torch/forward/" + name, ids / ours[i].forward, "ids/s", 1, 64,
                     ids / theirs[i].forward});
        report_.Add(
            {"torch/step/" + name, ids / ours[i].step, "ids/s", 1, 64, ids / theirs[i].step});
      }
    }
  }

 private:
  static constexpr int kTorchSamples = 16384;

  void MakeTables() {
    if (weights_.data() != nullptr) return;
    const size_t floats = std::max(kRows * 128, kMostRows * kSizesWidth);
    weights_ = Table(floats * sizeof(float));
    slots_ = Table(floats * sizeof(float));
    floats_ = Table(kForwardFloats * sizeof(float));
  }

  void Add(const std::string& name, int width, int64_t ids, double seconds, double limit_seconds,
           double bytes) {
    const double count = static_cast<double>(ids);
    report_.Add({name, count / seconds, "ids/s", 1, width, count / limit_seconds});
    report_.Add(
        {name + "/bytes", bytes / seconds / 1e9, "GB/s", 1, width, bytes / limit_seconds / 1e9});
  }

  shard::ForwardArgs MakeForwardArgs(const Entry* entries, const std::vector<uint32_t>& offsets,
                                     int width, v1::DataType dtype) {
    shard::ForwardArgs args;
    args.weights = weights_.data();
    args.dtype = dtype;
    args.width = width;
    args.entries = entries;
    args.offsets = offsets.data();
    args.end = static_cast<int64_t>(offsets.size()) - 1;
    args.sums = reinterpret_cast<float*>(floats_.data());
    return args;
  }

  void Forward(const std::vector<uint32_t>& ids, const std::string& name, int width,
               v1::DataType dtype, int bag) {
    if (!report_.Wants(name)) return;
    MakeTables();
    const int64_t count = ids.size();
    const std::vector<Entry> entries = MakeEntries(ids, bag);
    const std::vector<uint32_t> offsets = MakeOffsets(count, bag);
    const shard::ForwardArgs args = MakeForwardArgs(entries.data(), offsets, width, dtype);
    const size_t row_bytes = width * (dtype == v1::BFLOAT16 ? 2 : 4);
    std::vector<std::function<void()>> works = {[&] {
      const OnTarget on(target_);
      shard::SumRows(args);
    }};
    for (const Ahead ahead : kGatherAhead) {
      works.push_back([&, ahead] {
        if (bag == 1) {
          CopyLimit(weights_.data(), row_bytes, entries.data(), count, ahead, width * sizeof(float),
                    floats_.data());
        } else {
          sink_ = GatherLimit(weights_.data(), row_bytes, entries.data(), count, ahead);
        }
      });
    }
    const std::vector<double> seconds = MedianOfEach(works);
    Add(name, width, count, seconds[0], *std::min_element(seconds.begin() + 1, seconds.end()),
        static_cast<double>(count) * row_bytes);
  }

  shard::UpdateArgs MakeUpdateArgs(const Touch* touches, int64_t count,
                                   const shard::RowRange& range, int width, v1::DataType dtype) {
    shard::UpdateArgs args;
    args.touches = touches;
    args.touch_count = count;
    args.gradients = reinterpret_cast<const float*>(floats_.data());
    args.width = width;
    args.ranges = absl::MakeSpan(&range, 1);
    args.weights = weights_.data();
    args.dtype = dtype;
    args.slots[0] = reinterpret_cast<float*>(slots_.data());
    return args;
  }

  // `touches` with their padding.
  void Update(const std::vector<Touch>& touches, int64_t table_rows, const std::string& name,
              int width, v1::DataType dtype, const shard::UpdateRule& update) {
    if (!report_.Wants(name)) return;
    MakeTables();
    const int64_t count = static_cast<int64_t>(touches.size()) - shard::kTouchPadding;
    const shard::RowRange range{0, table_rows, width, 0};
    const shard::UpdateArgs args = MakeUpdateArgs(touches.data(), count, range, width, dtype);
    const bool rowwise = std::holds_alternative<shard::RowwiseAdagradRule>(update);
    UpdateTraffic traffic;
    traffic.touches = touches.data();
    traffic.count = count;
    traffic.gradients = floats_.data();
    traffic.gradient_bytes = width * sizeof(float);
    traffic.table = weights_.data();
    traffic.row_bytes = width * (dtype == v1::BFLOAT16 ? 2 : 4);
    traffic.slot = slots_.data();
    traffic.slot_bytes = rowwise ? sizeof(float) : width * sizeof(float);
    int64_t rows = 0;
    const auto updates = [&](const shard::UpdateRule& with) {
      return [&, rule = shard::StepRule{{}, with}] {
        const OnTarget on(target_);
        rows = shard::UpdateRows(args, rule).updated;
      };
    };
    std::vector<std::function<void()>> works = {updates(update)};
    if (std::holds_alternative<shard::CustomRule>(update)) {
      works.push_back(updates(kAdagrad));
    } else {
      for (const Ahead ahead : kUpdateAhead) {
        works.push_back([&, ahead] { sink_ = UpdateLimit(traffic, ahead); });
      }
    }
    const std::vector<double> seconds = MedianOfEach(works);
    Add(name, width, count, seconds[0], *std::min_element(seconds.begin() + 1, seconds.end()),
        static_cast<double>(rows) * 2 * (traffic.row_bytes + traffic.slot_bytes) +
            static_cast<double>(count) * traffic.gradient_bytes);
  }

  // Width 64, float32, one partition, from ids on.
  PeerSeconds Step(const PeerBatch& batch) {
    MakeTables();
    const int64_t count = batch.ids.size();
    const std::vector<uint32_t> offsets = MakeOffsets(count, batch.bag);
    const shard::RowRange range{0, kRows, 64, 0};
    BufferPool pool;
    shard::StackEntries entries;
    entries.entry_count = count;
    entries.partition_entries = {count};
    entries.feature_offsets = {0, static_cast<uint32_t>(offsets.size() - 1)};
    entries.samples = PooledArray<int32_t>(pool, offsets.size() - 1);
    entries.offsets = PooledArray<uint32_t>(pool, offsets.size());
    entries.entries = PooledArray<Entry>(pool, count + shard::kEntryPadding);
    std::copy(offsets.begin(), offsets.end(), entries.offsets.data());
    const auto forward = [&] {
      for (int64_t i = 0; i < count; ++i) entries.entries[i] = {batch.ids[i], 1.0f};
      std::fill_n(entries.entries.data() + count, shard::kEntryPadding, Entry{0, 0});
      shard::SumRows(MakeForwardArgs(entries.entries.data(), offsets, 64, v1::FLOAT32));
    };
    const shard::StackEntries* parts[] = {&entries};
    const auto step = [&] {
      forward();
      const auto touches = shard::OrderByRow(parts, 0, kRows, pool);
      shard::UpdateRows(MakeUpdateArgs(touches.data(), count, range, 64, v1::FLOAT32),
                        {{}, kAdagrad});
    };
    const std::vector<double> seconds = MedianOfEach({forward, step});
    return {seconds[0], seconds[1]};
  }

  Report& report_;
  int64_t target_ = 0;  // of OnTarget
  MappedMemory weights_, slots_, floats_;
  volatile int sink_ = 0;  // keeps the limits' checksums alive
};

EMBERD_BENCHMARK(kernels, argc, argv) {
  Report report(argc, argv);
  KernelBench bench(report);
  for (const int width : {16, 32, 64, 128}) bench.RunWidth(width);
  bench.RunTargets();
  bench.RunSizes();
  bench.RunTorchRows();
  return report.Finish();
}

}  // namespace kernels_bench
}  // namespace emberd::bench
