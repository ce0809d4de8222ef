#include "tests/golden/jax_case.h"

#include <bit>
#include <exception>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/plan/plan.h"
#include "preprocess/testing/numberings.h"
#include "tests/golden/jax_case_kinds.h"

namespace emberd::preprocess {
namespace {

using nlohmann::json;

std::string Hex(uint64_t value) { return absl::StrFormat("0x%016x", value); }

json HashCase(const json& input) {
  json hashes = json::array();
  for (const json& id : input.at("col_ids")) {
    const uint64_t hash = HashStackedId(id.get<int32_t>());
    hashes.push_back({{"col_id", id}, {"highwayhash64", Hex(hash)}, {"bucket", hash % kBuckets}});
  }
  return {{"hash", hashes}};
}

// JAX's sort key: 6 bits of bucket, the stacked id with its partition turned to the top, 26 bits of
// position.
uint64_t JaxSortKey(uint32_t col_id, uint64_t data, int partition_bits, bool with_bucket) {
  const uint64_t bucket = with_bucket ? HashStackedId(static_cast<int32_t>(col_id)) % kBuckets : 0;
  return bucket << 58 | static_cast<uint64_t>(std::rotr(col_id, partition_bits)) << 26 |
         (data & ((uint64_t{1} << 26) - 1));
}

json KeysCase(const json& input) {
  json keys = json::array();
  for (json key : input.at("keys")) {
    key["key"] = Hex(JaxSortKey(key.at("col_id"), key.at("data"), key.at("num_scs_bit"),
                                key.at("create_buckets")));
    keys.push_back(std::move(key));
  }
  json colids = json::array();
  for (json id : input.at("colids")) {
    const int64_t partitions = id.at("num_scs");
    if (partitions < 1) continue;
    const RowPlacement placement = {partitions, id.at("col_shift").get<int64_t>() % partitions,
                                    id.at("col_offset").get<int64_t>() / partitions};
    id["col_id"] = StackedId(placement, id.at("embedding_id"));
    colids.push_back(std::move(id));
  }
  return {{"keys", keys}, {"colids", colids}};
}

json SplitCase(const json& input) {
  json splits = json::array();
  for (json one : input.at("cases")) {
    const auto counts = one.at("counts").get<std::vector<int32_t>>();
    if (counts.size() != kBuckets) continue;
    const CutSet cuts = JaxCuts(counts.data(), one.at("limit").get<int64_t>());
    one["split"] = Hex(JaxMask(cuts));
    one["num_minibatches"] = MinibatchCount(cuts);
    json map = json::array();
    for (int b = 0; b < kBuckets; ++b) map.push_back(MinibatchOf(cuts, b));
    one["bucket_to_minibatch"] = std::move(map);
    splits.push_back(std::move(one));
  }
  return {{"split", splits}};
}

}  // namespace

absl::StatusOr<json> RunJaxCase(const json& test_case, const JaxCaseOptions& options) {
  // nlohmann and number parsing report missing and mistyped fields by exceptions; they end here.
  try {
    const auto kind = test_case.at("kind").get<std::string>();
    const json& input = test_case.at("input");
    if (kind == "hash") return HashCase(input);
    if (kind == "keys") return KeysCase(input);
    if (kind == "split") return SplitCase(input);
    if (kind == "stacking") return JaxStackingCase(input);
    if (kind == "preprocess") return JaxPreprocessCase(input, options);
    return absl::InvalidArgumentError(absl::StrCat(
        "kind: '", kind, "' is not allowed; it must be preprocess, stacking, hash, keys or split"));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("malformed case: ", error.what()));
  }
}

}  // namespace emberd::preprocess
