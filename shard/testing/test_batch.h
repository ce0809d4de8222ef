// Batches for the tests of the engine: random (sample, row) pairs, wrapped into CSR as
// preprocessing would.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "preprocess/batch/csr.h"

namespace emberd::shard::testing {

// One (sample, row) pair of a stack; `partition` is global.
struct TestEntry {
  int32_t sample;
  int32_t partition;
  int32_t row;
  float gain;
};

struct TestShape {
  int partitions = 1;  // P
  int64_t rows_per_partition = 64;
  int samples = 32;
};

// Distinct pairs, 0 to 2 * mean_bag ids per sample, gains in [-2, 2), ordered by (sample,
// partition, row).
inline std::vector<TestEntry> RandomEntries(const TestShape& shape, int mean_bag,
                                            std::mt19937_64& random) {
  std::vector<TestEntry> entries;
  std::uniform_real_distribution<float> gain(-2, 2);
  const int64_t rows = shape.partitions * shape.rows_per_partition;
  for (int sample = 0; sample < shape.samples; ++sample) {
    std::vector<int64_t> ids(random() % (2 * mean_bag + 1));
    for (int64_t& id : ids) id = random() % rows;
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    for (const int64_t id : ids) {
      entries.push_back({sample, static_cast<int32_t>(id / shape.rows_per_partition),
                         static_cast<int32_t>(id % shape.rows_per_partition), gain(random)});
    }
  }
  return entries;
}

// The part of a batch for one shard, in CSR segments that it owns. Samples are dealt to the slots
// in `spans_per_slot` runs each, so that the slots interleave in canonical order; rows are dealt to
// the mini-batches by row modulo.
class TestBatch {
 public:
  TestBatch(const std::vector<TestEntry>& entries, const TestShape& shape, int first_partition,
            int partition_count, int slots, int minibatches, int spans_per_slot = 2,
            int stack = 0) {
    view_.stack = stack;
    view_.sample_count = shape.samples;
    feature_samples_ = {shape.samples};
    view_.slots = slots;
    view_.minibatches = minibatches;
    MakeSpans(shape.samples, slots, spans_per_slot);
    segments_.resize(slots * minibatches);
    for (int slot = 0; slot < slots; ++slot) {
      for (int m = 0; m < minibatches; ++m) {
        FillSegment(entries, first_partition, partition_count, slot, m, minibatches);
      }
    }
    Refresh();
  }

  struct Segment {
    int32_t base = 0;
    std::vector<int32_t> row_ends, rows, samples;
    std::vector<float> gains;
  };
  std::vector<Segment>& segments() { return segments_; }
  std::vector<std::vector<preprocess::SampleSpan>>& spans() { return spans_; }
  // One feature, unless a test cuts the samples differently.
  std::vector<int64_t>& feature_samples() { return feature_samples_; }
  preprocess::StackBatchView& view() { return view_; }

  // Points the view at segments(), spans() and feature_samples() again, after a test has changed
  // them.
  void Refresh() {
    view_.segments.clear();
    for (const Segment& s : segments_)
      view_.segments.push_back({s.base, s.row_ends, s.rows, s.samples, s.gains});
    view_.spans.assign(spans_.begin(), spans_.end());
    view_.feature_samples = feature_samples_;
  }

 private:
  void MakeSpans(int samples, int slots, int spans_per_slot) {
    spans_.resize(slots);
    slot_of_.resize(samples);
    sample_in_slot_.resize(samples);
    const int pieces = slots * spans_per_slot;
    std::vector<int> used(slots);
    for (int piece = 0; piece < pieces; ++piece) {
      const int begin = samples * piece / pieces, end = samples * (piece + 1) / pieces;
      const int slot = piece % slots;
      spans_[slot].push_back({used[slot], begin, end - begin});
      for (int s = begin; s < end; ++s) {
        slot_of_[s] = slot;
        sample_in_slot_[s] = used[slot]++;
      }
    }
  }

  void FillSegment(const std::vector<TestEntry>& entries, int first_partition, int partition_count,
                   int slot, int m, int minibatches) {
    Segment& segment = segments_[slot * minibatches + m];
    segment.base = 8 * (slot + m);  // as if other shards' partitions came before
    for (int k = 0; k < partition_count; ++k) {
      std::vector<TestEntry> mine;
      for (const TestEntry& e : entries) {
        if (e.partition == first_partition + k && slot_of_[e.sample] == slot &&
            e.row % minibatches == m) {
          mine.push_back(e);
        }
      }
      std::stable_sort(mine.begin(), mine.end(),
                       [](const TestEntry& a, const TestEntry& b) { return a.row < b.row; });
      for (const TestEntry& e : mine) {
        segment.rows.push_back(e.row);
        segment.samples.push_back(sample_in_slot_[e.sample]);
        segment.gains.push_back(e.gain);
      }
      segment.row_ends.push_back(segment.base + static_cast<int32_t>(segment.rows.size()));
      const size_t aligned = preprocess::AlignCsr(segment.rows.size());
      segment.rows.resize(aligned, preprocess::kCsrPadId);
      segment.samples.resize(aligned, preprocess::kCsrPadId);
      segment.gains.resize(aligned, std::numeric_limits<float>::quiet_NaN());
    }
  }

  preprocess::StackBatchView view_;
  std::vector<Segment> segments_;
  std::vector<std::vector<preprocess::SampleSpan>> spans_;
  std::vector<int64_t> feature_samples_;
  std::vector<int> slot_of_, sample_in_slot_;
};

}  // namespace emberd::shard::testing
