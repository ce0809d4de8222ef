#include "client/demo/movielens.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/demo/random.h"
#include "client/demo/sheet.h"

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

}  // namespace

class MovieLens::Loader {
 public:
  explicit Loader(MovieLens* data) : data_(data) {}

  absl::Status LoadUsers(const std::string& directory) {
    absl::StatusOr<Sheet> sheet =
        Sheet::Open(directory, ".user", {"user_id", "age", "gender", "occupation"});
    if (!sheet.ok()) return sheet.status();
    for (int64_t row = 0; row < sheet->rows(); ++row) {
      const auto fields = sheet->Row(row);
      if (!fields.ok()) return fields.status();
      const auto age = sheet->Number(row, (*fields)[1]);
      if (!age.ok()) return age.status();
      if (*age < 0 || *age > 200)
        return sheet->Error(row, absl::StrCat("age is ", *age, "; allowed are 0 to 200"));
      if (vocabulary_[kUser].Add((*fields)[0]) != row)
        return sheet->Error(row, "this user_id was there before");
      data_->users_.push_back(
          {vocabulary_[kAge].Add(absl::StrCat(static_cast<int>(*age) / kYearsPerAge)),
           vocabulary_[kGender].Add((*fields)[2]), vocabulary_[kOccupation].Add((*fields)[3])});
    }
    return absl::OkStatus();
  }

  absl::Status LoadItems(const std::string& directory) {
    absl::StatusOr<Sheet> sheet =
        Sheet::Open(directory, ".item", {"item_id", "movie_title", "class"});
    if (!sheet.ok()) return sheet.status();
    for (int64_t row = 0; row < sheet->rows(); ++row) {
      const auto fields = sheet->Row(row);
      if (!fields.ok()) return fields.status();
      if (vocabulary_[kItem].Add((*fields)[0]) != row)
        return sheet->Error(row, "this item_id was there before");
      data_->items_.push_back({AddWords((*fields)[2], &vocabulary_[kGenres]),
                               AddWords((*fields)[1], &vocabulary_[kTitle])});
    }
    return absl::OkStatus();
  }

  absl::Status LoadRatings(const std::string& directory) {
    absl::StatusOr<Sheet> sheet =
        Sheet::Open(directory, ".inter", {"user_id", "item_id", "rating"});
    if (!sheet.ok()) return sheet.status();
    std::vector<Rating> ratings;
    for (int64_t row = 0; row < sheet->rows(); ++row) {
      const auto fields = sheet->Row(row);
      if (!fields.ok()) return fields.status();
      const auto rating = sheet->Number(row, (*fields)[2]);
      if (!rating.ok()) return rating.status();
      const int32_t user = vocabulary_[kUser].Find((*fields)[0]),
                    item = vocabulary_[kItem].Find((*fields)[1]);
      if (user < 0)
        return sheet->Error(
            row, absl::StrCat("user_id ", std::string((*fields)[0]), " is not in the .user file"));
      if (item < 0)
        return sheet->Error(
            row, absl::StrCat("item_id ", std::string((*fields)[1]), " is not in the .item file"));
      ratings.push_back({user, item, *rating >= 4 ? 1.0f : 0.0f});
    }
    const int64_t held_out = sheet->rows() / kHeldOutEvery;
    for (int64_t i = 0; i < sheet->rows(); ++i) {
      const bool test = Permute(i, sheet->rows(), data_->seed_) < held_out;
      (test ? data_->test_ : data_->train_).push_back(ratings[i]);
    }
    if (held_out > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        directory, ": ", sheet->rows(), " ratings; at least ", kHeldOutEvery, " are needed"));
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

absl::StatusOr<std::unique_ptr<MovieLens>> MovieLens::Open(const std::string& directory,
                                                           uint64_t seed) {
  std::unique_ptr<MovieLens> data(new MovieLens);
  data->seed_ = seed;
  Loader loader(data.get());
  if (auto s = loader.LoadUsers(directory); !s.ok()) return s;
  if (auto s = loader.LoadItems(directory); !s.ok()) return s;
  if (auto s = loader.LoadRatings(directory); !s.ok()) return s;
  loader.Describe();
  return data;
}

void MovieLens::Begin(Batch* batch) const {
  batch->Clear(info_);
  for (int f : {kGenres, kTitle}) batch->features[f].row_splits.push_back(0);
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
    column.row_splits.push_back(static_cast<int32_t>(column.ids.size()));
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
  if (first < 0 || count < 0 || first + count > test_size()) {
    return absl::OutOfRangeError(absl::StrCat("held-out examples [", first, ", ", first + count,
                                              "): there are ", test_size()));
  }
  Begin(batch);
  for (int64_t i = first; i < first + count; ++i) Append(test_[i], batch);
  return absl::OkStatus();
}

}  // namespace emberd::demo
