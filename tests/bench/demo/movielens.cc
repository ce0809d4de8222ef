#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {
namespace {

enum Feature { kUser, kItem, kAge, kGender, kOccupation, kGenres, kTitle, kFeatures };
constexpr int kYearsPerAge = 5;
constexpr int kHeldOutEvery = 5;

// Numbers tokens in the order in which they first appear.
class Vocabulary {
 public:
  int32_t Add(std::string_view token) {
    return ids_.emplace(std::string(token), static_cast<int32_t>(ids_.size())).first->second;
  }
  // -1: unknown.
  int32_t Find(std::string_view token) const {
    const auto found = ids_.find(std::string(token));
    return found == ids_.end() ? -1 : found->second;
  }
  int64_t size() const { return static_cast<int64_t>(ids_.size()); }

 private:
  std::unordered_map<std::string, int32_t> ids_;
};

std::vector<int32_t> AddWords(std::string_view text, Vocabulary* vocabulary) {
  std::vector<int32_t> ids;
  for (std::string_view word : SplitFields(text, ' ')) {
    if (!word.empty())
      ids.push_back(vocabulary->Add(absl::AsciiStrToLower({word.data(), word.size()})));
  }
  return ids;
}

class MovieLens : public Dataset {
 public:
  explicit MovieLens(uint64_t seed) : seed_(seed) {}
  absl::Status Open(const std::string& directory);

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

  void Begin(Batch* batch) const;
  void Append(const Rating& rating, Batch* batch) const;

  const uint64_t seed_;
  DatasetInfo info_;
  std::vector<Rating> train_, test_;
  std::vector<User> users_;
  std::vector<Item> items_;
};

class MovieLens::Loader {
 public:
  explicit Loader(MovieLens* data) : data_(data) {}

  absl::Status LoadUsers(const std::string& directory) {
    ASSIGN_OR_RETURN(const Sheet sheet,
                     Sheet::Open(directory, ".user", {"user_id", "age", "gender", "occupation"}));
    for (int64_t row = 0; row < sheet.rows(); ++row) {
      ASSIGN_OR_RETURN(const auto fields, sheet.Row(row));
      ASSIGN_OR_RETURN(const double age, sheet.Number(row, fields[1]));
      if (age < 0 || age > 200)
        return sheet.Error(row, absl::StrCat("age is ", age, "; allowed are 0 to 200"));
      if (vocabulary_[kUser].Add(fields[0]) != row)
        return sheet.Error(row, "this user_id was there before");
      data_->users_.push_back(
          {vocabulary_[kAge].Add(absl::StrCat(static_cast<int>(age) / kYearsPerAge)),
           vocabulary_[kGender].Add(fields[2]), vocabulary_[kOccupation].Add(fields[3])});
    }
    return absl::OkStatus();
  }

  absl::Status LoadItems(const std::string& directory) {
    ASSIGN_OR_RETURN(const Sheet sheet,
                     Sheet::Open(directory, ".item", {"item_id", "movie_title", "class"}));
    for (int64_t row = 0; row < sheet.rows(); ++row) {
      ASSIGN_OR_RETURN(const auto fields, sheet.Row(row));
      if (vocabulary_[kItem].Add(fields[0]) != row)
        return sheet.Error(row, "this item_id was there before");
      data_->items_.push_back(
          {AddWords(fields[2], &vocabulary_[kGenres]), AddWords(fields[1], &vocabulary_[kTitle])});
    }
    return absl::OkStatus();
  }

  absl::Status LoadRatings(const std::string& directory) {
    ASSIGN_OR_RETURN(const Sheet sheet,
                     Sheet::Open(directory, ".inter", {"user_id", "item_id", "rating"}));
    std::vector<Rating> ratings;
    for (int64_t row = 0; row < sheet.rows(); ++row) {
      ASSIGN_OR_RETURN(const auto fields, sheet.Row(row));
      ASSIGN_OR_RETURN(const double rating, sheet.Number(row, fields[2]));
      const int32_t user = vocabulary_[kUser].Find(fields[0]),
                    item = vocabulary_[kItem].Find(fields[1]);
      if (user < 0)
        return sheet.Error(
            row, absl::StrCat("user_id ", std::string(fields[0]), " is not in the .user file"));
      if (item < 0)
        return sheet.Error(
            row, absl::StrCat("item_id ", std::string(fields[1]), " is not in the .item file"));
      ratings.push_back({user, item, rating >= 4 ? 1.0f : 0.0f});
    }
    const int64_t held_out = sheet.rows() / kHeldOutEvery;
    for (int64_t i = 0; i < sheet.rows(); ++i) {
      const bool test = Permute(i, sheet.rows(), data_->seed_) < held_out;
      (test ? data_->test_ : data_->train_).push_back(ratings[i]);
    }
    if (held_out > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        directory, ": ", sheet.rows(), " ratings; at least ", kHeldOutEvery, " are needed"));
  }

  void Describe() {
    static constexpr const char* kNames[kFeatures] = {"user",       "item",   "age",  "gender",
                                                      "occupation", "genres", "title"};
    data_->info_.name = "movielens";
    data_->info_.description =
        absl::StrCat("MovieLens: ", data_->train_.size(), " ratings to train on, ",
                     data_->test_.size(), " held out");
    for (int f = 0; f < kFeatures; ++f) {
      data_->info_.features.push_back(
          {.name = kNames[f],
           .vocabulary_size = std::max<int64_t>(1, vocabulary_[f].size()),
           .combiner = f == kTitle ? client::Combiner::kSqrtn : client::Combiner::kMean});
    }
  }

 private:
  MovieLens* data_;
  Vocabulary vocabulary_[kFeatures];
};

absl::Status MovieLens::Open(const std::string& directory) {
  Loader loader(this);
  RETURN_IF_ERROR(loader.LoadUsers(directory));
  RETURN_IF_ERROR(loader.LoadItems(directory));
  RETURN_IF_ERROR(loader.LoadRatings(directory));
  loader.Describe();
  return absl::OkStatus();
}

void MovieLens::Begin(Batch* batch) const {
  batch->Clear(info_);
  for (int f : {kGenres, kTitle}) batch->features[f].EndSample();  // the first begins at 0
}

void MovieLens::Append(const Rating& rating, Batch* batch) const {
  const User& user = users_[rating.user];
  const Item& item = items_[rating.item];
  const int32_t single[] = {rating.user, rating.item, user.age, user.gender, user.occupation};
  for (int f = kUser; f <= kOccupation; ++f) batch->features[f].ids.push_back(single[f]);
  for (int f : {kGenres, kTitle}) {
    FeatureColumn& column = batch->features[f];
    const std::vector<int32_t>& ids = f == kGenres ? item.genres : item.words;
    column.ids.insert(column.ids.end(), ids.begin(), ids.end());
    column.EndSample();
  }
  batch->labels.push_back(rating.label);
  ++batch->size;
}

absl::Status MovieLens::ReadTrain(int64_t first, int64_t count, Batch* batch) const {
  Begin(batch);
  for (int64_t position = first; position < first + count; ++position) {
    const int64_t pass = position / train_size();
    Append(train_[Permute(position % train_size(), train_size(), Mix(seed_) + pass)], batch);
  }
  return absl::OkStatus();
}

absl::Status MovieLens::ReadTest(int64_t first, int64_t count, Batch* batch) const {
  RETURN_IF_ERROR(CheckTestRange(first, count));
  Begin(batch);
  for (int64_t i = first; i < first + count; ++i) Append(test_[i], batch);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Dataset>> OpenMovieLens(const std::string& directory,
                                                       uint64_t seed) {
  auto data = std::make_unique<MovieLens>(seed);
  RETURN_IF_ERROR(data->Open(directory));
  return data;
}

}  // namespace emberd::demo
