// What the tables must be at the end.
#include <algorithm>
#include <filesystem>

#include "base/status.h"
#include "tests/chaos/chaos.h"
#include "tests/testing/process.h"
#include "tests/testing/training.h"

namespace emberd::chaos {

absl::Status Chaos::CheckCounts(client::Client& client, Mode mode) {
  ASSIGN_OR_RETURN(const client::Model model, client.DescribeModel(NameOf(mode)));
  const int64_t end = ends_.at(mode);
  std::vector<int64_t> most(kRanks, 0), least(kRanks, end);
  RETURN_IF_ERROR(client.ExportTable(
      model, "rows", [&](int64_t first_row, absl::Span<const float> values, int64_t dim) {
        for (int64_t i = 0; i * dim < static_cast<int64_t>(values.size()); ++i) {
          const int64_t rank = (first_row + i) / kRowsPerRank;
          const auto count = static_cast<int64_t>(values[i * dim]);
          most[rank] = std::max(most[rank], count);
          least[rank] = std::min(least[rank], count);
          if (count < end) ++damage_.lost;
          if (count > end) ++damage_.doubled;
        }
        return absl::OkStatus();
      }));
  for (int rank = 0; rank < kRanks; ++rank) {
    Say(absl::StrCat(NameOf(mode), ".", rank, ": rows counted ", least[rank], " to ", most[rank],
                     " of ", end, " updates"));
    if (least[rank] != most[rank]) ++damage_.torn;
  }
  return absl::OkStatus();
}

absl::Status Chaos::CheckDigest(client::Client& client) {
  ASSIGN_OR_RETURN(const client::Model model, client.DescribeModel(NameOf(Mode::kSync)));
  ASSIGN_OR_RETURN(const std::string digest, testing::Digest(client, model));
  const int64_t end = ends_.at(Mode::kSync);
  Say(absl::StrCat("the same ", end, " steps, one trainer, undisturbed"));
  ASSIGN_OR_RETURN(
      const auto calm,
      testing::Cluster::Start({.shards = 1, .sparsecores_per_shard = 8, .embedded = true}));
  const std::string folder = absl::StrCat(folder_, "/calm");
  std::filesystem::create_directory(folder);
  WriteNumber(folder, EndFileOf(Mode::kSync), end);
  RETURN_IF_ERROR(Train({.size = 1, .addresses = {calm->address()}, .control_folder = folder}));
  ASSIGN_OR_RETURN(const auto calm_client, client::Client::Connect(calm->client_options()));
  ASSIGN_OR_RETURN(const client::Model calm_model, calm_client->DescribeModel(NameOf(Mode::kSync)));
  ASSIGN_OR_RETURN(const std::string expected, testing::Digest(*calm_client, calm_model));
  Say(absl::StrCat("table_sha256=", digest, " undisturbed=", expected));
  if (digest != expected) ++damage_.torn;
  return absl::OkStatus();
}

absl::Status Chaos::Finish() {
  const std::vector<int64_t> progress = Progress();
  for (size_t i = 0; i < trainers_.size(); ++i) {
    int64_t& end = ends_[trainers_[i].mode];
    // Far enough ahead that no rank gets there before it has been told.
    end = std::max(end, progress[i] + 8 * kStride);
  }
  std::string steps;
  for (const auto& [mode, end] : ends_) {
    WriteNumber(folder_, EndFileOf(mode), end);
    absl::StrAppend(&steps, steps.empty() ? "" : ", ", NameOf(mode), " to step ", end);
  }
  Say(absl::StrCat("every group trains on: ", steps));
  for (Trainer& trainer : trainers_) {
    const bool in_time = trainer.process->WaitFor(kPatience + absl::Minutes(10));
    if (in_time && trainer.process->exit_status() == 0) continue;
    ++damage_.stuck;
    return absl::InternalError(
        absl::StrCat("a trainer did not end as it should:\n", testing::ReadFile(trainer.log_path)));
  }
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(cluster_->client_options()));
  RETURN_IF_ERROR(CheckCounts(*client, Mode::kPipelined));
  RETURN_IF_ERROR(CheckCounts(*client, Mode::kBounded));
  RETURN_IF_ERROR(CheckCounts(*client, Mode::kUnary));
  return CheckDigest(*client);
}

}  // namespace emberd::chaos
