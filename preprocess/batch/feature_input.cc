#include "preprocess/batch/feature_input.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "absl/strings/str_cat.h"
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

}  // namespace emberd::preprocess
