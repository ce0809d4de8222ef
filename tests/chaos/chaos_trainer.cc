#include "tests/chaos/chaos_trainer.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "tests/testing/group_training.h"

namespace emberd::chaos {
namespace {

constexpr int kColumns = 4;
// Longer than a pause that a busy machine makes, shorter than most pauses that the test makes.
constexpr absl::Duration kStepTimeout = absl::Seconds(5);

constexpr absl::Duration kPause = absl::Milliseconds(50);

bool MayPass(const absl::Status& status) {
  return absl::IsAborted(status) || absl::IsUnavailable(status) ||
         absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsNotFound(status) ||         // a batch that went with its coordinator
         absl::IsResourceExhausted(status);  // a full disk
}

// What an update adds to a row. A planted mistake comes in a step that every run makes.
float GainOf(Plant plant, int64_t step) {
  if (plant == Plant::kNone || step != kStride / 2) return 1;
  return plant == Plant::kLost ? 0 : 2;
}

absl::Status CountSteps(client::TrainStream& stream, const TrainerOptions& options, int64_t begin,
                        int64_t end) {
  const bool pipelined = options.mode == Mode::kPipelined;
  std::vector<int64_t> ids(kRowsPerRank);
  std::iota(ids.begin(), ids.end(), int64_t{options.rank} * kRowsPerRank);
  const auto look_up = [&](int64_t step) {
    return stream.SendLookup(step, {{{"row", client::DenseIds{ids}}}});
  };
  RETURN_IF_ERROR(look_up(begin));
  for (int64_t step = begin; step < end; ++step) {
    RETURN_IF_ERROR(stream.ReceiveLookup().status());
    if (step + 1 < end) RETURN_IF_ERROR(look_up(step + 1));
    const std::vector<float> gradients(kRowsPerRank * kColumns, -GainOf(options.plant, step));
    RETURN_IF_ERROR(stream.SendUpdate(step, {{{"row", gradients, kRowsPerRank}}}));
    if (pipelined && step + 1 == end) break;  // answered when the stream ends
    RETURN_IF_ERROR(stream.ReceiveUpdate().status());
  }
  return absl::OkStatus();
}

// One update, until it is acknowledged: the same number again after every failure, at each
// coordinator in turn, with a new batch where the old one is gone.
absl::Status CountOnce(client::Client& client, const client::Model& model,
                       const TrainerOptions& options, int64_t step) {
  std::vector<int64_t> ids(kRowsPerRank);
  std::iota(ids.begin(), ids.end(), int64_t{options.rank} * kRowsPerRank);
  const std::vector<float> gradients(kRowsPerRank * kColumns, -GainOf(options.plant, step));
  const auto look_up = [&] {
    return client.Lookup(model, {{"row", client::DenseIds{ids}}}, {.deadline = kStepTimeout});
  };
  ASSIGN_OR_RETURN(client::LookupResult found, look_up());
  while (true) {
    client::ApplyOptions apply;
    apply.sequence = static_cast<uint64_t>(step) + 1;
    apply.deadline = kStepTimeout;
    const absl::Status status =
        client.ApplyGradients(model, found.batch, {{"row", gradients, kRowsPerRank}}, apply)
            .status();
    if (status.ok() || !MayPass(status)) return status;
    std::printf("step %lld: %s\n", static_cast<long long>(step), status.ToString().c_str());
    std::fflush(stdout);
    absl::SleepFor(kPause);
    if (absl::IsNotFound(status)) {
      ASSIGN_OR_RETURN(found, look_up());
    } else {
      const auto coordinators = static_cast<int>(options.addresses.size());
      found.batch.coordinator = (found.batch.coordinator + 1) % coordinators;
    }
  }
}

// Of its progress, in the control folder; also its name as a client.
std::string FileOf(const TrainerOptions& options) {
  return absl::StrCat(NameOf(options.mode), ".", options.rank);
}

int64_t EndOf(const TrainerOptions& options) {
  const int64_t end = ReadNumber(options.control_folder, EndFileOf(options.mode));
  return end < 0 ? std::numeric_limits<int64_t>::max() : end;
}

// Joins the group and trains until the end or a failure.
absl::Status TrainOnce(const TrainerOptions& options, client::Client& client,
                       const client::Model& model, int64_t* next_step) {
  client::TrainOptions train;
  train.group = NameOf(options.mode);
  train.rank = options.rank;
  train.size = options.size;
  train.step_timeout = kStepTimeout;
  train.pipelined = options.mode == Mode::kPipelined;
  if (options.mode == Mode::kBounded) {
    train.consistency = client::Consistency::kBounded;
    train.staleness_bound = kStalenessBound;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<client::TrainStream> stream, client.Train(model, train));
  *next_step = stream->next_step();
  while (*next_step < EndOf(options)) {
    // Strides begin at multiples of their length, so that all ranks of a group end together.
    const int64_t end = (*next_step / kStride + 1) * kStride;
    if (options.mode == Mode::kSync) {
      RETURN_IF_ERROR(testing::RunSteps(*stream, options.rank, options.size, *next_step, end,
                                        /*pipelined=*/false));
    } else {
      RETURN_IF_ERROR(CountSteps(*stream, options, *next_step, end));
    }
    if (train.pipelined) {  // the last update comes with the end of the stream
      RETURN_IF_ERROR(stream->Finish());
      *next_step = end;
      return absl::OkStatus();
    }
    *next_step = end;
    WriteNumber(options.control_folder, FileOf(options), end);
  }
  return stream->Finish();
}

// Trains from *next_step, which it keeps up to date, until the end or a failure.
absl::Status TrainAlone(const TrainerOptions& options, client::Client& client,
                        const client::Model& model, int64_t* next_step) {
  for (; *next_step < EndOf(options); ++*next_step) {
    RETURN_IF_ERROR(CountOnce(client, model, options, *next_step));
    if ((*next_step + 1) % kStride == 0) {
      WriteNumber(options.control_folder, FileOf(options), *next_step + 1);
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<Mode> ModeOf(const std::string& name) {
  for (const Mode mode : {Mode::kSync, Mode::kPipelined, Mode::kBounded, Mode::kUnary}) {
    if (NameOf(mode) == name) return mode;
  }
  return std::nullopt;
}

std::string NameOf(Mode mode) {
  if (mode == Mode::kSync) return "sync";
  if (mode == Mode::kPipelined) return "pipelined";
  return mode == Mode::kBounded ? "bounded" : "unary";
}

std::string EndFileOf(Mode mode) { return absl::StrCat(NameOf(mode), ".end"); }

client::ModelDescription CountingModel(const std::string& name, int ranks) {
  client::ModelDescription model;
  model.name = name;
  client::TableDescription& table = model.tables.emplace_back();
  table.name = "rows";
  table.vocabulary_size = int64_t{ranks} * kRowsPerRank;
  table.embedding_dim = kColumns;
  table.combiner = client::Combiner::kSum;
  table.initializer = client::Initializer::Zeros();
  table.optimizer = client::Optimizer{"sgd", {{"learning_rate", 1.0}}};
  model.features = {{"row", "rows", kRowsPerRank}};
  return model;
}

client::ModelDescription ModelOf(Mode mode, int ranks) {
  if (mode == Mode::kSync) return testing::GroupModel(NameOf(mode), /*limit=*/4);
  return CountingModel(NameOf(mode), ranks);
}

absl::Status Train(const TrainerOptions& options) {
  client::ClientOptions client_options;
  client_options.addresses = options.addresses;
  client_options.connect_timeout = absl::Minutes(1);
  if (options.mode == Mode::kUnary) client_options.client_id = FileOf(options);
  ASSIGN_OR_RETURN(const std::unique_ptr<client::Client> client,
                   client::Client::Connect(client_options));
  auto model = client->DeclareModel(ModelOf(options.mode, options.size));
  while (!model.ok() && MayPass(model.status())) {
    absl::SleepFor(kPause);
    model = client->DeclareModel(ModelOf(options.mode, options.size));
  }
  if (!model.ok()) return model.status();
  // A group knows its step. A trainer alone begins where it last wrote that it was, and what it
  // sends again is answered from the record.
  int64_t next_step = std::max<int64_t>(0, ReadNumber(options.control_folder, FileOf(options)));
  const auto train = options.mode == Mode::kUnary ? TrainAlone : TrainOnce;
  while (next_step < EndOf(options)) {
    const absl::Status status = train(options, *client, *model, &next_step);
    if (status.ok()) {
      WriteNumber(options.control_folder, FileOf(options), next_step);
      continue;
    }
    std::printf("step %lld: %s\n", static_cast<long long>(next_step), status.ToString().c_str());
    std::fflush(stdout);
    if (!MayPass(status)) return status;
    absl::SleepFor(kPause);
  }
  return absl::OkStatus();
}

int64_t ReadNumber(const std::string& folder, const std::string& name) {
  std::ifstream file(absl::StrCat(folder, "/", name));
  int64_t number = -1;
  file >> number;
  return number;
}

void WriteNumber(const std::string& folder, const std::string& name, int64_t number) {
  const std::string path = absl::StrCat(folder, "/", name);
  std::ofstream(path + ".new") << number << "\n";
  std::filesystem::rename(path + ".new", path);
}

}  // namespace emberd::chaos
