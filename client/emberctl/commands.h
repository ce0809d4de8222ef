// The commands of emberctl. Each prints its result and returns why it could not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/emberctl/session.h"
#include "emberd/v1/embedding_service.pb.h"

namespace emberd::emberctl {

// Coordinator, shards and models. UNAVAILABLE, after printing, if a shard does not answer.
absl::Status ShowStatus(Session& session);

absl::StatusOr<v1::DescribeModelResponse> FetchModel(Session& session, const std::string& name);

// Tables of one model, or of all if `model` is empty.
absl::Status ListTables(Session& session, const std::string& model);
// Stacks, tables and features of a model, and where they lie.
absl::Status Describe(Session& session, const std::string& model);
// Declares the model of a config file.
absl::Status Declare(Session& session, const std::string& path);

struct RowsTarget {
  std::string model;
  std::string table;
  std::string slot;  // empty: the weights
};
absl::Status GetRows(Session& session, const RowsTarget& target, const std::vector<int64_t>& ids);

// New values of one row.
struct RowText {
  int64_t id = 0;
  std::vector<float> values;
};
// "7=0.5,1,-2": row 7 becomes (0.5, 1, -2).
absl::StatusOr<RowText> ParseRow(const std::string& text);
absl::Status SetRows(Session& session, const RowsTarget& target, const std::vector<RowText>& rows);

// Checks a model or cluster config without a server. `kind` is "model", "cluster", or "auto": by
// its first field.
absl::Status Validate(Session& session, const std::string& path, const std::string& kind);

}  // namespace emberd::emberctl
