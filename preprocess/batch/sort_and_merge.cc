#include "preprocess/batch/sort_and_merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/floats.h"
#include "base/radix_sort.h"
#include "base/status.h"

namespace emberd::preprocess {
namespace {

template <typename... Args>
absl::Status Invalid(absl::string_view feature, const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat("feature '", feature, "': ", args...));
}

int64_t SizeOf(const IntSpan& span) {
  return std::visit([](const auto& s) { return static_cast<int64_t>(s.size()); }, span);
}

absl::Status CheckSampleCount(absl::string_view feature, int64_t samples) {
  if (samples >= 0 && samples <= kMaxStackSamples) return absl::OkStatus();
  return Invalid(feature, "sample_count is ", samples, "; allowed: [0, ", kMaxStackSamples, "]");
}

template <typename Id>
absl::Status CheckIds(absl::string_view feature, absl::Span<const Id> ids,
                      int64_t vocabulary_size) {
  using Unsigned = std::make_unsigned_t<Id>;
  // An id type that cannot reach the vocabulary's size only has to be checked for its sign.
  const uint64_t bound = std::min<uint64_t>(vocabulary_size, uint64_t{1} << (8 * sizeof(Id) - 1));
  Unsigned any_bad = 0;
  for (Id id : ids) any_bad |= static_cast<Unsigned>(id) >= static_cast<Unsigned>(bound);
  if (!any_bad) return absl::OkStatus();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && static_cast<int64_t>(ids[i]) < vocabulary_size) continue;
    return absl::OutOfRangeError(absl::StrCat("feature '", feature, "': id at position ", i, " is ",
                                              ids[i], "; allowed: [0, ", vocabulary_size, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckIds(absl::string_view feature, const IntSpan& ids, int64_t vocabulary_size) {
  return std::visit([&](const auto& span) { return CheckIds(feature, span, vocabulary_size); },
                    ids);
}

absl::Status CheckStructure(absl::string_view feature, const DenseInput& dense) {
  RETURN_IF_ERROR(CheckSampleCount(feature, dense.sample_count));
  const int64_t n = SizeOf(dense.ids);
  if (dense.ids_per_sample < 0) {
    return Invalid(feature, "ids_per_sample is ", dense.ids_per_sample, "; allowed: >= 0");
  }
  // Compared by division, because the product may overflow.
  const bool fits =
      dense.sample_count == 0 || dense.ids_per_sample == 0
          ? n == 0
          : n % dense.sample_count == 0 && n / dense.sample_count == dense.ids_per_sample;
  if (fits) return absl::OkStatus();
  return Invalid(feature, "dense input has ", n, " ids; allowed: ", dense.sample_count,
                 " samples * ", dense.ids_per_sample, " ids");
}

absl::Status CheckStructure(absl::string_view feature, const RaggedInput& ragged) {
  const int64_t values = SizeOf(ragged.values);
  return std::visit(
      [&](const auto& splits) -> absl::Status {
        if (splits.empty())
          return Invalid(feature,
                         "row_splits is empty; it needs one more value than there are samples");
        const int64_t samples = static_cast<int64_t>(splits.size()) - 1;
        RETURN_IF_ERROR(CheckSampleCount(feature, samples));
        if (splits[0] != 0)
          return Invalid(feature, "row_splits at position 0 is ", splits[0], "; allowed: 0");
        for (size_t i = 1; i < splits.size(); ++i) {
          if (splits[i] < splits[i - 1]) {
            return Invalid(feature, "row_splits at position ", i, " is ", splits[i],
                           "; allowed: >= ", splits[i - 1], ", the value before it");
          }
        }
        if (static_cast<int64_t>(splits.back()) != values) {
          return Invalid(feature, "row_splits at position ", samples, " is ", splits.back(),
                         "; allowed: ", values, ", the number of ids");
        }
        return absl::OkStatus();
      },
      ragged.row_splits);
}

absl::Status CheckStructure(absl::string_view feature, const SparseInput& sparse) {
  RETURN_IF_ERROR(CheckSampleCount(feature, sparse.sample_count));
  const int64_t values = SizeOf(sparse.values);
  const int64_t numbers = SizeOf(sparse.indices);
  if (numbers % 2 != 0 || numbers / 2 != values) {
    return Invalid(feature, "indices holds ", numbers, " numbers; allowed: ", values,
                   " pairs, one per id");
  }
  return std::visit(
      [&](const auto& indices) -> absl::Status {
        int64_t before = 0;
        for (size_t i = 0; i < indices.size(); i += 2) {
          const int64_t sample = indices[i];
          if (sample < 0 || sample >= sparse.sample_count) {
            return absl::OutOfRangeError(
                absl::StrCat("feature '", feature, "': indices at position ", i / 2, " has sample ",
                             sample, "; allowed: [0, ", sparse.sample_count, ")"));
          }
          if (sample < before) {
            return Invalid(feature, "indices at position ", i / 2, " has sample ", sample,
                           "; allowed: >= ", before, ", the sample before it");
          }
          if (indices[i + 1] < 0) {
            return Invalid(feature, "indices at position ", i / 2, " has column ", indices[i + 1],
                           "; allowed: >= 0");
          }
          before = sample;
        }
        return absl::OkStatus();
      },
      sparse.indices);
}

absl::Status CheckWeights(absl::string_view feature, const FeatureInput& input, int64_t ids) {
  if (!input.has_weights) return absl::OkStatus();
  const auto weights = static_cast<int64_t>(input.weights.size());
  if (weights != ids && weights != 1) {
    return Invalid(feature, "there are ", weights, " weights; allowed: ", ids,
                   ", one per id, or a single one");
  }
  for (int64_t i = 0; i < weights; ++i) {
    if (std::isfinite(input.weights[i])) continue;
    return Invalid(feature, "weight at position ", i, " is ", input.weights[i],
                   "; allowed: finite numbers");
  }
  return absl::OkStatus();
}

const IntSpan& IdsOf(const FeatureInput& input) {
  if (const auto* dense = std::get_if<DenseInput>(&input.ids)) return dense->ids;
  if (const auto* sparse = std::get_if<SparseInput>(&input.ids)) return sparse->values;
  return std::get<RaggedInput>(input.ids).values;
}

}  // namespace

absl::Status ValidateFeature(absl::string_view feature, int64_t vocabulary_size,
                             const FeatureInput& input) {
  RETURN_IF_ERROR(
      std::visit([&](const auto& form) { return CheckStructure(feature, form); }, input.ids));
  const IntSpan& ids = IdsOf(input);
  RETURN_IF_ERROR(CheckWeights(feature, input, SizeOf(ids)));
  return CheckIds(feature, ids, vocabulary_size);
}

int64_t RoughSize(const FeatureInput& input) {
  const bool ragged = std::holds_alternative<RaggedInput>(input.ids);  // with a split more
  return std::max(SizeOf(IdsOf(input)), SampleCount(input) + ragged);
}

int64_t SampleCount(const FeatureInput& input) {
  if (const auto* dense = std::get_if<DenseInput>(&input.ids)) return dense->sample_count;
  if (const auto* sparse = std::get_if<SparseInput>(&input.ids)) return sparse->sample_count;
  return SizeOf(std::get<RaggedInput>(input.ids).row_splits) - 1;
}

bool HasSingleIds(const FeatureInput& input) {
  struct Visitor {
    bool operator()(const DenseInput& dense) const { return dense.ids_per_sample <= 1; }
    bool operator()(const SparseInput& sparse) const {
      return std::visit(
          [](const auto& indices) {
            for (size_t i = 2; i < indices.size(); i += 2) {
              if (indices[i] == indices[i - 2]) return false;
            }
            return true;
          },
          sparse.indices);
    }
    bool operator()(const RaggedInput& ragged) const {
      return std::visit(
          [](const auto& splits) {
            for (size_t i = 1; i < splits.size(); ++i) {
              if (splits[i] - splits[i - 1] > 1) return false;
            }
            return true;
          },
          ragged.row_splits);
    }
  };
  const auto is_one = [](float weight) { return weight == 1.0f; };
  if (input.has_weights && !std::all_of(input.weights.begin(), input.weights.end(), is_one)) {
    return false;
  }
  return std::visit(Visitor(), input.ids);
}

namespace {

void AddSlice(int feature, int64_t begin, int64_t count, int64_t slot_begin, SlotLayout* slot) {
  if (count <= 0) return;
  slot->slices.push_back({feature, begin, count, static_cast<int32_t>(slot_begin)});
}

void SplitThenStack(absl::Span<const int64_t> counts, int slots, std::vector<SlotLayout>* layout) {
  int64_t slot_begin = 0;
  for (size_t f = 0; f < counts.size(); ++f) {
    const int64_t per_slot = RoundUp(counts[f], slots) / slots;
    for (int s = 0; s < slots; ++s) {
      const int64_t begin = s * per_slot;
      AddSlice(static_cast<int>(f), begin, std::min(per_slot, counts[f] - begin), slot_begin,
               &(*layout)[s]);
    }
    slot_begin += per_slot;
  }
  for (SlotLayout& slot : *layout) slot.samples = static_cast<int32_t>(slot_begin);
}

void StackThenSplit(absl::Span<const int64_t> counts, int slots, std::vector<SlotLayout>* layout) {
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  const int64_t per_slot = RoundUp(total, slots) / slots;
  for (int s = 0; s < slots; ++s) {
    const int64_t slot_first = s * per_slot;
    const int64_t slot_last = slot_first + per_slot;
    int64_t feature_first = 0;
    for (size_t f = 0; f < counts.size(); ++f) {
      const int64_t first = std::max(feature_first, slot_first);
      const int64_t last = std::min(feature_first + counts[f], slot_last);
      AddSlice(static_cast<int>(f), first - feature_first, last - first, first - slot_first,
               &(*layout)[s]);
      feature_first += counts[f];
    }
    (*layout)[s].samples = static_cast<int32_t>(per_slot);
  }
}

// With fewer keys, a group takes in the next table: passing over counters would cost too much.
constexpr int64_t kLeastGroup = 1024;

// First index pair of a sparse input whose sample is >= `sample`.
template <typename Index>
int64_t FirstPairOf(absl::Span<const Index> indices, int64_t sample) {
  int64_t low = 0;
  int64_t high = static_cast<int64_t>(indices.size()) / 2;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<int64_t>(indices[2 * middle]) < sample) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls visit(offset, ids, n, position) for samples begin + offset, offset = 0 to count - 1: `ids`
// points to the n ids of the sample, the first of which stands at `position` among all ids of the
// feature (and so do its weights).
template <typename Visit>
void VisitSamples(const FeatureInput& input, int64_t begin, int64_t count, Visit&& visit) {
  struct Visitor {
    int64_t begin, count;
    Visit& visit;
    void operator()(const DenseInput& dense) const {
      const int64_t n = dense.ids_per_sample;
      std::visit(
          [&](const auto& ids) {
            for (int64_t j = 0; j < count; ++j) {
              const int64_t position = (begin + j) * n;
              visit(j, ids.data() + position, n, position);
            }
          },
          dense.ids);
    }
    void operator()(const RaggedInput& ragged) const {
      std::visit(
          [&](const auto& splits, const auto& values) {
            for (int64_t j = 0; j < count; ++j) {
              const int64_t position = splits[begin + j];
              visit(j, values.data() + position, splits[begin + j + 1] - position, position);
            }
          },
          ragged.row_splits, ragged.values);
    }
    void operator()(const SparseInput& sparse) const {
      std::visit(
          [&](const auto& indices, const auto& values) {
            const int64_t pairs = static_cast<int64_t>(indices.size()) / 2;
            int64_t position = FirstPairOf(indices, begin);
            for (int64_t j = 0; j < count; ++j) {
              int64_t end = position;
              while (end < pairs && static_cast<int64_t>(indices[2 * end]) == begin + j) ++end;
              visit(j, values.data() + position, end - position, position);
              position = end;
            }
          },
          sparse.indices, sparse.values);
    }
  };
  std::visit(Visitor{begin, count, visit}, input.ids);
}

// By what the n weights of a sample are divided: the sum of the weights (MEAN) or the root of the
// sum of their squares (SQRTN), over all occurrences in order, in float32; 1 for SUM.
template <typename WeightAt>
float WeightDivisor(v1::Combiner combiner, int64_t n, const WeightAt& weight_at) {
  if (combiner == v1::SUM) return 1.0f;
  float sum = 0.0f;
  if (combiner != v1::SQRTN) {
    for (int64_t i = 0; i < n; ++i) sum += weight_at(i);
    return sum;
  }
  for (int64_t i = 0; i < n; ++i) sum += weight_at(i) * weight_at(i);
  // A sum so large has no need of what squares below 2^-126 lose, however many there are.
  if (sum >= 0x1p-100f) return std::sqrt(sum);
  // Squares so small lose bits, or are 0. Those of weights that are scaled, which is exact, do not.
  sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float scaled = weight_at(i) * 0x1p100f;
    sum += scaled * scaled;
  }
  return std::sqrt(sum) * 0x1p-100f;
}

// The same for n weights that are all equal.
float EqualWeightsDivisor(v1::Combiner combiner, int64_t n, float weight) {
  if (weight == 1.0f && combiner != v1::SUM) {  // exact for more than 2^24 ids too
    return combiner == v1::SQRTN ? std::sqrt(static_cast<float>(n)) : static_cast<float>(n);
  }
  return WeightDivisor(combiner, n, [weight](int64_t) { return weight; });
}

// The gain of one occurrence. A zero divisor gives 0, or the quotient if `divide_by_zero`.
float Gain(float weight, float divisor, bool divide_by_zero) {
  if (divisor == 0.0f && !divide_by_zero) return 0.0f;
  return weight / divisor;
}

// Turns ids of one feature, and the sample or ordinal of each, into keys.
template <typename Key>
struct KeyMaker {
  KeyMaker(const StackShape& shape, const FeatureShape& feature, const KeyGroup& group)
      : partition_bits(shape.partition_bits()),
        row_bits(group.row_bits),
        low_bits(group.low_bits),
        partition_mask(shape.partitions - 1),
        rotation(feature.rotation),
        row_offset(feature.row_offset - group.row_offset),
        low_begin(group.low_begin) {}

  template <typename Id>
  Key operator()(Id id, int64_t low) const {
    const auto wide = static_cast<uint64_t>(id);
    const uint64_t partition = (wide + rotation) & partition_mask;
    const uint64_t row = (wide >> partition_bits) + row_offset;
    return static_cast<Key>((partition << row_bits | row) << low_bits |
                            static_cast<uint64_t>(low - low_begin));
  }

  int partition_bits;
  int row_bits;
  int low_bits;
  uint64_t partition_mask;
  uint64_t rotation;
  uint64_t row_offset;
  int64_t low_begin;
};

// The one weight that all ids of a feature share.
float CommonWeight(const FeatureInput& input) {
  return input.has_weights && input.weights.size() == 1 ? input.weights[0] : 1.0f;
}

bool HasOwnWeights(const FeatureInput& input) {
  return input.has_weights && input.weights.size() != 1;
}

void NoteOverflow(float divisor, const SlotSlice& slice, int64_t offset, WeightOverflow* overflow) {
  if (!std::isinf(divisor)) return;
  // Features do not always come in their order.
  if (overflow->feature >= 0 && overflow->feature <= slice.feature) return;
  *overflow = {slice.feature, slice.sample_begin + offset, /*of_gain=*/false};
}

// Writes the keys of one slice from place `at` on and returns their end; fills `sample_gains`
// unless null.
template <typename Key>
int64_t MakeUnweighted(const StackShape& shape, const KeyGroup& group, const FeatureInput& input,
                       const SlotSlice& slice, float* sample_gains, int64_t at, Occurrences* out) {
  const FeatureShape& feature = shape.features[slice.feature];
  const KeyMaker<Key> key_of(shape, feature, group);
  const float weight = CommonWeight(input);
  Key* const keys = out->keys.of<Key>().data();
  Key* key = keys + at;
  VisitSamples(input, slice.sample_begin, slice.count,
               [&](int64_t offset, const auto* ids, int64_t n, int64_t /*position*/) {
                 const int64_t sample = slice.slot_begin + offset;
                 for (int64_t i = 0; i < n; ++i) *key++ = key_of(ids[i], sample);
                 if (sample_gains == nullptr) return;
                 const float divisor = EqualWeightsDivisor(feature.combiner, n, weight);
                 NoteOverflow(divisor, slice, offset, &out->overflow);
                 sample_gains[sample] = Gain(weight, divisor, shape.divide_by_zero);
               });
  return key - keys;
}

// Writes keys from ordinal `at` on and returns the next ordinal.
template <typename Key>
int64_t MakeWeighted(const StackShape& shape, const KeyGroup& group, const FeatureInput& input,
                     const SlotSlice& slice, int64_t at, Occurrences* out) {
  const FeatureShape& feature = shape.features[slice.feature];
  const KeyMaker<Key> key_of(shape, feature, group);
  const bool own_weights = HasOwnWeights(input);
  const float common = CommonWeight(input);
  Key* const keys = out->keys.of<Key>().data();
  WeightedSample* weighted = out->weighted.data();
  VisitSamples(input, slice.sample_begin, slice.count,
               [&](int64_t offset, const auto* ids, int64_t n, int64_t position) {
                 const auto sample = static_cast<int32_t>(slice.slot_begin + offset);
                 const float* weights = own_weights ? input.weights.data() + position : nullptr;
                 const float divisor =
                     own_weights ? WeightDivisor(feature.combiner, n,
                                                 [weights](int64_t i) { return weights[i]; })
                                 : EqualWeightsDivisor(feature.combiner, n, common);
                 NoteOverflow(divisor, slice, offset, &out->overflow);
                 for (int64_t i = 0; i < n; ++i, ++at) {
                   const float weight = own_weights ? weights[i] : common;
                   keys[at] = key_of(ids[i], at);
                   weighted[at] = {sample, Gain(weight, divisor, shape.divide_by_zero)};
                 }
               });
  return at;
}

int64_t IdsIn(const FeatureInput& input, int64_t begin, int64_t count) {
  if (const auto* dense = std::get_if<DenseInput>(&input.ids)) return count * dense->ids_per_sample;
  if (const auto* ragged = std::get_if<RaggedInput>(&input.ids)) {
    return std::visit(
        [&](const auto& splits) {
          return static_cast<int64_t>(splits[begin + count] - splits[begin]);
        },
        ragged->row_splits);
  }
  return std::visit(
      [&](const auto& indices) {
        return FirstPairOf(indices, begin + count) - FirstPairOf(indices, begin);
      },
      std::get<SparseInput>(input.ids).indices);
}

// Orders the slices of a slot by table, and tells what is sorted together.
void GroupSlices(const StackShape& shape, StackInputs inputs, const SlotLayout& slot,
                 Occurrences* out) {
  const auto row_offset = [&](const SlotSlice* slice) {
    return shape.features[slice->feature].row_offset;
  };
  std::vector<const SlotSlice*>& slices = out->slices;
  slices.clear();
  for (const SlotSlice& slice : slot.slices) slices.push_back(&slice);
  // Slices of one table stay in order. (std::stable_sort would allocate.)
  std::sort(slices.begin(), slices.end(), [&](const SlotSlice* a, const SlotSlice* b) {
    return std::pair(row_offset(a), a) < std::pair(row_offset(b), b);
  });
  out->groups.clear();
  for (size_t i = 0; i < slices.size(); ++i) {
    const bool other_table = i > 0 && row_offset(slices[i]) != row_offset(slices[i - 1]);
    if (i == 0 || (other_table && out->count - out->groups.back().begin >= kLeastGroup)) {
      out->groups.push_back(
          {.begin = out->count, .first_slice = i, .row_offset = row_offset(slices[i])});
    }
    out->count += IdsIn(*inputs[slices[i]->feature], slices[i]->sample_begin, slices[i]->count);
    out->groups.back().end = out->count;
    ++out->groups.back().slices;
  }
}

// Samples, or ordinals of occurrences, that keys of a group name.
void FindLowBits(const Occurrences& occurrences, KeyGroup* group) {
  int64_t begin = group->begin, end = group->end;
  if (occurrences.gain_kind != GainKind::kPerOccurrence) {
    begin = std::numeric_limits<int64_t>::max();
    end = 0;
    for (size_t i = 0; i < group->slices; ++i) {
      const SlotSlice& slice = *occurrences.slices[group->first_slice + i];
      begin = std::min<int64_t>(begin, slice.slot_begin);
      end = std::max(end, slice.slot_begin + slice.count);
    }
  }
  group->low_begin = begin;
  group->low_bits = BitsFor(end - begin);
}

// All keys of a group.
template <typename Key>
void MakeKeysOf(const StackShape& shape, StackInputs inputs, const KeyGroup& group,
                Occurrences* out) {
  float* const gains = out->gain_kind == GainKind::kPerSample ? out->sample_gains.data() : nullptr;
  int64_t at = group.begin;
  for (size_t i = 0; i < group.slices; ++i) {
    const SlotSlice& slice = *out->slices[group.first_slice + i];
    const FeatureInput& input = *inputs[slice.feature];
    if (out->gain_kind == GainKind::kPerOccurrence) {
      at = MakeWeighted<Key>(shape, group, input, slice, at, out);
    } else {
      at = MakeUnweighted<Key>(shape, group, input, slice, gains, at, out);
    }
  }
}

}  // namespace

void LayOutSamples(v1::SampleLayout kind, absl::Span<const int64_t> sample_counts, int slots,
                   std::vector<SlotLayout>* layout) {
  layout->resize(slots);
  for (SlotLayout& slot : *layout) slot.slices.clear();
  if (kind == v1::STACK_THEN_SPLIT) {
    StackThenSplit(sample_counts, slots, layout);
  } else {
    SplitThenStack(sample_counts, slots, layout);
  }
}

GainKind GainKindOf(const StackShape& shape, StackInputs inputs) {
  GainKind kind = GainKind::kOne;
  for (size_t f = 0; f < inputs.size(); ++f) {
    if (HasOwnWeights(*inputs[f])) return GainKind::kPerOccurrence;
    if (shape.features[f].combiner != v1::SUM || CommonWeight(*inputs[f]) != 1.0f)
      kind = GainKind::kPerSample;
  }
  return kind;
}

int64_t CountIds(const SlotLayout& slot, StackInputs inputs) {
  int64_t ids = 0;
  for (const SlotSlice& slice : slot.slices) {
    ids += IdsIn(*inputs[slice.feature], slice.sample_begin, slice.count);
  }
  return ids;
}

void MakeGroups(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
                Occurrences* out) {
  out->gain_kind = kind;
  out->overflow = {};
  out->count = 0;
  GroupSlices(shape, inputs, slot, out);
  int64_t narrow_end = 0, wide_end = 0;
  int64_t end_row = shape.rows_per_partition;
  for (auto group = out->groups.rbegin(); group != out->groups.rend(); ++group) {
    group->row_bits = BitsFor(end_row - group->row_offset);
    end_row = group->row_offset;
    FindLowBits(*out, &*group);
    group->narrow = shape.partition_bits() + group->row_bits + group->low_bits <= 32;
    int64_t& keys_end = group->narrow ? narrow_end : wide_end;
    keys_end = std::max(keys_end, group->end);
  }
  out->keys.narrow.Reserve(narrow_end);
  out->keys.wide.Reserve(wide_end);
  if (kind == GainKind::kPerSample) out->sample_gains.Reserve(slot.samples);
  if (kind == GainKind::kPerOccurrence) out->weighted.Reserve(out->count);
}

void MakeKeys(const StackShape& shape, StackInputs inputs, const KeyGroup& group,
              Occurrences* out) {
  if (group.narrow) {
    MakeKeysOf<uint32_t>(shape, inputs, group, out);
  } else {
    MakeKeysOf<uint64_t>(shape, inputs, group, out);
  }
}

// ---- Sorting keys, and merging equal ones

namespace {

// Below so many keys, clearing and summing counters costs more than a comparison sort.
constexpr int64_t kFewKeys = 48;

// Sample and gain of an occurrence of a group, by kind.
template <GainKind kind>
struct OccurrenceAt {
  OccurrenceAt(const KeyGroup& group, const Occurrences& occurrences)
      : low_mask((uint64_t{1} << group.low_bits) - 1),
        low_begin(group.low_begin),
        sample_gains(occurrences.sample_gains.data()),
        weighted(occurrences.weighted.data()) {}

  WeightedSample operator()(uint64_t key) const {
    const auto low = static_cast<int64_t>(key & low_mask) + low_begin;
    if constexpr (kind == GainKind::kPerOccurrence) return weighted[low];
    if constexpr (kind == GainKind::kPerSample)
      return {static_cast<int32_t>(low), sample_gains[low]};
    return {static_cast<int32_t>(low), 1.0f};
  }

  const uint64_t low_mask;
  const int64_t low_begin;
  const float* sample_gains;
  const WeightedSample* weighted;
};

// Merges equal keys of all groups into the cells of a slot, partition by partition.
template <GainKind kind, bool kCountOccurrences>
class Merger {
 public:
  Merger(const Occurrences& occurrences, std::vector<int64_t>& next, int32_t* multiplicity,
         SlotCsr* csr)
      : occurrences_(occurrences),
        next_(next),
        csr_(*csr),
        cells_{csr->embedding_ids.data(), csr->sample_ids.data(), csr->gains.data(), multiplicity} {
  }

  void Merge() {
    next_.clear();
    for (const KeyGroup& group : occurrences_.groups) next_.push_back(group.begin);
    int64_t entries = 0;
    for (int p = 0; p < csr_.partitions; ++p) {
      const int64_t begin = cell_;
      int32_t unique = 0;
      for (size_t g = 0; g < next_.size(); ++g) {
        unique += occurrences_.groups[g].narrow ? MergePartition<uint32_t>(p, g)
                                                : MergePartition<uint64_t>(p, g);
      }
      csr_.row_ends.data()[p] = static_cast<int32_t>(cell_);
      csr_.partition_ids.data()[p] = static_cast<int32_t>(cell_ - begin);
      csr_.partition_unique.data()[p] = unique;
      entries += cell_ - begin;
      cell_ = PadCells(&csr_, cell_);
    }
    csr_.cells = cell_;
    csr_.entries = entries;
    csr_.duplicates = occurrences_.count - entries;
  }

 private:
  struct Cells {
    int32_t* embedding_ids;
    int32_t* sample_ids;
    float* gains;
    int32_t* multiplicity;
  };

  // Merges the keys of partition p of the g-th group. Returns how many rows they have. Not inlined:
  // its loop needs the registers.
  template <typename Key>
  [[gnu::noinline]] int32_t MergePartition(int p, size_t g) {
    const KeyGroup& group = occurrences_.groups[g];
    // Copies: what is written could be any member, for all that the compiler knows.
    const auto row_offset = static_cast<int32_t>(group.row_offset);
    const uint64_t first = static_cast<uint64_t>(p) << group.row_bits;
    const uint64_t bound = static_cast<uint64_t>(p + 1) << group.row_bits;
    int32_t unique = 0;
    uint64_t row_before = ~uint64_t{0};
    int32_t sample_before = -1;
    const OccurrenceAt<kind> occurrence_at(group, occurrences_);
    const int low_bits = group.low_bits;
    const Key* const keys = occurrences_.keys.of<Key>().data();
    const Key* const end = keys + group.end;
    const Cells cells = cells_;
    int64_t cell = cell_;
    const Key* key = keys + next_[g];
    for (; key != end; ++key) {
      const uint64_t place = uint64_t{*key} >> low_bits;
      if (place >= bound) break;
      const WeightedSample occurrence = occurrence_at(*key);
      if (place == row_before && occurrence.sample == sample_before) {
        cells.gains[cell - 1] += occurrence.gain;
        if constexpr (kCountOccurrences) ++cells.multiplicity[cell - 1];
        continue;
      }
      unique += place != row_before;
      row_before = place;
      sample_before = occurrence.sample;
      cells.embedding_ids[cell] = static_cast<int32_t>(place - first) + row_offset;
      cells.sample_ids[cell] = occurrence.sample;
      cells.gains[cell] = occurrence.gain;
      if constexpr (kCountOccurrences) cells.multiplicity[cell] = 1;
      ++cell;
    }
    next_[g] = key - keys;
    cell_ = cell;
    return unique;
  }

  const Occurrences& occurrences_;
  std::vector<int64_t>& next_;
  SlotCsr& csr_;
  const Cells cells_;
  int64_t cell_ = 0;  // the next
};

template <GainKind kind>
void MergeKind(SlotScratch& scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  if (multiplicity == nullptr) {
    Merger<kind, false>(scratch.occurrences, scratch.next, nullptr, csr).Merge();
  } else {
    Merger<kind, true>(scratch.occurrences, scratch.next, multiplicity->data(), csr).Merge();
  }
}

// Of keys that are sorted.
void MergeSorted(const StackShape& shape, SlotScratch& scratch, Buffer<int32_t>* multiplicity,
                 SlotCsr* csr) {
  // Every partition may need up to 7 pads.
  const int64_t cells =
      scratch.occurrences.count + (kCsrAlignment - 1) * shape.partitions + kCsrAlignment;
  csr->Reserve(cells, 1, static_cast<int>(shape.partitions));
  csr->minibatches = 1;
  csr->dropped = 0;
  if (multiplicity != nullptr) multiplicity->Reserve(cells);
  switch (scratch.occurrences.gain_kind) {
    case GainKind::kOne:
      return MergeKind<GainKind::kOne>(scratch, multiplicity, csr);
    case GainKind::kPerSample:
      return MergeKind<GainKind::kPerSample>(scratch, multiplicity, csr);
    case GainKind::kPerOccurrence:
      return MergeKind<GainKind::kPerOccurrence>(scratch, multiplicity, csr);
  }
}

template <typename Key>
void SortGroup(const KeyGroup& group, int partition_bits, SlotScratch& scratch) {
  const int64_t count = group.end - group.begin;
  Key* const keys = scratch.occurrences.keys.of<Key>().data() + group.begin;
  Key* const spare = scratch.spare_keys.of<Key>().Reserve(count);
  SortKeys(keys, spare, count, partition_bits + group.row_bits, group.low_bits);
}

// Gains may be finite each, and their sum not; or a divisor is so small that a quotient is not.
void NoteNonFinite(const SlotLayout& slot, SlotCsr* csr) {
  for (int p = 0; p < csr->partitions && csr->overflow.feature < 0; ++p) {
    const int64_t begin = csr->Begin(0, p);
    const int32_t* const samples = csr->sample_ids.data() + begin;
    const int64_t entries = csr->partition_ids.data()[p];
    const int64_t bad = FindNonFinite(absl::MakeConstSpan(csr->gains.data() + begin, entries));
    if (bad < 0) continue;
    for (const SlotSlice& slice : slot.slices) {
      if (samples[bad] < slice.slot_begin) break;
      csr->overflow = {slice.feature, slice.sample_begin + samples[bad] - slice.slot_begin,
                       /*of_gain=*/true};
    }
  }
}

}  // namespace

int64_t PadCells(SlotCsr* csr, int64_t cell) {
  const int64_t end = AlignCsr(cell);
  for (; cell < end; ++cell) {
    csr->embedding_ids.data()[cell] = kCsrPadId;
    csr->sample_ids.data()[cell] = kCsrPadId;
    csr->gains.data()[cell] = std::numeric_limits<float>::quiet_NaN();
  }
  return end;
}

template <typename Key>
void SortKeys(Key* keys, Key* spare, int64_t n, int live_bits, int low_bits) {
  if (n < kFewKeys) {
    std::sort(keys, keys + n);
    return;
  }
  static_assert(kMaxLiveBits <= kMaxRadixBits);
  RadixSort(keys, spare, n, live_bits,
            [low_bits](Key key, int shift) { return uint64_t{key} >> (low_bits + shift); });
}

template void SortKeys(uint32_t* keys, uint32_t* spare, int64_t n, int live_bits, int low_bits);
template void SortKeys(uint64_t* keys, uint64_t* spare, int64_t n, int live_bits, int low_bits);

void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  Occurrences& occurrences = scratch->occurrences;
  MakeGroups(shape, inputs, slot, kind, &occurrences);
  // Group by group, so that keys are sorted while a cache still has them.
  for (const KeyGroup& group : occurrences.groups) {
    MakeKeys(shape, inputs, group, &occurrences);
    if (group.narrow) {
      SortGroup<uint32_t>(group, shape.partition_bits(), *scratch);
    } else {
      SortGroup<uint64_t>(group, shape.partition_bits(), *scratch);
    }
  }
  csr->overflow = occurrences.overflow;
  MergeSorted(shape, *scratch, multiplicity, csr);
  if (kind != GainKind::kOne) NoteNonFinite(slot, csr);
}

}  // namespace emberd::preprocess
