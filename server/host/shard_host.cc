#include "server/host/shard_host.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "config/config.h"
#include "server/host/shard_codec.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"

namespace emberd::host {
namespace {

constexpr int kMaxQueuedRequests = 4096;
constexpr int64_t kTinyEntries = 2048;
constexpr absl::Duration kSweepPeriod = absl::Seconds(1);
// Results stay in the record for twice timeouts.shard_call_ms and this: coordinators decide on
// votes that are left when they are shard_call_ms old, and look every few seconds.
constexpr absl::Duration kLeftoverMargin = absl::Seconds(10);

std::vector<ops::LabelledMetrics> MakePartitionMetrics(const v1::ClusterConfig& cluster,
                                                       int shard_index, ops::Metrics* metrics) {
  std::vector<ops::LabelledMetrics> partitions;
  const int count = cluster.sparsecores_per_shard();
  for (int k = 0; k < count; ++k) {
    partitions.push_back(metrics->Partition(shard_index, shard_index * count + k));
  }
  return partitions;
}

// The room is taken as long as the result is in use.
GatherResult ToResult(uint64_t history, const shard::GatherOutput& output, rpc::MemoryRoom room) {
  auto owner = std::make_shared<const std::pair<rpc::MemoryRoom, shard::GatherOutput>>(
      std::move(room), output);
  return {history, output.sums, output.rows, std::move(owner)};
}

// Done in a few microseconds, so that it need not wait for a thread of its own.
bool IsTiny(const GatherCommand& command) {
  int64_t cells = 0;
  for (const preprocess::StackBatchView& stack : command.stacks) {
    if (stack.sample_count > kTinyEntries) return false;
    cells += stack.cells();
  }
  return cells <= kTinyEntries;
}

void AddGathered(const GatherResult& result, ops::ShardModelMetrics* metrics) {
  for (const shard::StackSums& stack : result.stacks) {
    (*metrics)[stack.stack].Add(ops::MetricId::kRowsGathered, stack.rows_gathered);
    (*metrics)[stack.stack].sent_sums->Increment(stack.bytes());
  }
  for (const shard::StackRows& stack : result.rows) {
    (*metrics)[stack.stack].Add(ops::MetricId::kRowsGathered, stack.rows_gathered);
    (*metrics)[stack.stack].sent_rows->Increment(stack.bytes());
  }
}

using v1::ChangeMemoryRequest;

// By number of rows, the share of a table's lookups that they have at least: without what the
// sketch may have counted for rows that it forgot.
std::map<int, double> SharesOf(const shard::HotTable& table) {
  std::map<int, double> shares = {{1, 0}, {10, 0}, {100, 0}};
  for (auto& [top, share] : shares) {
    for (size_t i = 0; i < table.rows.size() && i < static_cast<size_t>(top); ++i) {
      const int64_t lookups = table.rows[i].lookups - table.rows[i].error;
      share += static_cast<double>(lookups) / static_cast<double>(table.lookups);
    }
  }
  return shares;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardHost>> ShardHost::Create(const v1::ClusterConfig& cluster,
                                                             int shard_index, ops::Metrics* metrics,
                                                             ThreadPools* threads) {
  if (shard_index < 0 || shard_index >= cluster.shards_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard index ", shard_index, " is not in 0 .. ", cluster.shards_size() - 1));
  }
  shard::EngineOptions options;
  options.cpu = &threads->cpu;
  options.bytes_per_partition = cluster.budgets().bytes_per_sparsecore();
  // What is kept is no longer in anybody's work.
  options.idle_buffer_bytes =
      std::min(options.idle_buffer_bytes, cluster.budgets().in_flight_bytes() / 4);
  // In huge pages, the first rows of a large table take as much as all of them.
  const int64_t memory = ReadMachineMemory().limit / config::ShardsOnOneHost(cluster);
  if (memory > 0) options.huge_page_bytes = std::min(options.huge_page_bytes, memory / 2);
  if (cluster.has_eviction()) {
    ASSIGN_OR_RETURN(
        options.memory,
        shard::MemoryManager::Create({.bytes = options.bytes_per_partition,
                                      .folder = cluster.eviction().spill_folder(),
                                      .host_bytes = cluster.eviction().host_bytes_per_sparsecore(),
                                      .spill_bytes = cluster.eviction().spill_bytes()}));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<shard::Engine> engine, shard::Engine::Create(options));
  return std::unique_ptr<ShardHost>(
      new ShardHost(cluster, shard_index, metrics, &threads->blocking, std::move(engine)));
}

ShardHost::ShardHost(const v1::ClusterConfig& cluster, int shard_index, ops::Metrics* metrics,
                     BlockingPool* threads, std::unique_ptr<shard::Engine> engine)
    : place_{cluster.shards_size(), cluster.sparsecores_per_shard(), shard_index},
      incarnation_(rpc::RandomId()),
      start_(SteadyNow()),
      slow_call_(absl::Milliseconds(cluster.logging().slow_step_ms())),
      table_budget_bytes_(cluster.budgets().bytes_per_sparsecore() * place_.sparsecores_per_shard),
      host_budget_bytes_(cluster.eviction().host_bytes_per_sparsecore()),
      metrics_(metrics),
      server_metrics_(metrics->Server("shard", shard_index)),
      partition_metrics_(MakePartitionMetrics(cluster, shard_index, metrics)),
      limits_{cluster.budgets().max_message_bytes(),
              rpc::MemoryBudget(cluster.budgets().in_flight_bytes(), "budgets.in_flight_bytes")},
      memory_(config::ShardsOnOneHost(cluster)),
      batches_({cluster.budgets().batch_bytes(), cluster.budgets().max_batches()}),
      models_(place_, engine.get(), metrics, &log_, &order_,
              [this](uint64_t model_id, bool rows_stay) -> std::function<void()> {
                return [groups = group_steps_.DropModel(model_id),
                        votes = votes_.DropModel(model_id, rows_stay)] {
                  groups();
                  votes();
                };
              }),
      votes_({.max_held_bytes = cluster.budgets().in_flight_bytes(),
              .record = {.young = 2 * absl::Milliseconds(cluster.timeouts().shard_call_ms()) +
                                  kLeftoverMargin}},
             &order_, &log_),
      group_steps_({.max_held_bytes = cluster.budgets().in_flight_bytes(),
                    .part_ttl = absl::Milliseconds(cluster.timeouts().batch_ttl_ms())},
                   engine.get(), &order_, &log_,
                   {.release_batch = [this](uint64_t handle) { batches_.Erase(handle); },
                    .step_applied =
                        [this](uint64_t model_id, const shard::ApplyResult& result) {
                          AddUpdate(model_id, result);
                        }}),
      engine_(std::move(engine)),
      checkpoints_(place_, cluster.storage().copy_bytes(),
                   {engine_.get(), &models_, &votes_, &group_steps_, &gate_, &memory_, threads,
                    &log_, [this](const auto& at_moment) { return BeginLogSegment(at_moment); }}),
      workers_(threads, std::max(cluster.shard_threads(), 1), kMaxQueuedRequests,
               [metrics = server_metrics_](int queued) {
                 metrics->Set(ops::MetricId::kQueuedRequests, queued);
               }),
      durable_(cluster.storage(), place_,
               {.engine = engine_.get(),
                .models = &models_,
                .votes = &votes_,
                .groups = &group_steps_,
                .log = &log_,
                .order = &order_,
                .threads = threads,
                .update =
                    [this](uint64_t model_id, auto part) {
                      return ChangeOf(model_id, /*batch_handle=*/0, std::move(part));
                    },
                .assignment = [this](const AssignCommand& command) { return ChangeOf(command); }},
               [this](uint64_t segment, internal::v1::LogState* state) {
                 absl::MutexLock lock(&order_.mutex);
                 DescribeForLog(segment, state);
               }),
      sweeper_(kSweepPeriod, [this] { Sweep(); }) {
  server_metrics_->Set(ops::MetricId::kTableBudgetBytes, table_budget_bytes_);
  server_metrics_->SetBudgets(cluster.budgets());
}

ShardHost::~ShardHost() = default;

absl::StatusOr<internal::v1::CreateModelResponse> ShardHost::CreateModel(
    const internal::v1::CreateModelRequest& request) {
  ASSIGN_OR_RETURN(internal::v1::CreateModelResponse response, models_.Create(request));
  if (response.created()) checkpoints_.ForgetFinished(request.model_id());
  RETURN_IF_ERROR(log_.WaitDurable());
  if (response.created()) {
    ShowHotRows();
    WarnOfMemory(request.config().name());
  }
  return response;
}

void ShardHost::WarnOfMemory(const std::string& model) const {
  int64_t needed = engine_->Statistics().table_bytes;
  if (engine_->memory() != nullptr) {
    const int64_t most = table_budget_bytes_ + host_budget_bytes_ * place_.sparsecores_per_shard;
    needed = std::min(needed, most);
  }
  if (needed <= memory_.share() || memory_.share() == 0) return;
  ops::Log(ops::LogLevel::kWarning,
           "once every row has been touched, the tables need more memory than there is; lookups of "
           "new rows will then be refused",
           {{"model", model},
            {"shard", place_.index},
            {"table_bytes", needed},
            {"memory_bytes", memory_.share()}});
}

template <typename Rows>
absl::StatusOr<rpc::MemoryRoom> ShardHost::CheckMemory(uint64_t model_id, const Rows& rows) {
  return memory_.Check(engine_->UntouchedBytes(model_id),
                       [&] { return engine_->BytesToTouch(rows); });
}

void ShardHost::AddUpdate(uint64_t model_id, const shard::ApplyResult& result) {
  models_.AddChange(model_id);
  ops::ShardModelMetrics* metrics = models_.FactsOf(model_id).metrics;
  if (metrics == nullptr) return;
  for (const shard::ApplyResult::Stack& stack : result.stacks) {
    (*metrics)[stack.stack].Add(ops::MetricId::kRowsUpdated, stack.rows_updated);
    (*metrics)[stack.stack].Add(ops::MetricId::kRowsSkipped, stack.rows_skipped);
  }
}

absl::Status ShardHost::Submit(std::function<void()> work) {
  return workers_.Submit(std::move(work), [this] {
    return absl::StrCat(workers_.max_queued(), " requests wait already; retry later");
  });
}

void ShardHost::Gather(GatherCommand command, GatherCallback done) {
  // Evicted rows would have to be waited for.
  if (engine_->memory() == nullptr && IsTiny(command)) {
    const CpuPool::Alone alone(true);
    return GatherOnWorker(std::move(command), done);
  }
  auto work = [this, command = std::move(command), done]() mutable {
    GatherOnWorker(std::move(command), done);
  };
  if (absl::Status status = Submit(std::move(work)); !status.ok()) done(status);
}

void ShardHost::GatherOnWorker(GatherCommand command, const GatherCallback& done) {
  const auto rows = models_.FindRows(command.model_id, command.history);
  if (!rows.ok()) return done(rows.status());
  // A batch that is in order for an update takes up to four times the bytes of its entries as sent.
  // Where that leaves too little for other batches, the update puts it in order.
  const bool for_update =
      command.batch_handle != 0 && batches_.HasPlenty(4 * PayloadBytes(command));
  absl::StatusOr<std::shared_ptr<const shard::Batch>> batch =
      engine_->PrepareBatch(rows->engine_id, std::move(command.stacks), std::move(command.owner),
                            command.places, command.activation_dtype, for_update);
  if (!batch.ok()) {
    // Dropped just now: that is what the caller must hear.
    const absl::Status here = models_.Check(command.model_id, command.history);
    return done(here.ok() ? batch.status() : here);
  }
  auto promised = CheckMemory(rows->engine_id, **batch);
  if (!promised.ok()) return done(promised.status());
  // Before the batch is kept: nobody will use that of a gather which is refused.
  auto room = limits_.memory.Take(engine_->GatherBytes(**batch, command.places), "the answer");
  if (!room.ok()) return done(room.status());
  if (command.batch_handle != 0) {
    auto room_there = engine_->RoomFor(**batch);
    if (!room_there.ok()) return done(room_there.status());
    auto kept =
        std::make_shared<KeptBatch>(KeptBatch{command.model_id, *batch, *std::move(room_there)});
    absl::Status status = batches_.Insert(command.batch_handle, std::move(kept), (*batch)->bytes(),
                                          SteadyNow() + command.batch_ttl);
    if (!status.ok()) return done(status);
  }
  // Callbacks are copied, so they share these.
  auto held = std::make_shared<rpc::MemoryRoom>(*std::move(room));
  auto touches = std::make_shared<rpc::MemoryRoom>(*std::move(promised));
  engine_->Gather(*batch, std::move(command.places),
                  [this, done, metrics = rows->metrics, read_only = rows->read_only, held, touches,
                   model_id = command.model_id, history = command.history,
                   handle = command.batch_handle](auto output) {
                    if (!output.ok()) {
                      batches_.Erase(handle);
                      const absl::Status here = models_.Check(model_id, history);
                      return done(here.ok() ? output.status() : here);
                    }
                    // A reset in between would have shown new rows under the old name. Rows that
                    // are only read stay what they are, also when others have followed them.
                    const absl::Status status =
                        read_only ? absl::OkStatus() : models_.Check(model_id, history);
                    if (!status.ok()) {
                      batches_.Erase(handle);
                      return done(status);
                    }
                    GatherResult result = ToResult(history, *output, std::move(*held));
                    if (metrics != nullptr) AddGathered(result, metrics);
                    done(std::move(result));
                  });
}

absl::StatusOr<internal::v1::OpenGroupResponse> ShardHost::OpenGroup(
    const internal::v1::OpenGroupRequest& request) {
  RETURN_IF_ERROR(models_.Check(request.model_id(), request.history()));
  ASSIGN_OR_RETURN(auto response, group_steps_.Open(request));
  RETURN_IF_ERROR(log_.WaitDurable());
  return response;
}

absl::StatusOr<internal::v1::ListMadeResponse> ShardHost::ListMade(
    const internal::v1::ListMadeRequest& request) {
  if (models_.FactsOf(request.model_id()).history != request.history()) {
    return absl::DataLossError("the model was reset, restored or dropped in the meantime");
  }
  internal::v1::ListMadeResponse response;
  votes_.record().ListNewest(request.model_id(), request.history(), response.mutable_mutations());
  group_steps_.ListHeld(request.model_id(), response.mutable_groups());
  // Behind the list: what is forgotten in between stands in it.
  response.set_forgotten_generation(group_steps_.forgotten_generation());
  return response;
}

void ShardHost::DescribeForLog(uint64_t segment, internal::v1::LogState* state) const {
  state->set_begins(log_.begins());
  models_.Describe(segment, state);
  votes_.Describe(state);
  group_steps_.Describe(state);
}

absl::StatusOr<uint64_t> ShardHost::BeginLogSegment(
    const std::function<absl::Status()>& at_moment) {
  if (!log_.on()) {
    RETURN_IF_ERROR(at_moment());
    return 0;
  }
  ASSIGN_OR_RETURN(const uint64_t begun,
                   log_.BeginSegment(&order_, [&](uint64_t segment, auto* state) {
                     DescribeForLog(segment, state);
                     return at_moment();
                   }));
  if (begun != 0) models_.SegmentBegun(begun);
  return begun;
}

void ShardHost::Stage(ApplyCommand command, StageCallback done) {
  const uint64_t model_id = command.model_id;
  const std::optional<GroupPart> part = command.group_part;
  auto enter = [this, command = std::move(command),
                done = std::move(done)](ChangeGate::Pass pass) mutable {
    auto work = [this, command = std::move(command), done, pass = std::move(pass)]() mutable {
      log_.AfterDurable(done)(StageOnWorker(std::move(command)));
    };
    if (absl::Status status = Submit(std::move(work)); !status.ok()) done(status);
  };
  gate_.Enter(model_id, part, std::move(enter));
}

absl::StatusOr<ShardHost::StagedApply> ShardHost::StageOnWorker(ApplyCommand command) {
  const auto stage =
      command.group_part.has_value() ? &ShardHost::StagePart : &ShardHost::StageUpdate;
  ASSIGN_OR_RETURN(const StageOutcome outcome, (this->*stage)(command));
  return StagedApply{outcome, command.model_id, std::move(command.mutation), command.attempt,
                     std::move(command.group_part)};
}

absl::StatusOr<StageOutcome> ShardHost::StageUpdate(ApplyCommand& command) {
  // Before the batch is asked for: an update that was made has none any more.
  ASSIGN_OR_RETURN(std::optional<RowCounts> before,
                   votes_.MayStage(command.mutation, command.attempt));
  if (!before.has_value()) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const shard::CheckedPart> part, ClaimChecked(command));
    const auto voted = Vote(command, part);
    if (!voted.ok() || voted->has_value()) batches_.Unclaim(command.batch_handle);
    if (!voted.ok()) return voted.status();
    before = *voted;
    if (!before.has_value()) AddReceivedBytes(command.model_id, *part);
  }
  if (!before.has_value()) return StageOutcome();
  server_metrics_->Add(ops::MetricId::kReplays);
  return StageOutcome{.replayed = true, .rows = *before};
}

absl::StatusOr<std::optional<RowCounts>> ShardHost::Vote(
    const ApplyCommand& command, std::shared_ptr<const shard::CheckedPart> part) {
  const ShardLog::Stay stay(&log_);
  ASSIGN_OR_RETURN(const internal::v1::LogBlob blob, log_.AppendPart(*part));
  MutationVotes::Change change = ChangeOf(command.model_id, command.batch_handle, std::move(part));
  change.blob = blob;
  return votes_.Stage(command.mutation, command.attempt, std::move(change));
}

MutationVotes::Change ShardHost::ChangeOf(uint64_t model_id, uint64_t handle,
                                          std::shared_ptr<const shard::CheckedPart> part) {
  MutationVotes::Change change;
  change.model_id = model_id;
  change.history = models_.FactsOf(model_id).history;
  change.bytes = part->gradient_bytes();
  change.drop = [this, handle] { batches_.Unclaim(handle); };
  change.check = [part] { return part->batch().model().status(); };
  change.make = [this, model_id, handle, part = std::move(part)](RowsCallback done) {
    engine_->Apply(shard::StagedUpdate(part),
                   [this, model_id, handle, done](absl::StatusOr<shard::ApplyResult> result) {
                     batches_.Erase(handle);
                     if (!result.ok()) return done(result.status());
                     AddUpdate(model_id, *result);
                     done(RowCounts{result->rows_updated, result->rows_skipped});
                   });
  };
  return change;
}

absl::StatusOr<StageOutcome> ShardHost::StagePart(ApplyCommand& command) {
  const auto claimed = ClaimChecked(command);
  if (absl::IsNotFound(claimed.status()) && models_.Check(command.model_id, command.history).ok()) {
    // A stream's batch stays as long as the coordinator says so.
    return absl::AbortedError(
        absl::StrCat("group '", command.group_part->group(),
                     "': the shard does not have the batch of step ", command.group_part->step(),
                     " any more: it was started again, or its coordinator was "
                     "silent for timeouts.batch_ttl_ms; join again"));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<const shard::CheckedPart> part, claimed);
  const ShardLog::Stay stay(&log_);
  const absl::StatusOr<internal::v1::LogBlob> blob = log_.AppendPart(*part);
  const absl::Status status = blob.ok() ? group_steps_.Hold(command, part, *blob) : blob.status();
  if (!status.ok()) {
    batches_.Unclaim(command.batch_handle);
    return status;
  }
  AddReceivedBytes(command.model_id, *part);
  return StageOutcome();
}

absl::Status ShardHost::WrongModel(uint64_t batch_handle, const KeptBatch& kept) {
  return absl::InvalidArgumentError(absl::StrCat("batch_handle ", batch_handle,
                                                 " belongs to model_id ",
                                                 absl::Hex(kept.model_id, absl::kZeroPad16)));
}

absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> ShardHost::ClaimChecked(
    ApplyCommand& command) {
  RETURN_IF_ERROR(models_.Check(command.model_id, command.history));
  ASSIGN_OR_RETURN(const std::shared_ptr<KeptBatch> kept, batches_.Claim(command.batch_handle));
  absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> part =
      kept->model_id == command.model_id
          ? shard::CheckedPart::Make(kept->batch, std::move(command.input))
          : WrongModel(command.batch_handle, *kept);
  if (!part.ok()) batches_.Unclaim(command.batch_handle);
  return part;
}

void ShardHost::AddReceivedBytes(uint64_t model_id, const shard::CheckedPart& part) {
  ops::ShardModelMetrics* metrics = models_.FactsOf(model_id).metrics;
  if (metrics == nullptr) return;
  for (const shard::CheckedPart::Stack& stack : part.stacks()) {
    (*metrics)[stack.entries->stack].Add(ops::MetricId::kShardReceivedBytes, stack.gradient_bytes);
  }
}

void ShardHost::Commit(const StagedApply& staged, RowsCallback answered) {
  RowsCallback done = log_.AfterDurable(std::move(answered));
  if (staged.group_part.has_value()) {
    group_steps_.Commit(staged.model_id, *staged.group_part, std::move(done));
  } else {
    votes_.Decide(staged.mutation, staged.attempt, /*commit=*/true, std::move(done));
  }
}

void ShardHost::Discard(const StagedApply& staged) {
  if (staged.group_part.has_value()) return;
  // Another attempt may be in charge by now, and decides.
  votes_.Decide(staged.mutation, staged.attempt, /*commit=*/false, [](const auto&) {});
}

absl::Status ShardHost::ReleaseBatch(uint64_t model_id, uint64_t batch_handle) {
  ASSIGN_OR_RETURN(const std::shared_ptr<KeptBatch> kept, batches_.Claim(batch_handle));
  if (kept->model_id != model_id) {
    batches_.Unclaim(batch_handle);
    return WrongModel(batch_handle, *kept);
  }
  batches_.Erase(batch_handle);
  return absl::OkStatus();
}

void ShardHost::ReadRows(const shard::RowSelection& selection, absl::Span<float> values,
                         DoneCallback done) {
  const auto rows = models_.FindRows(selection.model_id, selection.history);
  if (!rows.ok()) return done(rows.status());
  shard::RowSelection here = selection;
  here.model_id = rows->engine_id;
  auto promised = CheckMemory(here.model_id, here);
  if (!promised.ok()) return done(promised.status());
  auto touches = std::make_shared<rpc::MemoryRoom>(*std::move(promised));
  engine_->ReadRows(here, values,
                    [this, touches, model_id = selection.model_id, history = selection.history,
                     done = std::move(done)](const absl::Status& read) {
                      const absl::Status status = models_.Check(model_id, history);
                      done(status.ok() ? read : status);
                    });
}

void ShardHost::StageAssign(AssignCommand command, AssignCallback done) {
  const uint64_t model_id = command.rows.model_id;
  const auto enter = [this, command = std::move(command),
                      done = log_.AfterDurable(std::move(done))](const ChangeGate::Pass&) {
    done(StageAssignNow(command));
  };
  gate_.Enter(model_id, std::nullopt, enter);
}

absl::StatusOr<bool> ShardHost::StageAssignNow(const AssignCommand& command) {
  const auto find_rows = [&] {
    return models_.FindRows(command.rows.model_id, command.rows.history, /*unserved=*/true);
  };
  ASSIGN_OR_RETURN(const HostedModels::Rows rows, find_rows());
  if (rows.read_only) {
    return absl::FailedPreconditionError(
        "the model serves a checkpoint; its rows can only be read");
  }
  ASSIGN_OR_RETURN(std::optional<RowCounts> before,
                   votes_.MayStage(command.mutation, command.attempt));
  if (before.has_value()) return true;
  ASSIGN_OR_RETURN(const rpc::MemoryRoom touches, CheckMemory(command.rows.model_id, command.rows));
  ReachFailpoint("assign.rows_are_known");
  ASSIGN_OR_RETURN(MutationVotes::Change change, ChangeOf(command));
  // The engine does not look at histories: it would find the rows of a reset that came in between.
  // An entry goes with its rows. So if it is still here, what was found belongs to it.
  RETURN_IF_ERROR(find_rows().status());
  const ShardLog::Stay stay(&log_);
  if (log_.on()) {
    ASSIGN_OR_RETURN(change.blob, log_.AppendBlob({EncodeAssign(command).SerializeAsString()}));
  }
  ASSIGN_OR_RETURN(before, votes_.Stage(command.mutation, command.attempt, std::move(change)));
  return before.has_value();
}

absl::StatusOr<MutationVotes::Change> ShardHost::ChangeOf(const AssignCommand& command) {
  ASSIGN_OR_RETURN(auto assign, engine_->StageAssign(command.rows, command.values, command.owner));
  MutationVotes::Change change;
  change.assigns_rows = true;
  change.model_id = command.rows.model_id;
  change.history = models_.FactsOf(change.model_id).history;
  change.bytes = static_cast<int64_t>(command.values.size() * sizeof(float));
  change.drop = [] {};
  change.check = [assign] { return shard::Engine::Check(*assign); };
  change.make = [this, model_id = command.rows.model_id,
                 assign = std::move(assign)](RowsCallback done) {
    engine_->Assign(assign, [this, model_id, done = std::move(done)](const absl::Status& status) {
      if (!status.ok()) return done(status);
      models_.AddChange(model_id);
      done(RowCounts());
    });
  };
  return change;
}

// The memory of a shard's SparseCores, where models may be evicted: what it holds, and what
// operators do with it.

absl::Status CheckMemoryChange(const ChangeMemoryRequest& request) {
  const bool pins = request.operation() == ChangeMemoryRequest::PIN ||
                    request.operation() == ChangeMemoryRequest::UNPIN;
  const std::string name = ChangeMemoryRequest::Operation_Name(request.operation());
  if (request.operation() == ChangeMemoryRequest::OPERATION_UNSPECIFIED || name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("operation is ",
                                                   static_cast<int>(request.operation()),
                                                   "; it must be PIN, UNPIN, COMPACT or RELEASE"));
  }
  if (pins && request.model().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("model is empty; ", name, " needs a name"));
  }
  if (!pins && !request.model().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("model is '", request.model(), "'; ", name,
                                                   " is about all models: leave it empty"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ShardMemoryChange> ShardHost::MakeMemoryChange(
    const ChangeMemoryRequest& request) {
  switch (request.operation()) {
    case ChangeMemoryRequest::COMPACT:
      return engine_->memory()->Compact();
    case ChangeMemoryRequest::RELEASE:
      return engine_->memory()->ReleaseAll();
    default:
      break;
  }
  const bool pinned = request.operation() == ChangeMemoryRequest::PIN;
  auto change = models_.SetPinned(request.model(), pinned);
  if (change.ok()) RETURN_IF_ERROR(log_.WaitDurable());
  return change;
}

absl::StatusOr<v1::ShardMemoryChange> ShardHost::ChangeMemory(const ChangeMemoryRequest& request) {
  RETURN_IF_ERROR(CheckMemoryChange(request));
  if (engine_->memory() == nullptr) {
    return absl::FailedPreconditionError(
        "models are not evicted in this cluster: its description has no `eviction`; write "
        "`eviction { spill_folder: \"/var/tmp/emberd\" }` into it and start it again");
  }
  ASSIGN_OR_RETURN(v1::ShardMemoryChange response, MakeMemoryChange(request));
  response.set_shard(place_.index);
  *response.mutable_memory() = engine_->memory()->Figures();
  ops::Log(ops::LogLevel::kInfo, "memory changed by an operator",
           {{"operation", ChangeMemoryRequest::Operation_Name(request.operation())},
            {"model", request.model()},
            {"shard", place_.index},
            {"evicted", response.evicted_size()},
            {"moved_tables", response.moved_tables()}});
  return response;
}

// What a shard tells of itself: its status, and the metrics that it brings up to date once a
// second.

absl::Status CheckHotRows(int hot_rows) {
  if (hot_rows >= 0 && hot_rows <= kMaxHotRows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("hot_rows is ", hot_rows, "; it must be 0 to ", kMaxHotRows));
}

void ShardHost::Sweep() {
  using enum ops::MetricId;
  ops::ServerMetrics& metrics = *server_metrics_;
  metrics.Add(kBatchesExpired, static_cast<double>(batches_.Sweep(SteadyNow()).size()));
  if (CheckReady().ok()) {
    group_steps_.Sweep(SteadyNow());
    checkpoints_.Sweep(SteadyNow());
    if (log_.SegmentFull()) {
      BeginLogSegment([] { return absl::OkStatus(); }).IgnoreError();  // the next sweep tries again
    }
  }
  const v1::LogStatus log = durable_.Status();
  metrics.Set(kLogBytes, log.bytes());
  metrics.Set(kLogRefuses, log.failure().empty() ? 0 : 1);
  metrics.Set(kRecovering, log.recovering() ? 1 : 0);
  const shard::EngineStatistics statistics = engine_->Statistics();
  metrics.Set(kModels, statistics.models);
  metrics.Set(kTableBytes, statistics.table_bytes);
  metrics.Set(kBatches, batches_.count());
  metrics.Set(kBatchBytes, batches_.bytes());
  metrics.Set(kInFlightBytes, limits_.memory.used());
  if (engine_->memory() != nullptr) {
    const v1::MemoryStatus memory = engine_->memory()->Figures();
    const int cores = place_.sparsecores_per_shard;
    metrics.Set(kTableResidentBytes,
                (memory.bytes() - memory.free_bytes() - memory.batch_bytes()) * cores);
    metrics.Set(kTablePinnedBytes, memory.pinned_bytes() * cores);
    metrics.Set(kTableHostBytes, memory.host_bytes() * cores);
    metrics.Set(kTableSpilledBytes, memory.spilled_bytes());
    metrics.SetTotal(kEvictions, memory.evictions());
    metrics.SetTotal(kReturns, memory.returns());
    metrics.SetTotal(kMemoryFailures, memory.failures());
  } else {
    metrics.Set(kTableResidentBytes, statistics.table_bytes);
  }
  for (size_t k = 0; k < statistics.partitions.size(); ++k) {
    partition_metrics_[k].SetTotal(kPartitionRowsGathered, statistics.partitions[k].rows_gathered);
    partition_metrics_[k].SetTotal(kPartitionRowsUpdated, statistics.partitions[k].rows_updated);
  }
  ShowHotRows();
}

void ShardHost::ShowHotRows() {
  for (const shard::HotTable& table : engine_->HotRows(kMaxHotRows)) {
    metrics_->SetHotRowShares(place_.index, table.model, table.table, SharesOf(table));
  }
}

v1::ShardStatus ShardHost::GetStatus(int hot_rows) const {
  const shard::EngineStatistics statistics = engine_->Statistics();
  v1::ShardStatus status;
  status.set_index(place_.index);
  status.set_reachable(true);
  status.set_incarnation(incarnation_);
  status.set_uptime_ms(absl::ToInt64Milliseconds(SteadyNow() - start_));
  status.set_models(statistics.models);
  status.set_table_bytes(statistics.table_bytes);
  status.set_batches(static_cast<int>(batches_.count()));
  status.set_batch_bytes(batches_.bytes());
  status.set_rows_gathered(statistics.rows_gathered);
  status.set_rows_updated(statistics.rows_updated);
  status.set_table_budget_bytes(table_budget_bytes_);
  status.set_memory_bytes(memory_.share());
  status.set_resident_bytes(ops::ResidentBytes().value_or(0));
  status.set_huge_page_bytes(ops::HugePageBytes().value_or(0));
  status.set_queued(workers_.queued() + statistics.queued);
  if (durable_.on()) *status.mutable_log() = durable_.Status();
  if (engine_->memory() != nullptr) *status.mutable_memory() = engine_->memory()->Figures();
  for (int k = 0; k < place_.sparsecores_per_shard; ++k) {
    v1::PartitionStatus* partition = status.add_partitions();
    partition->set_index(place_.index * place_.sparsecores_per_shard + k);
    if (static_cast<size_t>(k) >= statistics.partitions.size()) continue;  // no model yet
    partition->set_table_bytes(statistics.partitions[k].table_bytes);
    partition->set_rows_gathered(statistics.partitions[k].rows_gathered);
    partition->set_rows_updated(statistics.partitions[k].rows_updated);
  }
  if (hot_rows <= 0) return status;
  for (const shard::HotTable& table : engine_->HotRows(std::min(hot_rows, kMaxHotRows))) {
    for (const shard::HotRow& row : table.rows) {
      v1::HotRow* to = status.add_hot_rows();
      to->set_model(table.model);
      to->set_table(table.table);
      to->set_id(row.id);
      to->set_lookups(row.lookups);
      to->set_error(row.error);
      to->set_table_lookups(table.lookups);
    }
  }
  return status;
}

}  // namespace emberd::host
