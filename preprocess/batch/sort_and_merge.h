// One source slot from features to CSR: what is given of a feature, any id width, any form, and the
// checks of it; where the samples of a batch go; then a sort key and a gain for each id of the slot
// (COO); keys are sorted, and equal ones merge. Inputs are checked, and samples laid out, for all
// slots of a batch at once; then the Preprocessor calls SortSlot for each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/csr.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// ---- One feature of a request: spans over the caller's memory; checked before any work is done

// Ids, row splits or sparse indices in the width in which they came.
using IntSpan = std::variant<absl::Span<const int32_t>, absl::Span<const int64_t>>;

struct DenseInput {
  IntSpan ids;                 // samples * ids_per_sample, row-major
  int64_t ids_per_sample = 1;  // >= 0
  int64_t sample_count = 0;
};
struct SparseInput {
  IntSpan indices;  // n pairs (sample, position); samples non-decreasing
  IntSpan values;   // n ids
  int64_t sample_count = 0;
};
struct RaggedInput {
  IntSpan row_splits;  // samples + 1
  IntSpan values;
};

struct FeatureInput {
  std::variant<DenseInput, SparseInput, RaggedInput> ids;
  bool has_weights = false;
  absl::Span<const float> weights;  // one per id, or a single one for all
};

// Samples of one stack in one batch, at most (the bound of JAX's sort keys).
inline constexpr int64_t kMaxStackSamples = (int64_t{1} << 26) - 1;

// OK if the sizes of the arrays fit together, samples are in order and in range, weights are finite
// and every id is in [0, vocabulary_size). Otherwise INVALID_ARGUMENT or OUT_OF_RANGE naming the
// feature, the position of the first offending value, the value and what is allowed.
absl::Status ValidateFeature(absl::string_view feature, int64_t vocabulary_size,
                             const FeatureInput& input);

// Ids or samples, whichever is more, as the input says before it has been checked.
int64_t RoughSize(const FeatureInput& input);

// Samples of an input that ValidateFeature accepts.
int64_t SampleCount(const FeatureInput& input);

// Whether no sample of such an input has more than one id, or a weight other than 1. Its gains are
// 1 then, whatever the combiner.
bool HasSingleIds(const FeatureInput& input);

// ---- How the samples of a stack's features are laid over the K source slots of a replica.

// A run of one feature's samples in a source slot.
struct SlotSlice {
  int feature = 0;           // index in the stack's features
  int64_t sample_begin = 0;  // first sample of the feature
  int64_t count = 0;         // > 0
  int32_t slot_begin = 0;    // sample id of the first one inside the slot
};

// The slices of one source slot, ascending in slot_begin.
struct SlotLayout {
  std::vector<SlotSlice> slices;
  // Sample ids of the slot are 0 to samples - 1; ids that no slice covers have no entries.
  int32_t samples = 0;
};

// Lays `sample_counts` (one per feature, in canonical order) over `slots` slots. What does not
// divide is filled up with empty samples at the end: of every feature for SPLIT_THEN_STACK, of the
// whole stack for STACK_THEN_SPLIT. Reuses the memory of `layout`, which gets one entry per slot.
void LayOutSamples(v1::SampleLayout kind, absl::Span<const int64_t> sample_counts, int slots,
                   std::vector<SlotLayout>* layout);

// One stack as the core of preprocessing sees it: no names, no config.
struct FeatureShape {
  int64_t row_offset = 0;  // of its table, in local rows
  int64_t rotation = 0;    // in [0, P)
  v1::Combiner combiner = v1::SUM;
};

struct StackShape {
  int64_t partitions = 1;          // P, a power of two
  int64_t rows_per_partition = 1;  // every local row is below
  std::vector<FeatureShape> features;
  // Gain of a sample whose weights (or squares of weights) sum to zero: 0, or what the division
  // gives, as in JAX.
  bool divide_by_zero = false;

  int row_bits() const { return BitsFor(rows_per_partition); }
  int partition_bits() const { return BitsFor(partitions); }
  // Bits that a key of any group can spare for the number of its sample or occurrence.
  int low_bits() const { return std::min(32, 64 - partition_bits() - row_bits()); }
};

// The inputs of the stack's features, in the order of StackShape.features. ValidateFeature accepts
// each.
using StackInputs = absl::Span<const FeatureInput* const>;

// Where the gain of an occurrence is found.
enum class GainKind {
  kOne,            // every gain is 1
  kPerSample,      // all occurrences of a sample have the same gain
  kPerOccurrence,  // weights differ inside a sample
};

// An occurrence whose weight is its own.
struct WeightedSample {
  int32_t sample;
  float gain;
};

// The first sample of a slot whose weights sum to more than a float32 holds (their squares, with
// SQRTN), so that the sample's gains would be 0. Or one with a gain that is not finite.
struct WeightOverflow {
  int feature = -1;      // in StackShape.features; -1: there is none
  int64_t sample = 0;    // of the feature
  bool of_gain = false;  // the latter
};

// Keys that are sorted by themselves: of one table, or of several that follow one another in the
// stack and have few ids. They need fewer bits than those of the whole stack, and less cache.
struct KeyGroup {
  int64_t begin = 0, end = 0;          // its keys
  size_t first_slice = 0, slices = 0;  // in Occurrences.slices
  int64_t row_offset = 0;              // of its first table, in local rows
  int row_bits = 0;                    // of its rows, counted from there
  int64_t low_begin = 0;               // its first sample or occurrence
  int low_bits = 0;                    // of its samples or occurrences, counted from there
  bool narrow = false;                 // its keys have at most 32 bits
};

// Room for keys of 32 bits, and for those of 64.
struct KeyBuffers {
  Buffer<uint32_t> narrow;
  Buffer<uint64_t> wide;
  template <typename Key>
  Buffer<Key>& of() {
    if constexpr (std::is_same_v<Key, uint32_t>) {
      return narrow;
    } else {
      return wide;
    }
  }
  template <typename Key>
  const Buffer<Key>& of() const {
    return const_cast<KeyBuffers*>(this)->of<Key>();
  }
  int64_t bytes() const { return narrow.bytes() + wide.bytes(); }
};

// The occurrences of one source slot: group by group in ascending order of rows, and inside a group
// feature by feature of each table, sample by sample. A key is
//   from bit low_bits on: partition << row_bits of the group | local row - row_offset;  below,
//   minus low_begin: sample id in the slot, or, for kPerOccurrence, the ordinal of the occurrence,
//   under which `weighted` holds its sample and gain.
// Samples of a table ascend, so a stable sort by the upper bits alone orders keys of a group as
// (partition, local row, sample, position).
struct Occurrences {
  GainKind gain_kind = GainKind::kOne;
  int64_t count = 0;
  std::vector<KeyGroup> groups;
  KeyBuffers keys;                  // from `begin` of a group on, in the buffer for its keys
  Buffer<float> sample_gains;       // [samples of the slot], kPerSample
  Buffer<WeightedSample> weighted;  // [count], kPerOccurrence
  WeightOverflow overflow;
  std::vector<const SlotSlice*> slices;  // of the slot, in the order of the keys
};

// The simplest kind that fits all features of the stack, so that all of its slots agree.
GainKind GainKindOf(const StackShape& shape, StackInputs inputs);

// Ids in the source slot.
int64_t CountIds(const SlotLayout& slot, StackInputs inputs);

// Divides the ids of the source slot into groups, and makes room for their keys.
void MakeGroups(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
                Occurrences* out);
// Makes the keys of a group of `out`, and the gains of its samples or occurrences. To be called
// once for each group.
void MakeKeys(const StackShape& shape, StackInputs inputs, const KeyGroup& group, Occurrences* out);

// The CSR of one source slot of one stack. Segments (mini-batches) follow one another in the three
// arrays; inside a segment, partitions do. All indices count from the start of the arrays.
struct SlotCsr {
  Buffer<int32_t> embedding_ids;  // [cells]
  Buffer<int32_t> sample_ids;     // [cells]
  Buffer<float> gains;            // [cells]
  Buffer<int32_t> row_ends;       // [minibatches * partitions]: exact end of each partition
  int minibatches = 0;
  int partitions = 0;
  int64_t cells = 0;  // used, pads included

  // Counted before anything is dropped.
  int64_t entries = 0;     // distinct (sample, row) pairs
  int64_t duplicates = 0;  // occurrences that merged into an entry
  int64_t dropped = 0;
  WeightOverflow overflow;
  Buffer<int32_t> partition_ids;     // [partitions] distinct (sample, row) pairs
  Buffer<int32_t> partition_unique;  // [partitions] distinct rows

  // First index of partition p of mini-batch m.
  int32_t Begin(int m, int p) const {
    const int64_t at = int64_t{m} * partitions + p;
    return at == 0 ? 0 : static_cast<int32_t>(AlignCsr(row_ends.data()[at - 1]));
  }
  int32_t End(int m, int p) const { return row_ends.data()[int64_t{m} * partitions + p]; }

  void Reserve(int64_t max_cells, int max_segments, int partition_count) {
    embedding_ids.Reserve(max_cells);
    sample_ids.Reserve(max_cells);
    gains.Reserve(max_cells);
    row_ends.Reserve(int64_t{max_segments} * partition_count);
    partition_ids.Reserve(partition_count);
    partition_unique.Reserve(partition_count);
    partitions = partition_count;
  }
  int64_t bytes() const {
    return embedding_ids.bytes() + sample_ids.bytes() + gains.bytes() + row_ends.bytes() +
           partition_ids.bytes() + partition_unique.bytes();
  }
};

// Writes pads from `cell` to the next multiple of 8, which is returned.
int64_t PadCells(SlotCsr* csr, int64_t cell);

// Working memory of one task; keeps its size from task to task.
struct SlotScratch {
  Occurrences occurrences;
  KeyBuffers spare_keys;
  std::vector<int64_t> next;  // of each group, the first key that has not been merged
  SlotCsr csr;                // a slot that is being cut
  Buffer<int32_t> positions;  // while it is

  int64_t bytes() const {
    return occurrences.keys.bytes() + occurrences.sample_gains.bytes() +
           occurrences.weighted.bytes() + spare_keys.bytes() + csr.bytes() + positions.bytes();
  }
};

// Fills `csr` with the slot's entries as one mini-batch: (row, sample) pairs that are equal merge,
// their gains added in order of position; partitions are padded and counted. `multiplicity`, unless
// null, gets the number of occurrences of each cell.
void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr);

// Bits of a partition, of at most 1024, and of a row of it, below 2^31.
inline constexpr int kMaxLiveBits = 41;

// Sorts n keys ascending by bits [low_bits, low_bits + live_bits), keeping the order of keys that
// are equal there; higher bits are zero and lower bits ascend. `spare` has room for n keys. LSD
// radix sort; passes in which all keys agree are left out. Keys are uint32_t or uint64_t.
template <typename Key>
void SortKeys(Key* keys, Key* spare, int64_t n, int live_bits, int low_bits);

}  // namespace emberd::preprocess
