#include "server/status_page/figures.h"

#include <algorithm>
#include <map>

namespace emberd::status_page {
namespace {

void AddTo(v1::Distribution* sum, const v1::Distribution& more) {
  std::map<double, int64_t> buckets;
  for (const auto* from : {static_cast<const v1::Distribution*>(sum), &more}) {
    for (const auto& bucket : from->buckets()) buckets[bucket.upper()] += bucket.count();
  }
  sum->set_count(sum->count() + more.count());
  sum->set_sum(sum->sum() + more.sum());
  sum->clear_buckets();
  for (const auto& [upper, count] : buckets) {
    auto* const bucket = sum->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
}

// The element of `all` for which `is` holds, or a new one.
template <typename Message, typename Is>
Message* FindOrAdd(google::protobuf::RepeatedPtrField<Message>* all, Is is) {
  const auto found = std::find_if(all->begin(), all->end(), is);
  return found == all->end() ? all->Add() : &*found;
}

void AddMethods(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  for (const v1::MethodStats& method : more.methods()) {
    v1::MethodStats* const to = FindOrAdd(sum->mutable_methods(), [&](const v1::MethodStats& one) {
      return one.method() == method.method();
    });
    to->set_method(method.method());
    for (const auto& [code, calls] : method.codes()) (*to->mutable_codes())[code] += calls;
    AddTo(to->mutable_seconds(), method.seconds());
    to->set_request_bytes(to->request_bytes() + method.request_bytes());
    to->set_response_bytes(to->response_bytes() + method.response_bytes());
  }
  for (const v1::StageStats& stage : more.stages()) {
    v1::StageStats* const to = FindOrAdd(sum->mutable_stages(), [&](const v1::StageStats& one) {
      return one.stage() == stage.stage();
    });
    to->set_stage(stage.stage());
    AddTo(to->mutable_seconds(), stage.seconds());
  }
}

void AddModels(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  for (const v1::StackStats& stack : more.stacks()) {
    v1::StackStats* const to = FindOrAdd(sum->mutable_stacks(), [&](const v1::StackStats& one) {
      return one.model() == stack.model() && one.stack() == stack.stack();
    });
    v1::StackStats both = stack;  // limits are the same everywhere
    both.set_batches(to->batches() + stack.batches());
    both.set_ids(to->ids() + stack.ids());
    both.set_unique_ids(to->unique_ids() + stack.unique_ids());
    both.set_dropped_ids(to->dropped_ids() + stack.dropped_ids());
    both.set_largest_ids_per_partition(
        std::max(to->largest_ids_per_partition(), stack.largest_ids_per_partition()));
    both.set_largest_unique_ids_per_partition(
        std::max(to->largest_unique_ids_per_partition(), stack.largest_unique_ids_per_partition()));
    *to = std::move(both);
  }
  for (const v1::ModelStats& model : more.models()) {
    v1::ModelStats* const to = FindOrAdd(sum->mutable_models(), [&](const v1::ModelStats& one) {
      return one.model() == model.model();
    });
    to->set_model(model.model());
    to->set_examples(to->examples() + model.examples());
  }
}

// A group may have ranks on several coordinators.
void AddGroups(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  for (const v1::GroupStats& group : more.groups()) {
    v1::GroupStats* const to = FindOrAdd(sum->mutable_groups(), [&](const v1::GroupStats& one) {
      return one.model() == group.model() && one.group() == group.group();
    });
    to->set_model(group.model());
    to->set_group(group.group());
    to->set_updates(to->updates() + group.updates());
    to->set_failures(to->failures() + group.failures());
    to->set_wait_seconds(to->wait_seconds() + group.wait_seconds());
    for (const auto& [rank, times] : group.last_arrivals()) {
      (*to->mutable_last_arrivals())[rank] += times;
    }
  }
}

void AddLoad(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  sum->set_in_flight_requests(sum->in_flight_requests() + more.in_flight_requests());
  sum->set_in_flight_bytes(sum->in_flight_bytes() + more.in_flight_bytes());
  sum->set_in_flight_budget_bytes(sum->in_flight_budget_bytes() + more.in_flight_budget_bytes());
  sum->set_queued_requests(sum->queued_requests() + more.queued_requests());
  sum->set_train_streams(sum->train_streams() + more.train_streams());
  sum->set_batches(sum->batches() + more.batches());
  sum->set_batch_bytes(sum->batch_bytes() + more.batch_bytes());
  sum->set_batch_budget_bytes(sum->batch_budget_bytes() + more.batch_budget_bytes());
}

}  // namespace

v1::GetStatsResponse Merge(const ClusterFigures& figures) {
  v1::GetStatsResponse sum = figures.empty() ? v1::GetStatsResponse() : figures.front().stats;
  for (size_t i = 1; i < figures.size(); ++i) {
    if (!figures[i].status.ok()) continue;
    AddLoad(figures[i].stats, &sum);
    AddMethods(figures[i].stats, &sum);
    AddModels(figures[i].stats, &sum);
    AddGroups(figures[i].stats, &sum);
  }
  return sum;
}

}  // namespace emberd::status_page
