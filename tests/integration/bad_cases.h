// Requests that the server must refuse, each with the answer that it must give.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tests/testing/api.h"

namespace emberd::testing {

using Stub = v1::EmbeddingService::Stub;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr auto kInvalid = grpc::INVALID_ARGUMENT;
inline constexpr auto kRange = grpc::OUT_OF_RANGE;

// Limits of the cluster that the cases are made for.
inline constexpr char kStrictCluster[] =
    "budgets { bytes_per_sparsecore: 4194304 max_message_bytes: 1048576 max_batches: 8 }";

// The declared model, as config text: tables users (20 x 4, Adagrad), tags (12 x 4, Adagrad),
// cities (9 x 3, SGD), looked up by the features user, tag and city.
v1::ModelConfig StrictModel();

// user: dense; tag: ragged with weights; city: sparse. Three samples each.
v1::LookupRequest GoodLookup(uint64_t model_id);
// Gradients for all features of a GoodLookup, under the mutation ("bad-input", sequence).
v1::ApplyGradientsRequest GoodApply(uint64_t model_id, uint64_t batch_handle, uint64_t sequence);
v1::AssignRowsRequest GoodAssign(uint64_t model_id, uint64_t sequence);

// What a case works with.
struct BadCall {
  const Api& api;
  uint64_t model_id;
  uint64_t sequence;  // that no mutation has had yet; the next 99 are free too
};

struct BadCase {
  std::string name;
  grpc::StatusCode code;
  std::vector<std::string> words;  // all of them must be in the message
  std::function<grpc::Status(const BadCall&)> call;
};
inline std::ostream& operator<<(std::ostream& out, const BadCase& c) { return out << c.name; }

std::vector<BadCase> BadLookups();
std::vector<BadCase> BadApplies();
std::vector<BadCase> BadRows();    // ReadRows, AssignRows, ExportTable
std::vector<BadCase> BadModels();  // DeclareModel, DescribeModel, ReleaseBatch

}  // namespace emberd::testing
