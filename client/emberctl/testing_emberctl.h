// Runs emberctl in a test, and answers to GetStats for it.
#pragma once

#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "base/testing/paths.h"
#include "client/emberctl/emberctl.h"
#include "emberd/v1/admin_service.pb.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {

struct Outcome {
  int code = -1;
  std::string out, err;
};

inline Outcome Emberctl(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"emberctl"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  Outcome outcome;
  outcome.code = Run(static_cast<int>(argv.size()), argv.data(), out, err);
  outcome.out = out.str();
  outcome.err = err.str();
  return outcome;
}

// Path of a file of this test with that text.
inline std::string WriteTestFile(const std::string& name, const std::string& text) {
  const std::string path = TempPath(name);
  std::ofstream(path) << text;
  return path;
}

// `count` observations, half of them up to 1 ms, the others up to 10 ms.
inline void FillDistribution(int64_t count, v1::Distribution* to) {
  to->set_count(count);
  to->set_sum(static_cast<double>(count) * 0.004);
  const double uppers[] = {0.001, 0.01, std::numeric_limits<double>::infinity()};
  for (const double upper : uppers) {
    v1::Distribution::Bucket* bucket = to->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(upper == uppers[0] ? count / 2 : count);
  }
}

// A coordinator `seconds` after its start that answered 100 lookups a second, with an error every
// second.
inline v1::GetStatsResponse StatsAfter(int64_t seconds) {
  v1::GetStatsResponse stats;
  stats.set_time_ms(1'700'000'000'000 + seconds * 1000);
  stats.set_uptime_ms(seconds * 1000);
  stats.set_in_flight_requests(3);
  stats.set_in_flight_bytes(2048);
  stats.set_in_flight_budget_bytes(int64_t{4} << 30);
  stats.set_train_streams(2);
  stats.set_batches(5);
  stats.set_batch_bytes(3 << 20);
  stats.set_batch_budget_bytes(int64_t{1} << 30);
  v1::MethodStats* method = stats.add_methods();
  method->set_method("EmbeddingService/Lookup");
  (*method->mutable_codes())["OK"] = 99 * seconds;
  (*method->mutable_codes())["UNAVAILABLE"] = seconds;
  FillDistribution(100 * seconds, method->mutable_seconds());
  method->set_request_bytes(10'240 * seconds);
  method->set_response_bytes(1'048'576 * seconds);
  method = stats.add_methods();
  method->set_method("EmbeddingService/ReadRows");
  (*method->mutable_codes())["OK"] = 1;
  FillDistribution(1, method->mutable_seconds());
  v1::StageStats* stage = stats.add_stages();
  stage->set_stage("preprocess");
  FillDistribution(100 * seconds, stage->mutable_seconds());
  stats.add_stages()->set_stage("commit");
  v1::ModelStats* model = stats.add_models();
  model->set_model("ads");
  model->set_examples(51'200 * seconds);
  v1::StackStats* stack = stats.add_stacks();
  stack->set_model("ads");
  stack->set_stack("wide");
  stack->set_batches(100 * seconds);
  stack->set_ids(1000 * seconds);
  stack->set_unique_ids(250 * seconds);
  stack->set_max_ids_per_partition(64);
  stack->set_largest_ids_per_partition(80);
  stack->set_largest_unique_ids_per_partition(20);
  v1::GroupStats* group = stats.add_groups();
  group->set_model("ads");
  group->set_group("run-7");
  group->set_updates(50 * seconds);
  group->set_wait_seconds(0.25 * static_cast<double>(seconds));
  (*group->mutable_last_arrivals())["0"] = 10 * seconds;
  (*group->mutable_last_arrivals())["1"] = 30 * seconds;
  v1::ShardStatus* shard = stats.add_shards();
  shard->set_address("127.0.0.1:7001");
  shard->set_reachable(true);
  shard->set_incarnation(77);
  shard->set_uptime_ms(seconds * 1000);
  shard->set_rows_gathered(2000 * seconds);
  shard->set_rows_updated(500 * seconds);
  shard->set_table_bytes(int64_t{96} << 20);
  shard->set_table_budget_bytes(int64_t{100} << 20);
  shard->set_resident_bytes(int64_t{128} << 20);
  shard->set_huge_page_bytes(int64_t{64} << 20);
  shard->set_queued(4);
  shard->set_batches(5);
  v1::HotRow* row = shard->add_hot_rows();
  row->set_model("ads");
  row->set_table("users");
  row->set_id(42);
  row->set_lookups(900);
  row->set_error(10);
  row->set_table_lookups(1000);
  shard = stats.add_shards();
  shard->set_index(1);
  shard->set_address("127.0.0.1:7002");
  shard->set_error("connection refused");
  return stats;
}

}  // namespace emberd::emberctl
