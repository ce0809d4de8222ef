#include "server/checkpoint/diff.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "server/checkpoint/table_reader.h"

namespace emberd::server {
namespace {

constexpr int64_t kBlockFloats = int64_t{1} << 18;

// An array that both have.
struct Pair {
  v1::ArrayDiff diff;
  std::unique_ptr<TableReader> before;
  std::unique_ptr<TableReader> after;

  int64_t floats() const { return after->rows() * after->columns(); }
};

absl::Status AddPair(const CheckpointChain& before, const CheckpointChain& after,
                     const std::string& table, const std::string& slot, std::vector<Pair>* pairs) {
  Pair pair;
  pair.diff.set_table(table);
  pair.diff.set_slot(slot);
  auto reader = TableReader::Open(&before, table, slot);
  if (absl::IsNotFound(reader.status())) return absl::OkStatus();
  RETURN_IF_ERROR(reader.status());
  pair.before = *std::move(reader);
  ASSIGN_OR_RETURN(pair.after, TableReader::Open(&after, table, slot));
  pair.diff.set_rows(pair.after->rows());
  const bool same =
      pair.before->rows() == pair.after->rows() && pair.before->columns() == pair.after->columns();
  if (same) pairs->push_back(std::move(pair));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Pair>> Pairs(const CheckpointChain& before,
                                        const CheckpointChain& after) {
  std::vector<Pair> pairs;
  for (const v1::TableConfig& table : after.front().manifest().config().tables()) {
    RETURN_IF_ERROR(AddPair(before, after, table.name(), "", &pairs));
    for (const config::SlotInfo& slot : config::OptimizerSlots(table.optimizer())) {
      RETURN_IF_ERROR(AddPair(before, after, table.name(), slot.name, &pairs));
    }
  }
  return pairs;
}

// Infinite if one of them is no number.
double Difference(float a, float b) {
  const double difference = std::abs(static_cast<double>(a) - b);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

void CompareRows(const float* before, const float* after, int columns, v1::ArrayDiff* diff) {
  if (std::memcmp(before, after, columns * sizeof(float)) == 0) return;
  diff->set_rows_changed(diff->rows_changed() + 1);
  for (int c = 0; c < columns; ++c) {
    if (std::memcmp(before + c, after + c, sizeof(float)) == 0) continue;
    diff->set_max_difference(std::max(diff->max_difference(), Difference(before[c], after[c])));
  }
}

absl::Status Compare(Pair* pair, absl::FunctionRef<absl::Status(int64_t)> read) {
  const int columns = pair->after->columns();
  const int64_t block = std::max<int64_t>(1, kBlockFloats / columns);
  std::vector<float> before(block * columns);
  std::vector<float> after(block * columns);
  for (int64_t first = 0; first < pair->after->rows(); first += block) {
    const int64_t rows = std::min(block, pair->after->rows() - first);
    RETURN_IF_ERROR(pair->before->Read({.first = first, .count = rows}, before.data()));
    RETURN_IF_ERROR(pair->after->Read({.first = first, .count = rows}, after.data()));
    for (int64_t i = 0; i < rows; ++i) {
      CompareRows(before.data() + i * columns, after.data() + i * columns, columns, &pair->diff);
    }
    RETURN_IF_ERROR(read(rows * columns * static_cast<int64_t>(sizeof(float))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::DiffCheckpointsResponse> DiffCheckpoints(const CheckpointChain& before,
                                                            const CheckpointChain& after,
                                                            TransferProgress progress) {
  ASSIGN_OR_RETURN(std::vector<Pair> pairs, Pairs(before, after));
  int64_t total = 0;
  for (const Pair& pair : pairs) total += pair.floats() * static_cast<int64_t>(sizeof(float));
  int64_t bytes = 0;
  v1::DiffCheckpointsResponse response;
  response.set_config_difference(config::FirstDifference(before.front().manifest().config(),
                                                         after.front().manifest().config()));
  for (Pair& pair : pairs) {
    RETURN_IF_ERROR(Compare(&pair, [&](int64_t more) { return progress(bytes += more, total); }));
    *response.add_arrays() = std::move(pair.diff);
    pair.before.reset();  // and their windows
    pair.after.reset();
  }
  return response;
}

}  // namespace emberd::server
