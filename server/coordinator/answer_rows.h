// What a trainer is sent instead of activations where no sample has more than one id: each row
// once, from where the shard's answer lies, and which row each sample has.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/cpu_pool.h"
#include "emberd/v1/types.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "server/coordinator/kept_batch.h"
#include "server/coordinator/served_model.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

// Of one batch. It keeps the shards' answers alive.
class AnswerRows {
 public:
  // Null if that is not clearly less to send than activations of type `dtype`. The results have
  // passed ArrangeUniqueRows. `cpu` may be null.
  static std::shared_ptr<AnswerRows> Find(absl::Span<const GatherResult> results,
                                          const ServedModel& model,
                                          const preprocess::PreprocessedBatch& batch,
                                          v1::DataType dtype, CpuPool* cpu);

  // By index in the config. Those that have no rows here are sent activations.
  bool Has(int feature) const { return features_[feature].chosen; }
  std::vector<RowPlaces> places() const;

  // The rest is of a feature that has rows. Finds the row of each sample; once, before the feature
  // is sent. Features may be indexed at the same time.
  void IndexSamples(int feature);
  // [samples]: -1, or a row. Empty before IndexSamples.
  absl::Span<const int32_t> index(int feature) const { return features_[feature].index; }
  int64_t rows(int feature) const { return features_[feature].rows; }
  int64_t samples(int feature) const { return features_[feature].samples; }
  // The rows, one piece after another: [rows, padded width of the stack].
  std::vector<absl::string_view> Pieces(int feature) const;
  int64_t width(int feature) const { return features_[feature].width; }
  // Of the rows and the index.
  int64_t bytes(int feature) const;

  // Goes when nobody needs the rows any more.
  void Keep(std::shared_ptr<const void> owner) { kept_ = std::move(owner); }

 private:
  // What one shard has of the feature.
  struct Part {
    const shard::LaterSums* sums = nullptr;
    int64_t begin = 0, end = 0;        // of the shard's samples, and so of its entries
    RowPlaces places = {};             // of partitions that have rows, in order
    std::vector<int64_t> to_row = {};  // by partition: what makes a place a row of the feature
  };
  struct Feature {
    bool chosen = false;
    int64_t samples = 0;
    int64_t first_sample = 0;  // canonical
    int64_t width = 0;
    int64_t rows = 0;
    std::vector<Part> parts;
    std::vector<int32_t> index;
  };
  AnswerRows() = default;
  void FindRows(absl::Span<const GatherResult> results, int stack, int position, Feature* feature);
  // Whether it is worth it; chooses the features then. `answer_bytes`: of all that the shards have
  // answered.
  bool Choose(const ServedModel& model, int64_t answer_bytes);

  int64_t element_ = 0;  // bytes
  std::vector<Feature> features_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::shared_ptr<const void> kept_;
};

}  // namespace emberd::server
