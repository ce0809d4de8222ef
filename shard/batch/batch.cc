#include "shard/batch/batch.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/radix_sort.h"
#include "base/status.h"
#include "shard/store/model.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {
namespace {

using preprocess::AlignCsr;
using preprocess::CsrSegmentView;
using preprocess::SampleSpan;
using preprocess::StackBatchView;

constexpr int kMostSlots = 1 << 16;
constexpr int64_t kMaxSamples = int64_t{1} << 27;
// Of a partition: fewer are sorted in less time than memory for them would take to keep.
constexpr int64_t kFewTouches = 256;
// Sample ids of all slots together, those that no span covers included.
constexpr int64_t kMaxSampleIds = 2 * kMaxSamples;

absl::Status InvalidBatch(const StackBatchView& view, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("batch, stack ", view.stack, ": ", what));
}

// Canonical sample of every sample id of every slot.
class SampleMap {
 public:
  static absl::StatusOr<SampleMap> Make(const StackBatchView& view) {
    if (view.sample_count < 0 || view.sample_count > kMaxSamples) {
      return InvalidBatch(view, absl::StrCat("sample_count ", view.sample_count, " must be in [0, ",
                                             kMaxSamples, "]"));
    }
    if (static_cast<int64_t>(view.spans.size()) != view.slots) {
      return InvalidBatch(
          view, absl::StrCat(view.spans.size(), " span lists for ", view.slots, " slots"));
    }
    SampleMap map;
    std::vector<SampleSpan> all;
    for (int slot = 0; slot < view.slots; ++slot) {
      RETURN_IF_ERROR(map.AddSlot(view, slot));
      for (const SampleSpan& span : view.spans[slot]) {
        if (span.count > 0) all.push_back(span);
      }
    }
    std::sort(all.begin(), all.end(), [](const SampleSpan& a, const SampleSpan& b) {
      return a.sample_begin < b.sample_begin;
    });
    for (size_t i = 1; i < all.size(); ++i) {
      if (all[i].sample_begin - all[i - 1].sample_begin < all[i - 1].count) {
        return InvalidBatch(view,
                            absl::StrCat("two spans hold canonical sample ", all[i].sample_begin));
      }
    }
    return map;
  }

  // For each sample id of the slot its canonical sample, -1 where no span holds it.
  absl::Span<const int32_t> slot(int s) const {
    return absl::MakeSpan(canonical_).subspan(slot_begin_[s], slot_begin_[s + 1] - slot_begin_[s]);
  }

 private:
  absl::Status AddSlot(const StackBatchView& view, int slot) {
    int64_t end = 0;
    for (const SampleSpan& span : view.spans[slot]) {
      if (span.count < 0 || span.slot_begin < end || span.slot_begin > view.sample_count ||
          span.sample_begin < 0 || span.count > view.sample_count ||
          span.sample_begin > view.sample_count - span.count) {
        return InvalidBatch(
            view,
            absl::StrCat("slot ", slot, ": span (slot_begin ", span.slot_begin, ", sample_begin ",
                         span.sample_begin, ", count ", span.count, ") must lie in [0, ",
                         view.sample_count, ") and follow slot sample ", end));
      }
      if (span.count == 0) continue;
      const int64_t total = int64_t(slot_begin_.back()) + span.slot_begin + span.count;
      if (total > kMaxSampleIds) {
        return InvalidBatch(view, absl::StrCat("slots 0 to ", slot, ": ", total,
                                               " sample ids must be at most ", kMaxSampleIds));
      }
      canonical_.resize(slot_begin_.back() + span.slot_begin, -1);
      canonical_.resize(slot_begin_.back() + span.slot_begin + span.count);
      std::iota(canonical_.end() - span.count, canonical_.end(), span.sample_begin);
      end = int64_t{span.slot_begin} + span.count;
    }
    slot_begin_.push_back(canonical_.size());
    return absl::OkStatus();
  }

  std::vector<int32_t> canonical_;
  std::vector<size_t> slot_begin_ = {0};
};

absl::Status CheckFeatureSamples(const StackBatchView& view) {
  int64_t sum = 0;
  for (size_t f = 0; f < view.feature_samples.size(); ++f) {
    const int64_t samples = view.feature_samples[f];
    if (samples < 0 || samples > view.sample_count - sum) {
      return InvalidBatch(view, absl::StrCat("feature_samples[", f, "] = ", samples,
                                             " must be in [0, ", view.sample_count - sum, "]"));
    }
    sum += samples;
  }
  if (sum == view.sample_count) return absl::OkStatus();
  return InvalidBatch(view, absl::StrCat("feature_samples: their sum ", sum,
                                         " must be sample_count ", view.sample_count));
}

bool Finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000) != 0x7f800000; }

// Names the first bad entry of a run that is known to have one.
absl::Status DescribeBadEntry(const StackBatchView& view, int slot, int partition, int minibatch,
                              const Run& run, absl::Span<const int32_t> canonical, int64_t rows) {
  for (int64_t i = 0; i < run.size; ++i) {
    const std::string where =
        absl::StrCat("slot ", slot, ", mini-batch ", minibatch, ", partition ", partition,
                     " of the shard, entry ", i, ": ");
    if (run.rows[i] < 0 || run.rows[i] >= rows) {
      return InvalidBatch(
          view, absl::StrCat(where, "embedding id ", run.rows[i], " must be in [0, ", rows, ")"));
    }
    if (static_cast<size_t>(static_cast<uint32_t>(run.samples[i])) >= canonical.size() ||
        canonical[run.samples[i]] < 0) {
      return InvalidBatch(
          view, absl::StrCat(where, "sample id ", run.samples[i], " is in no span of its slot"));
    }
    if (!Finite(run.gains[i])) {
      return InvalidBatch(view, absl::StrCat(where, "gain ", run.gains[i], " must be finite"));
    }
  }
  return absl::InternalError("bad entry not found");
}

struct SlotCheck {
  absl::Status status;
  bool ascending = true;  // rows never fall inside a partition, over all mini-batches
  bool touched = true;    // as StackEntries.rows_touched
};

// Whether all rows of a run have been touched, for all that is known.
bool RunTouched(const StackShape& shape, int k, const Run& run) {
  if (shape.store == nullptr) return false;
  if (shape.store->Complete()) return true;
  return shape.store->AllTouched(k * shape.rows_per_partition,
                                 absl::MakeConstSpan(run.rows, run.size));
}

// Counts the entries of a run per canonical sample. False: one is of no sample of the slot.
bool CountSamples(const Run run, absl::Span<const int32_t> canonical, uint32_t* counts) {
  const int32_t* const canonical_of = canonical.data();
  const uint32_t samples = static_cast<uint32_t>(canonical.size());
  for (int64_t i = 0; i < run.size; ++i) {
    const uint32_t sample = static_cast<uint32_t>(run.samples[i]);
    if (sample >= samples || canonical_of[sample] < 0) return false;
    ++counts[canonical_of[sample]];
  }
  return true;
}

// Whether a run has rows below `rows` and finite gains. `falls`: one is below the row before it.
bool CheckRows(const Run run, uint32_t rows, bool& falls) {
  uint32_t bad = 0, fallen = 0;
  for (int64_t i = 0; i < run.size; ++i) {
    bad |= (static_cast<uint32_t>(run.rows[i]) >= rows) | !Finite(run.gains[i]);
  }
  for (int64_t i = 1; i < run.size; ++i) fallen |= run.rows[i] < run.rows[i - 1];
  falls |= fallen != 0;
  return bad == 0;
}

// First pass over a slot: checks the entries, counts them per canonical sample, and the groups of
// each run.
SlotCheck CountSlot(const StackBatchView& view, const RunTable& runs,
                    absl::Span<const int32_t> canonical, const StackShape& shape, int slot,
                    uint32_t* counts, int64_t* groups) {
  SlotCheck check;
  const uint32_t rows =
      static_cast<uint32_t>(std::min<int64_t>(shape.rows_per_partition, INT32_MAX));
  bool falls = false;
  for (int k = 0; k < shape.partitions; ++k) {
    int32_t last = 0;
    for (int m = 0; m < view.minibatches; ++m) {
      const Run& run = runs.at(slot, k, m);
      if (!CountSamples(run, canonical, counts) || !CheckRows(run, rows, falls)) {
        check.status = DescribeBadEntry(view, slot, k, m, run, canonical, shape.rows_per_partition);
        return check;
      }
      groups[runs.index(slot, k, m)] = CountGroups(run);
      check.touched = check.touched && RunTouched(shape, k, run);
      if (run.size == 0) continue;
      falls |= run.rows[0] < last;
      last = run.rows[run.size - 1];
    }
  }
  check.ascending = !falls;
  return check;
}

// Second pass: puts every entry of a slot into its sample's place. `next[sample]` is the next free
// place. Entries name rows by rank if there are ranks.
void PlaceSlot(const RunTable& runs, absl::Span<const int32_t> canonical, const StackShape& shape,
               int slot, const DistinctRows* ranked, uint32_t* next, Entry* entries) {
  const int32_t* const canonical_of = canonical.data();
  for (int k = 0; k < shape.partitions; ++k) {
    const uint32_t base = static_cast<uint32_t>(k * shape.rows_per_partition);
    for (int m = 0; m < runs.minibatches(); ++m) {
      const Run run = runs.at(slot, k, m);
      if (ranked == nullptr) {
        for (int64_t i = 0; i < run.size; ++i) {
          entries[next[canonical_of[run.samples[i]]]++] = {
              base + static_cast<uint32_t>(run.rows[i]), run.gains[i]};
        }
        continue;
      }
      const uint32_t* rank = ranked->ranks.data() + ranked->first_group[runs.index(slot, k, m)];
      for (int64_t i = 0; i < run.size; ++i) {
        rank += i > 0 && run.rows[i] != run.rows[i - 1];
        entries[next[canonical_of[run.samples[i]]]++] = {*rank, run.gains[i]};
      }
    }
  }
}

// Turns counts per canonical sample into places; lists the samples that have any.
void MakeOffsets(PooledArray<uint32_t>& counts, BufferPool& pool, StackEntries& result) {
  const size_t present =
      counts.size() - std::count(counts.data(), counts.data() + counts.size(), 0u);
  result.samples = PooledArray<int32_t>(pool, present);
  result.offsets = PooledArray<uint32_t>(pool, present + 1);
  uint32_t sum = 0;
  // Without a branch on the count: which samples have entries here is as good as random. Those
  // after the last one that has any are not looked at again.
  for (size_t sample = 0, i = 0; i < present; ++sample) {
    const uint32_t count = counts[sample];
    counts[sample] = sum;
    result.samples[i] = static_cast<int32_t>(sample);
    result.offsets[i] = sum;
    i += count != 0;
    sum += count;
  }
  result.offsets[present] = sum;
}

// Finds each feature's samples among those that have an entry.
void MakeFeatureOffsets(absl::Span<const int64_t> feature_samples, StackEntries& result) {
  const int32_t* const begin = result.samples.data();
  const int32_t* const end = begin + result.samples.size();
  const int32_t* next = begin;
  int64_t first_sample = 0;
  result.feature_offsets.push_back(0);
  for (const int64_t samples : feature_samples) {
    first_sample += samples;
    next = std::lower_bound(next, end, first_sample);
    result.feature_offsets.push_back(static_cast<uint32_t>(next - begin));
  }
}

// Mini-batches cut the vocabulary by hash, so that rows of one sample may come out of order.
void SortRowsOfSamples(StackEntries& stack) {
  const auto by_row = [](const Entry& a, const Entry& b) { return a.row < b.row; };
  Entry* entries = stack.entries.data();
  for (size_t i = 0; i < stack.samples.size(); ++i) {
    Entry* begin = entries + stack.offsets[i];
    Entry* end = entries + stack.offsets[i + 1];
    if (!std::is_sorted(begin, end, by_row)) std::stable_sort(begin, end, by_row);
  }
}

// A batch whose numbers have been checked and counted.
struct CountedBatch {
  RunTable runs;
  SampleMap map;
  std::vector<int64_t> groups;   // of each run
  PooledArray<uint32_t> counts;  // of each canonical sample
  bool ascending = true;         // as in SlotCheck
  bool touched = true;           // as StackEntries.rows_touched
};

absl::StatusOr<CountedBatch> CheckAndCount(const StackBatchView& view, const StackShape& shape,
                                           BufferPool& pool, CpuPool& cpu) {
  ASSIGN_OR_RETURN(RunTable runs, RunTable::Make(view, shape.partitions));
  if (runs.entries() > std::numeric_limits<int32_t>::max()) {
    return InvalidBatch(view, absl::StrCat(runs.entries(), " entries must be at most 2^31 - 1"));
  }
  ASSIGN_OR_RETURN(SampleMap map, SampleMap::Make(view));
  RETURN_IF_ERROR(CheckFeatureSamples(view));
  CountedBatch batch{
      std::move(runs), std::move(map), {}, PooledArray<uint32_t>(pool, view.sample_count)};
  batch.groups.resize(batch.runs.size());
  std::fill_n(batch.counts.data(), batch.counts.size(), 0u);
  // A sample lies in one slot, so slots can be worked on in parallel.
  std::vector<SlotCheck> checks(view.slots);
  cpu.ParallelFor(view.slots, [&](int slot) {
    checks[slot] = CountSlot(view, batch.runs, batch.map.slot(slot), shape, slot,
                             batch.counts.data(), batch.groups.data());
  });
  for (const SlotCheck& check : checks) {
    if (!check.status.ok()) return check.status;
    batch.ascending &= check.ascending;
    batch.touched &= check.touched;
  }
  return batch;
}

// The entries by sample. Uses up the counts.
StackEntries PlaceEntries(const StackBatchView& view, const StackShape& shape,
                          const DistinctRows* ranked, CountedBatch& batch, BufferPool& pool,
                          CpuPool& cpu) {
  StackEntries result;
  result.stack = view.stack;
  result.single_rows = view.single_rows;
  result.rows_touched = batch.touched;
  result.entry_count = batch.runs.entries();
  result.partition_entries = batch.runs.partition_entries();
  MakeOffsets(batch.counts, pool, result);
  MakeFeatureOffsets(view.feature_samples, result);
  result.entries = PooledArray<Entry>(pool, result.entry_count + kEntryPadding);
  std::fill_n(result.entries.data() + result.entry_count, kEntryPadding, Entry{0, 0});
  cpu.ParallelFor(view.slots, [&](int slot) {
    PlaceSlot(batch.runs, batch.map.slot(slot), shape, slot, ranked, batch.counts.data(),
              result.entries.data());
  });
  if (!batch.ascending) SortRowsOfSamples(result);
  return result;
}

// The runs are in the order that an update needs, each for itself. Puts places instead of counts.
void OrderTouches(CountedBatch& batch, BufferPool& pool, CpuPool& cpu, StackEntries& result) {
  PooledArray<uint32_t>& place = batch.counts;
  for (size_t i = 0; i < result.samples.size(); ++i) {
    place[result.samples[i]] = static_cast<uint32_t>(i);
  }
  std::vector<absl::Span<const int32_t>> canonical;
  for (int slot = 0; slot < batch.runs.slots(); ++slot) canonical.push_back(batch.map.slot(slot));
  result.touches = MergeTouches(batch.runs, canonical, place, pool, cpu);
}

// Chooses what a gather of `entries` returns, and lists the distinct rows if it is those.
void ChooseResult(const StackShape& shape, const CountedBatch& batch, BufferPool& pool,
                  CpuPool& cpu, StackEntries& entries) {
  if (shape.result_mode == v1::PARTIAL_SUMS) return;
  const bool forced = shape.result_mode == v1::UNIQUE_ROWS;
  const int64_t sums_bytes = static_cast<int64_t>(entries.samples.size()) * shape.sum_bytes;
  const auto too_many = [&](int64_t rows) {
    return !forced && rows * shape.row_bytes >= sums_bytes;
  };
  // Counting exactly takes a merge over the slots.
  if (too_many(LeastDistinctRows(batch.runs, batch.groups))) return;
  DistinctRows distinct =
      FindDistinctRows(batch.runs, batch.groups, shape.rows_per_partition, pool, cpu);
  if (too_many(static_cast<int64_t>(distinct.rows.size()))) return;
  entries.unique_rows = true;
  entries.rounded = shape.rounded;
  entries.distinct_rows = std::move(distinct.rows);
}

}  // namespace

absl::StatusOr<RunTable> RunTable::Make(const StackBatchView& view, int partitions) {
  RunTable table(view.slots, partitions, view.minibatches);
  if (view.slots < 1 || view.minibatches < 1 || view.slots > kMostSlots ||
      static_cast<int64_t>(view.segments.size()) != int64_t{view.slots} * view.minibatches) {
    return InvalidBatch(view, absl::StrCat(view.segments.size(), " segments for ", view.slots,
                                           " slots x ", view.minibatches, " mini-batches"));
  }
  table.runs_.resize(view.segments.size() * partitions);
  for (size_t s = 0; s < view.segments.size(); ++s) {
    RETURN_IF_ERROR(table.AddSegment(view, s));
  }
  return table;
}

absl::Status RunTable::AddSegment(const StackBatchView& view, size_t s) {
  const CsrSegmentView& segment = view.segments[s];
  const int64_t cells = segment.embedding_ids.size();
  if (segment.base < 0 || static_cast<int64_t>(segment.row_ends.size()) != partitions_ ||
      static_cast<int64_t>(segment.sample_ids.size()) != cells ||
      static_cast<int64_t>(segment.gains.size()) != cells) {
    return InvalidBatch(
        view, absl::StrCat("segment ", s, ": base ", segment.base, " must be >= 0, row_ends ",
                           segment.row_ends.size(), " must be ", partitions_,
                           ", and embedding_ids, sample_ids, gains of one size, not ", cells, ", ",
                           segment.sample_ids.size(), ", ", segment.gains.size()));
  }
  int64_t begin = segment.base;
  for (int k = 0; k < partitions_; ++k) {
    const int64_t end = segment.row_ends[k];
    if (end < begin || end - segment.base > cells) {
      return InvalidBatch(
          view, absl::StrCat("segment ", s, ": row_ends[", k, "] = ", end, " must be in [", begin,
                             ", ", segment.base + cells, "]"));
    }
    const int64_t offset = begin - segment.base;
    const int slot = static_cast<int>(s) / minibatches_;
    const int minibatch = static_cast<int>(s) % minibatches_;
    runs_[index(slot, k, minibatch)] =
        begin == end
            ? Run{nullptr, nullptr, nullptr, 0}
            : Run{segment.embedding_ids.data() + offset, segment.sample_ids.data() + offset,
                  segment.gains.data() + offset, end - begin};
    partition_entries_[k] += end - begin;
    begin = AlignCsr(end);
  }
  return absl::OkStatus();
}

absl::StatusOr<StackEntries> ArrangeEntries(const StackBatchView& view, const StackShape& shape,
                                            BufferPool& pool, CpuPool& cpu) {
  ASSIGN_OR_RETURN(CountedBatch batch, CheckAndCount(view, shape, pool, cpu));
  StackEntries result = PlaceEntries(view, shape, nullptr, batch, pool, cpu);
  for (int k = 1; k <= shape.partitions; ++k) {
    result.partition_ends.push_back(static_cast<uint64_t>(k) * shape.rows_per_partition);
  }
  ChooseResult(shape, batch, pool, cpu, result);
  // Whoever gets unique rows will most likely sum their gradients. A few touches are soon sorted.
  const bool few = result.entry_count < kFewTouches * shape.partitions;
  if (shape.orders_touches && !result.unique_rows && !few) OrderTouches(batch, pool, cpu, result);
  return result;
}

absl::StatusOr<StackEntries> ArrangeForUniqueRows(const StackBatchView& view,
                                                  const StackShape& shape, BufferPool& pool,
                                                  CpuPool& cpu) {
  ASSIGN_OR_RETURN(CountedBatch batch, CheckAndCount(view, shape, pool, cpu));
  DistinctRows distinct =
      FindDistinctRows(batch.runs, batch.groups, shape.rows_per_partition, pool, cpu);
  StackEntries result = PlaceEntries(view, shape, &distinct, batch, pool, cpu);
  result.partition_ends = std::move(distinct.partition_ends);
  return result;
}

absl::Status CheckEntries(const StackEntries& entries, const StackShape& shape) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("batch: stack ", entries.stack, ": ", what));
  };
  const auto samples = static_cast<int64_t>(entries.samples.size());
  const auto partitions = static_cast<size_t>(shape.partitions);
  if (entries.entry_count < 0 || static_cast<int64_t>(entries.offsets.size()) != samples + 1 ||
      static_cast<int64_t>(entries.entries.size()) != entries.entry_count + kEntryPadding) {
    return bad("the lengths of the arrays do not match");
  }
  if (entries.partition_entries.size() != partitions) {
    return bad(absl::StrCat("it is arranged for ", entries.partition_entries.size(),
                            " partitions; must be ", partitions));
  }
  const uint64_t rows = shape.partitions * static_cast<uint64_t>(shape.rows_per_partition);
  std::vector<int64_t> counts(partitions);
  if (entries.offsets[0] != 0 || entries.offsets[samples] != entries.entry_count) {
    return bad("offsets do not begin at 0 and end at the number of entries");
  }
  for (int64_t s = 0; s < samples; ++s) {
    if (entries.offsets[s] >= entries.offsets[s + 1] ||
        (s > 0 && entries.samples[s - 1] >= entries.samples[s])) {
      return bad("samples are not in ascending order, or one has no entry");
    }
  }
  for (int64_t i = 0; i < entries.entry_count; ++i) {
    const Entry& entry = entries.entries[i];
    if (entry.row >= rows)
      return bad(absl::StrCat("row ", entry.row, " must be in [0, ", rows, ")"));
    ++counts[entry.row / shape.rows_per_partition];
  }
  if (counts != entries.partition_entries) return bad("partition_entries do not match the rows");
  const auto& features = entries.feature_offsets;
  if (features.empty() || features.front() != 0 || features.back() != samples ||
      !std::is_sorted(features.begin(), features.end())) {
    return bad("feature_offsets do not divide the samples");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Model>> Batch::model() const {
  std::shared_ptr<Model> model = model_.lock();
  if (model == nullptr || model->dropped()) {
    return absl::NotFoundError("the model of this batch was dropped");
  }
  return model;
}

int64_t Batch::bytes() const {
  int64_t bytes = sizeof(Batch);
  for (const StackEntries& stack : stacks_) bytes += sizeof(StackEntries) + stack.bytes();
  return bytes;
}

// ---- Row by row

namespace {

constexpr int64_t kSmall = 256;

// Touches of samples [begin, end) of a part that lie in the partition whose first row is given, in
// the order of the entries. Returns the end of the touches, beyond which one more may be written.
Touch* Extract(const StackEntries& part, uint32_t begin, uint32_t end, uint32_t first_sample,
               uint64_t first_row, uint64_t rows_per_partition, Touch* out) {
  const Entry* entries = part.entries.data();
  for (uint32_t i = begin; i < end; ++i) {
    for (uint32_t j = part.offsets[i]; j < part.offsets[i + 1]; ++j) {
      const uint64_t row = entries[j].row - first_row;  // wraps for rows of earlier partitions
      // Without a branch on the partition: that is as good as random.
      *out = {static_cast<uint32_t>(row), first_sample + i, entries[j].gain};
      out += row < rows_per_partition ? 1 : 0;
    }
  }
  return out;
}

// Touches whose rows lie between those of the stretches before and behind: of a table, if features
// come in the order of their tables. Sorted alone, they fit into a cache.
struct Stretch {
  int64_t begin, end;
  uint32_t first_row, last_row;
};

// Adds the touches [begin, end), and joins them to the stretches that have rows above their first.
void AddStretch(const Touch* touches, int64_t begin, int64_t end, std::vector<Stretch>& stretches) {
  if (begin == end) return;
  Stretch next{begin, end, touches[begin].row, touches[begin].row};
  for (int64_t i = begin; i < end; ++i) {
    next.first_row = std::min(next.first_row, touches[i].row);
    next.last_row = std::max(next.last_row, touches[i].row);
  }
  while (!stretches.empty() && stretches.back().last_row > next.first_row) {
    const Stretch& before = stretches.back();
    next = {before.begin, end, std::min(before.first_row, next.first_row),
            std::max(before.last_row, next.last_row)};
    stretches.pop_back();
  }
  stretches.push_back(next);
}

// Touches of the partition in canonical sample order: what a stable sort by row needs.
std::vector<Stretch> ExtractAll(absl::Span<const StackEntries* const> parts, int k,
                                int64_t rows_per_partition, Touch* touches) {
  const uint64_t first_row = static_cast<uint64_t>(k) * rows_per_partition;
  const size_t features = parts[0]->feature_offsets.size() - 1;
  std::vector<Stretch> stretches;
  Touch* out = touches;
  for (size_t f = 0; f < features; ++f) {
    const int64_t begin = out - touches;
    uint32_t first_sample = 0;
    for (const StackEntries* part : parts) {
      out = Extract(*part, part->feature_offsets[f], part->feature_offsets[f + 1], first_sample,
                    first_row, rows_per_partition, out);
      first_sample += static_cast<uint32_t>(part->samples.size());
    }
    AddStretch(touches, begin, out - touches, stretches);
  }
  return stretches;
}

// --- Merging.

uint64_t OrderOf(const Touch& touch) { return uint64_t{touch.row} << 32 | touch.sample; }

// The touches of a run; null: they are not in order.
Touch* ConvertRun(const Run run, absl::Span<const int32_t> canonical,
                  absl::Span<const uint32_t> place, Touch* out) {
  const int32_t* const canonical_of = canonical.data();
  const uint32_t* const place_of = place.data();
  uint64_t before = 0;
  bool falls = false;
  for (int64_t i = 0; i < run.size; ++i) {
    *out = {static_cast<uint32_t>(run.rows[i]), place_of[canonical_of[run.samples[i]]],
            run.gains[i]};
    falls |= OrderOf(*out) < before;
    before = OrderOf(*out++);
  }
  return falls ? nullptr : out;
}

// Merges [a, middle) and [middle, end). Of two that are equal, the one of the first comes first.
void MergeTwo(const Touch* a, const Touch* middle, const Touch* end, Touch* out) {
  const Touch* b = middle;
  // Without a branch on which is next: that is as good as random.
  while (a != middle && b != end) {
    const bool second = OrderOf(*b) < OrderOf(*a);
    *out++ = second ? *b : *a;
    a += second ? 0 : 1;
    b += second ? 1 : 0;
  }
  out = std::copy(a, middle, out);
  std::copy(b, end, out);
}

// Merges the ascending stretches of `items` that end at `ends` by merge(from, middle, end, to),
// neighbour with neighbour, until there is one. Cheaper than sorting: they are few.
template <typename T, typename Merge>
void MergeStretches(std::vector<int64_t>& ends, PooledArray<T>& items, BufferPool& pool,
                    const Merge& merge) {
  if (ends.size() < 2) return;
  PooledArray<T> merged(pool, items.size());
  while (ends.size() > 1) {
    const T* const from = items.data();
    int64_t begin = 0;
    size_t kept = 0;
    for (size_t i = 0; i < ends.size(); i += 2) {
      const int64_t end = ends[std::min(i + 1, ends.size() - 1)];
      merge(from + begin, from + ends[i], from + end, merged.data() + begin);
      ends[kept++] = begin = end;
    }
    ends.resize(kept);
    std::swap(items, merged);
  }
}

// The touches of the k-th partition; none if a run is not in order.
std::optional<PooledArray<Touch>> MergePartition(
    const RunTable& runs, absl::Span<const absl::Span<const int32_t>> canonical,
    absl::Span<const uint32_t> place, int k, BufferPool& pool) {
  const int64_t n = runs.partition_entries()[k];
  if (n == 0) return PooledArray<Touch>();
  PooledArray<Touch> touches(pool, n + kTouchPadding);
  Touch* end = touches.data();
  std::vector<int64_t> ends;  // of the slots
  for (int slot = 0; slot < runs.slots(); ++slot) {
    end = ConvertRun(runs.at(slot, k, 0), canonical[slot], place, end);
    if (end == nullptr) return std::nullopt;
    ends.push_back(end - touches.data());
  }
  MergeStretches(ends, touches, pool, MergeTwo);
  std::fill_n(touches.data() + n, kTouchPadding, Touch{0, 0, 0});
  return touches;
}

// --- Distinct rows.

// A row above the group that named it, so that keys sort by row.
uint64_t Key(uint32_t row, int64_t group) { return uint64_t{row} << 32 | group; }
uint32_t RowOf(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
uint32_t GroupOf(uint64_t key) { return static_cast<uint32_t>(key); }

// The groups of one partition by row.
struct PartitionGroups {
  PooledArray<uint64_t> keys;
  int64_t distinct = 0;
};

// Of the k-th partition, which has `total` groups from `first_group` on.
PartitionGroups OrderGroups(const RunTable& runs, int k, int64_t first_group, int64_t total,
                            BufferPool& pool) {
  PartitionGroups result;
  // Runs are mostly ascending: slot by slot by row, or bucket by bucket where the batch is cut.
  std::vector<int64_t> stretch_ends;
  result.keys = PooledArray<uint64_t>(pool, total);
  uint64_t* const keys = result.keys.data();
  int64_t n = 0;
  for (int slot = 0; slot < runs.slots(); ++slot) {
    for (int m = 0; m < runs.minibatches(); ++m) {
      const Run& run = runs.at(slot, k, m);
      // Without a branch on whether a group begins: that is as good as random. What is written for
      // the others is written over, and the last group of all ends the loop.
      for (int64_t i = 0; i < run.size && n < total; ++i) {
        const bool begins = i == 0 || run.rows[i] != run.rows[i - 1];
        keys[n] = Key(static_cast<uint32_t>(run.rows[i]), first_group + n);
        if (begins && n > 0 && keys[n] < keys[n - 1]) stretch_ends.push_back(n);
        n += begins;
      }
    }
  }
  if (n > 0) stretch_ends.push_back(n);
  MergeStretches(stretch_ends, result.keys, pool,
                 [](const uint64_t* a, const uint64_t* middle, const uint64_t* end, uint64_t* to) {
                   std::merge(a, middle, middle, end, to);
                 });
  const uint64_t* const ordered = result.keys.data();
  for (int64_t i = 0; i < n; ++i) {
    result.distinct += i == 0 || RowOf(ordered[i]) != RowOf(ordered[i - 1]);
  }
  return result;
}

}  // namespace

PooledArray<Touch> OrderByRow(absl::Span<const StackEntries* const> parts, int k,
                              int64_t rows_per_partition, BufferPool& pool) {
  int64_t n = 0;
  for (const StackEntries* part : parts) n += part->partition_entries[k];
  PooledArray<Touch> touches(pool, n + kTouchPadding);
  const auto by_row = [](const Touch& a, const Touch& b) { return a.row < b.row; };
  PooledArray<Touch> scratch;
  for (const Stretch& stretch : ExtractAll(parts, k, rows_per_partition, touches.data())) {
    Touch* const begin = touches.data() + stretch.begin;
    Touch* const end = touches.data() + stretch.end;
    if (std::is_sorted(begin, end, by_row)) continue;  // as the sums of rows are
    if (end - begin <= kSmall) {
      std::stable_sort(begin, end, by_row);
      continue;
    }
    if (scratch.size() < static_cast<size_t>(end - begin)) {
      scratch = PooledArray<Touch>(pool, end - begin);
    }
    RadixSort(begin, scratch.data(), end - begin,
              std::bit_width(stretch.last_row - stretch.first_row),
              [first = stretch.first_row](const Touch& touch, int shift) {
                return (touch.row - first) >> shift;
              });
  }
  std::fill_n(touches.data() + n, kTouchPadding, Touch{0, 0, 0});
  return touches;
}

std::vector<PooledArray<Touch>> MergeTouches(const RunTable& runs,
                                             absl::Span<const absl::Span<const int32_t>> canonical,
                                             absl::Span<const uint32_t> place, BufferPool& pool,
                                             CpuPool& cpu) {
  std::vector<PooledArray<Touch>> merged;
  if (runs.minibatches() > 1) return merged;
  std::vector<std::optional<PooledArray<Touch>>> partitions(runs.partitions());
  cpu.ParallelFor(runs.partitions(),
                  [&](int k) { partitions[k] = MergePartition(runs, canonical, place, k, pool); });
  for (std::optional<PooledArray<Touch>>& partition : partitions) {
    if (!partition.has_value()) return {};
    merged.push_back(*std::move(partition));
  }
  return merged;
}

int64_t CountGroups(const Run& run) {
  int64_t groups = run.size > 0;
  for (int64_t i = 1; i < run.size; ++i) groups += run.rows[i] != run.rows[i - 1];
  return groups;
}

DistinctRows FindDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups,
                              int64_t rows_per_partition, BufferPool& pool, CpuPool& cpu) {
  DistinctRows result;
  result.first_group.resize(runs.size());
  std::vector<int64_t> partition_first = {0};
  int64_t total = 0;
  for (int k = 0; k < runs.partitions(); ++k) {
    for (int slot = 0; slot < runs.slots(); ++slot) {
      for (int m = 0; m < runs.minibatches(); ++m) {
        const int64_t run = runs.index(slot, k, m);
        result.first_group[run] = total;
        total += groups[run];
      }
    }
    partition_first.push_back(total);
  }
  std::vector<PartitionGroups> ordered(runs.partitions());
  cpu.ParallelFor(runs.partitions(), [&](int k) {
    ordered[k] =
        OrderGroups(runs, k, partition_first[k], partition_first[k + 1] - partition_first[k], pool);
  });
  uint64_t distinct = 0;
  for (const PartitionGroups& partition : ordered) {
    distinct += partition.distinct;
    result.partition_ends.push_back(distinct);
  }
  result.rows = PooledArray<uint32_t>(pool, distinct);
  result.ranks = PooledArray<uint32_t>(pool, total);
  cpu.ParallelFor(runs.partitions(), [&](int k) {
    const PooledArray<uint64_t>& keys = ordered[k].keys;
    const uint32_t base = static_cast<uint32_t>(k * rows_per_partition);
    int64_t next = static_cast<int64_t>(result.partition_ends[k]) - ordered[k].distinct;
    for (size_t i = 0; i < keys.size(); ++i) {
      next += i == 0 || RowOf(keys[i]) != RowOf(keys[i - 1]);
      result.rows[next - 1] = base + RowOf(keys[i]);
      result.ranks[GroupOf(keys[i])] = static_cast<uint32_t>(next - 1);
    }
  });
  return result;
}

int64_t LeastDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups) {
  int64_t sum = 0;
  for (int k = 0; k < runs.partitions(); ++k) {
    int64_t fullest = 0;
    for (int slot = 0; slot < runs.slots(); ++slot) {
      int64_t rows = 0;
      for (int m = 0; m < runs.minibatches(); ++m) rows += groups[runs.index(slot, k, m)];
      fullest = std::max(fullest, rows);
    }
    sum += fullest;
  }
  return sum;
}

}  // namespace emberd::shard
