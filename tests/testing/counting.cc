#include "tests/testing/counting.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/testing/await.h"

namespace emberd::testing {
namespace {

constexpr int64_t kRows = 48;  // on all partitions of 16, three times
constexpr int64_t kColumns = 4;
constexpr int kRanks = 2;
constexpr int64_t kBound = 2;  // of the BOUNDED group
// No rank is further ahead than this.
constexpr int64_t kMostAhead = kBound + 3;
constexpr char kSync[] = "sync";
constexpr char kLoose[] = "loose";
constexpr const char* kTables[] = {"unary0", "unary1", "assigned", "sync", "loose0", "loose1"};

std::vector<int64_t> Ids(int64_t begin, int64_t end) {
  std::vector<int64_t> ids(end - begin);
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

// Ids of one table, and none of the others. `ids` must outlive it.
std::vector<client::FeatureIds> FeaturesOf(const std::string& table,
                                           const std::vector<int64_t>& ids) {
  std::vector<client::FeatureIds> features;
  for (const char* name : kTables) {
    const absl::Span<const int64_t> mine =
        name == table ? absl::MakeConstSpan(ids) : absl::Span<const int64_t>();
    features.push_back({name, client::DenseIds{mine, 1}});
  }
  return features;
}

}  // namespace

client::ModelDescription CountingModel(const std::string& name) {
  client::ModelDescription model;
  model.name = name;
  model.optimizer = {"sgd", {{"learning_rate", 1.0}}};
  for (const char* table_name : kTables) {
    client::TableDescription& table = model.tables.emplace_back();
    table.name = table_name;
    table.vocabulary_size = kRows;
    table.embedding_dim = kColumns;
    table.initializer = client::Initializer::Zeros();
    model.features.push_back({table_name, table_name, kRows});
  }
  return model;
}

absl::StatusOr<Counts> ReadCounts(client::Client& client, const client::Model& model) {
  Counts counts;
  for (const client::TableInfo& table : model.tables) {
    ASSIGN_OR_RETURN(const client::RowValues rows,
                     client.ReadRows(model, table.name, Ids(0, table.vocabulary_size)));
    for (size_t i = 0; i < rows.values.size(); ++i) {
      if (rows.values[i] == rows.values[0]) continue;
      return absl::DataLossError(absl::StrCat("table ", table.name, ": row 0 has seen ",
                                              rows.values[0], " updates, row ", i / kColumns, " ",
                                              rows.values[i]));
    }
    counts[table.name] = static_cast<int64_t>(rows.values[0]);
  }
  return counts;
}

int64_t SumOf(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0},
                         [](int64_t sum, const auto& count) { return sum + count.second; });
}

absl::Status CheckMoment(const Counts& counts, const client::CheckpointInfo& info) {
  if (SumOf(counts) != info.changes) {
    return absl::DataLossError(absl::StrCat("the rows have seen ", SumOf(counts),
                                            " updates, the checkpoint says ", info.changes));
  }
  std::map<std::string, int64_t> steps;
  for (const client::GroupStep& group : info.groups) steps[group.group] = group.next_step;
  for (const auto& [group, table] : {std::pair(std::string(kSync), std::string("sync")),
                                     {absl::StrCat(kLoose, "#0"), "loose0"},
                                     {absl::StrCat(kLoose, "#1"), "loose1"}}) {
    if (counts.at(table) == steps[group]) continue;
    return absl::DataLossError(absl::StrCat("the rows of table ", table, " have seen ",
                                            counts.at(table), " steps, group ", group,
                                            " goes on from step ", steps[group]));
  }
  return absl::OkStatus();
}

// Where its ranks are, so that they stop at the same step.
struct CountingTrainers::Group {
  std::string name;
  client::Consistency consistency;
  std::atomic<int64_t> furthest{0};
  std::atomic<int64_t> end{std::numeric_limits<int64_t>::max()};
};

CountingTrainers::CountingTrainers(const Cluster& cluster, int coordinator, client::Model model,
                                   const Counts& begin, const std::string& name,
                                   absl::Duration pause)
    : model_(std::move(model)),
      client_options_([&] {
        client::ClientOptions options = cluster.client_options();
        options.addresses = {cluster.address(coordinator)};
        return options;
      }()),
      pause_(pause) {
  for (const char* table : kTables) {
    trainers_.push_back(std::make_unique<Trainer>());
    trainers_.back()->table = table;
    trainers_.back()->made = begin.at(table);
  }
  for (const auto& [group, consistency] : {std::pair(kSync, client::Consistency::kSync),
                                           std::pair(kLoose, client::Consistency::kBounded)}) {
    groups_.push_back(std::make_unique<Group>());
    groups_.back()->name = group;
    groups_.back()->consistency = consistency;
  }
  const auto unary = [this](auto& client, auto& trainer) { return TrainUnary(client, trainer); };
  Start("unary0", absl::StrCat(name, "-0"), unary);
  Start("unary1", absl::StrCat(name, "-1"), unary);
  Start("assigned", absl::StrCat(name, "-2"),
        [this](auto& client, auto& trainer) { return Assign(client, trainer); });
  Start("sync", "", [this](client::Client& client, Trainer& trainer) {
    // The second rank on a thread of its own.
    absl::Status second;
    std::thread other([&] {
      Trainer uncounted;
      uncounted.table = trainer.table;
      auto connected = client::Client::Connect(client_options_);
      second =
          connected.ok() ? TrainRank(**connected, uncounted, *groups_[0], 1) : connected.status();
    });
    absl::Status first = TrainRank(client, trainer, *groups_[0], 0);
    other.join();
    return first.ok() ? second : first;
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    Start(absl::StrCat("loose", rank), "", [this, rank](auto& client, auto& trainer) {
      return TrainRank(client, trainer, *groups_[1], rank);
    });
  }
}

CountingTrainers::~CountingTrainers() { Stop().IgnoreError(); }

template <typename Work>
void CountingTrainers::Start(const std::string& table, const std::string& client_id,
                             const Work& work) {
  const auto found = std::find_if(trainers_.begin(), trainers_.end(),
                                  [&](const auto& trainer) { return trainer->table == table; });
  Trainer& trainer = **found;
  trainer.thread = std::thread([this, client_id, work, &trainer] {
    client::ClientOptions options = client_options_;
    options.client_id = client_id;
    auto client = client::Client::Connect(options);
    const absl::Status status = client.ok() ? work(**client, trainer) : client.status();
    const absl::MutexLock lock(&mutex_);
    if (error_.ok()) error_ = Annotate(status, absl::StrCat("trainer of ", trainer.table));
  });
}

absl::Status CountingTrainers::TrainUnary(client::Client& client, Trainer& trainer) {
  const std::vector<int64_t> ids = Ids(0, kRows);
  const std::vector<float> gradient(kRows * kColumns, -1.0f);
  for (; !stopping_; absl::SleepFor(pause_)) {
    ASSIGN_OR_RETURN(const auto found, client.Lookup(model_, FeaturesOf(trainer.table, ids)));
    ASSIGN_OR_RETURN(
        const client::ApplyResult applied,
        client.ApplyGradients(model_, found.batch, {{trainer.table, gradient, kRows}}));
    (void)applied;
    ++trainer.made;
  }
  return absl::OkStatus();
}

absl::Status CountingTrainers::Assign(client::Client& client, Trainer& trainer) {
  const std::vector<int64_t> ids = Ids(0, kRows);
  for (; !stopping_; absl::SleepFor(pause_)) {
    const std::vector<float> values(kRows * kColumns, static_cast<float>(trainer.made + 1));
    RETURN_IF_ERROR(client.AssignRows(model_, trainer.table, ids, values).status());
    ++trainer.made;
  }
  return absl::OkStatus();
}

absl::Status CountingTrainers::TrainRank(client::Client& client, Trainer& trainer, Group& group,
                                         int rank) {
  const bool sync = group.consistency == client::Consistency::kSync;
  client::TrainOptions options{.group = group.name,
                               .rank = rank,
                               .size = kRanks,
                               .consistency = group.consistency,
                               .staleness_bound = sync ? 0 : kBound};
  ASSIGN_OR_RETURN(const auto stream, client.Train(model_, options));
  // Ranks of SYNC share the rows.
  const std::vector<int64_t> ids =
      sync ? Ids(kRows * rank / kRanks, kRows * (rank + 1) / kRanks) : Ids(0, kRows);
  const std::vector<float> gradient(ids.size() * kColumns, -1.0f);
  const auto samples = static_cast<int64_t>(ids.size());
  for (int64_t step = stream->next_step(); step < group.end; ++step) {
    for (int64_t seen = group.furthest;
         seen < step && !group.furthest.compare_exchange_weak(seen, step);) {
    }
    RETURN_IF_ERROR(stream->SendLookup(step, FeaturesOf(trainer.table, ids)));
    RETURN_IF_ERROR(stream->ReceiveLookup().status());
    RETURN_IF_ERROR(stream->SendUpdate(step, {{trainer.table, gradient, samples}}));
    RETURN_IF_ERROR(stream->ReceiveUpdate().status());
    trainer.made = step + 1;
    absl::SleepFor(pause_);
  }
  return stream->Finish();
}

bool CountingTrainers::Await(int64_t updates) {
  const Counts begin = made();
  const auto error = [&] {
    const absl::MutexLock lock(&mutex_);
    return error_;
  };
  const bool done = Eventually([&] {
    const Counts now = made();
    return !error().ok() || std::all_of(now.begin(), now.end(), [&](const auto& count) {
      return count.second >= begin.at(count.first) + updates;
    });
  });
  return done && error().ok();
}

absl::Status CountingTrainers::Stop() {
  stopping_ = true;
  for (const auto& group : groups_) group->end = group->furthest + kMostAhead;
  for (const auto& trainer : trainers_) {
    if (trainer->thread.joinable()) trainer->thread.join();
  }
  const absl::MutexLock lock(&mutex_);
  return error_;
}

Counts CountingTrainers::made() const {
  Counts counts;
  for (const auto& trainer : trainers_) counts[trainer->table] = trainer->made;
  return counts;
}

}  // namespace emberd::testing
