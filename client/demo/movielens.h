// MovieLens in RecBole's layout: NAME.inter (ratings), NAME.user and NAME.item, tab-separated, the
// first line naming and typing the columns ("user_id:token").
//
// Label: rating >= 4. Features: user, item, age (in steps of 5 years), gender, occupation, genres
// (several, mean), words of the title (several, sqrtn). Vocabularies are built from the files. A
// fifth of the ratings, chosen by the seed, is held out; each pass over the others has an order of
// its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/demo/dataset.h"

namespace emberd::demo {

class MovieLens : public Dataset {
 public:
  // `directory` holds one file of each kind. INVALID_ARGUMENT names file and line of what cannot be
  // read.
  static absl::StatusOr<std::unique_ptr<MovieLens>> Open(const std::string& directory,
                                                         uint64_t seed);

  const DatasetInfo& info() const override { return info_; }
  int64_t train_size() const override { return static_cast<int64_t>(train_.size()); }
  int64_t test_size() const override { return static_cast<int64_t>(test_.size()); }
  absl::Status ReadTrain(int64_t first, int64_t count, Batch* batch) const override;
  absl::Status ReadTest(int64_t first, int64_t count, Batch* batch) const override;

 private:
  struct Rating {
    int32_t user, item;
    float label;
  };
  struct User {
    int32_t age, gender, occupation;
  };
  struct Item {
    std::vector<int32_t> genres, words;
  };
  class Loader;

  MovieLens() = default;
  void Begin(Batch* batch) const;
  void Append(const Rating& rating, Batch* batch) const;

  uint64_t seed_ = 0;
  DatasetInfo info_;
  std::vector<Rating> train_, test_;
  std::vector<User> users_;
  std::vector<Item> items_;
};

}  // namespace emberd::demo
