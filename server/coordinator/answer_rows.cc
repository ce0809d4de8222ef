#include "server/coordinator/answer_rows.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "server/coordinator/activations.h"
#include "server/coordinator/request_reader.h"

namespace emberd::server {
namespace {

// Rows are sent if they and their indices have at most this share of the activations' bytes: below
// that, it is worth it that the trainer copies each row from where it lies, and not as it comes.
constexpr double kMostBytes = 0.8;
// A trainer that reads late keeps the shards' answers from going, all of them: they may have so
// many times as many bytes as what is sent of them.
constexpr double kMostKept = 2;

// What the shards have answered.
int64_t BytesOf(absl::Span<const GatherResult> results) {
  int64_t bytes = 0;
  for (const GatherResult& result : results) {
    for (const StackSumsView& sums : result.stacks) {
      bytes += sums.later != nullptr ? sums.later->bytes() : PayloadBytes(sums);
    }
  }
  return bytes;
}

// The partition of the shard that a place is in.
size_t PartitionOf(const shard::StackEntries& entries, uint64_t place) {
  const std::vector<uint64_t>& ends = entries.partition_ends;
  constexpr size_t kFew = 8;  // are looked through sooner than a search has branched
  if (ends.size() > kFew) return std::upper_bound(ends.begin(), ends.end(), place) - ends.begin();
  size_t partition = 0;
  while (place >= ends[partition]) ++partition;
  return partition;
}

// By partition of the shard, the places that entries [begin, end) have there; `end` is -1 where
// they have none.
RowPlaces FindPlaces(const shard::StackEntries& entries, int shard, int64_t begin, int64_t end) {
  RowPlaces places(entries.partition_ends.size(), {shard, std::numeric_limits<int64_t>::max(), -1});
  for (int64_t i = begin; i < end; ++i) {
    const int64_t place = entries.entries[i].row;
    PlaceRange& range = places[PartitionOf(entries, place)];
    range.begin = std::min(range.begin, place);
    range.end = std::max(range.end, place + 1);
  }
  return places;
}

}  // namespace

std::shared_ptr<AnswerRows> AnswerRows::Find(absl::Span<const GatherResult> results,
                                             const ServedModel& model,
                                             const preprocess::PreprocessedBatch& batch,
                                             v1::DataType dtype, CpuPool* cpu) {
  std::shared_ptr<AnswerRows> rows(new AnswerRows());
  rows->element_ = ElementSize(dtype);
  rows->features_.resize(model.config.features_size());
  std::vector<int> found;
  for (size_t k = 0; k < model.plan.stacks.size(); ++k) {
    // Rows of another type are rounded here.
    if (TypeOfSingleRows(results, static_cast<int>(k)) != dtype) continue;
    for (const preprocess::FeaturePlan& feature : model.plan.stacks[k].features) {
      found.push_back(feature.feature);
    }
  }
  if (found.empty()) return nullptr;
  ParallelFor(cpu, static_cast<int64_t>(found.size()), [&](int64_t i) {
    const int f = found[i];
    const auto [stack, position] = model.plan.feature_at[f];
    Feature& feature = rows->features_[f];
    feature.chosen = true;
    feature.samples = batch.feature_samples()[f];
    feature.first_sample = batch.feature_sample_begin()[f];
    feature.width = model.plan.stacks[stack].embedding_dim;
    rows->FindRows(results, stack, position, &feature);
  });
  if (!rows->Choose(model, BytesOf(results))) return nullptr;
  for (const GatherResult& result : results) {
    rows->owners_.push_back(result.owner);
    rows->owners_.insert(rows->owners_.end(), result.later.begin(), result.later.end());
  }
  return rows;
}

void AnswerRows::FindRows(absl::Span<const GatherResult> results, int stack, int position,
                          Feature* feature) {
  for (size_t s = 0; s < results.size(); ++s) {
    const StackSumsView& sums = results[s].stacks[stack];
    if (sums.samples.empty()) continue;
    const shard::StackEntries& entries = sums.later->entries();
    Part part = {sums.later, entries.feature_offsets[position],
                 entries.feature_offsets[position + 1]};
    part.to_row.resize(entries.partition_ends.size());
    const RowPlaces places = FindPlaces(entries, static_cast<int>(s), part.begin, part.end);
    for (size_t p = 0; p < places.size(); ++p) {
      if (places[p].end < 0) continue;
      part.to_row[p] = feature->rows - places[p].begin;
      feature->rows += places[p].end - places[p].begin;
      part.places.push_back(places[p]);
    }
    feature->parts.push_back(std::move(part));
  }
}

bool AnswerRows::Choose(const ServedModel& model, int64_t answer_bytes) {
  double sent = 0, activations = 0;  // bytes
  for (size_t f = 0; f < features_.size(); ++f) {
    Feature& feature = features_[f];
    // More rows than samples: most of them are of other features of the table.
    feature.chosen = feature.chosen && feature.rows > 0 && feature.rows <= feature.samples;
    if (!feature.chosen) continue;
    sent += static_cast<double>(bytes(static_cast<int>(f)));
    activations += static_cast<double>(feature.samples) *
                   model.TableOfFeature(static_cast<int>(f)).embedding_dim() * element_;
  }
  return sent > 0 && sent <= kMostBytes * activations &&
         static_cast<double>(answer_bytes) <= kMostKept * sent;
}

std::vector<RowPlaces> AnswerRows::places() const {
  std::vector<RowPlaces> places(features_.size());
  for (size_t f = 0; f < features_.size(); ++f) {
    if (!features_[f].chosen) continue;
    for (const Part& part : features_[f].parts) {
      places[f].insert(places[f].end(), part.places.begin(), part.places.end());
    }
  }
  return places;
}

void AnswerRows::IndexSamples(int f) {
  Feature& feature = features_[f];
  feature.index.assign(feature.samples, -1);
  for (const Part& part : feature.parts) {
    const shard::StackEntries& entries = part.sums->entries();
    for (int64_t i = part.begin; i < part.end; ++i) {
      const int64_t place = entries.entries[i].row;
      const int64_t row = place + part.to_row[PartitionOf(entries, place)];
      feature.index[entries.samples[i] - feature.first_sample] = static_cast<int32_t>(row);
    }
  }
}

std::vector<absl::string_view> AnswerRows::Pieces(int f) const {
  const int64_t row_bytes = features_[f].width * element_;
  std::vector<absl::string_view> pieces;
  for (const Part& part : features_[f].parts) {
    for (const PlaceRange& range : part.places) {
      pieces.emplace_back(part.sums->RowAt(range.begin), (range.end - range.begin) * row_bytes);
    }
  }
  return pieces;
}

int64_t AnswerRows::bytes(int f) const {
  const Feature& feature = features_[f];
  return feature.rows * feature.width * element_ +
         feature.samples * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace emberd::server
