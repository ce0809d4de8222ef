#include "tests/fault/file_faults_cluster.h"

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/testing/await.h"

namespace emberd::testing {
namespace {

constexpr char kFaultyModel[] = "count";
constexpr absl::Duration kBatchTtl = absl::Seconds(5);
// What a disk may say to such a call: once, and lasting.
std::pair<int, int> ErrorsOf(const std::string& call) {
  if (call == "create" || call == "mkdir" || call == "write" || call == "allocate") {
    return {ENOSPC, EIO};
  }
  if (call == "open" || call == "opendir") return {EMFILE, EIO};
  if (call == "lock") return {ENOLCK, EIO};
  return {EIO, call == "rename" || call == "unlink" || call == "stat" ? EACCES : EIO};
}

}  // namespace

client::ModelDescription FileFaultsCluster::CountingModel(const std::string& name) {
  client::ModelDescription model;
  model.name = name;
  client::TableDescription& table = model.tables.emplace_back();
  table.name = "t";
  // With more than those that are used, a batch is smaller than the table.
  table.vocabulary_size = static_cast<int64_t>(128 * kRowIds.size());
  table.embedding_dim = 4;
  table.initializer = client::Initializer::Zeros();
  table.optimizer = client::Optimizer{"sgd", {{"learning_rate", 1.0}}};
  model.features = {{"f", "t"}};
  return model;
}

void FileFaultsCluster::Start(const std::string& storage, int shards, const std::string& config,
                              const std::map<std::string, std::string>& failpoints) {
  shards_ = shards;
  // Batches whose updates a full disk refuses hold memory of the SparseCores for batch_ttl_ms.
  auto cluster = Cluster::Start(
      {.shards = shards,
       .config = absl::StrCat("timeouts { shard_call_ms: 60000 drain_ms: 1000 batch_ttl_ms: ",
                              absl::ToInt64Milliseconds(kBatchTtl), " } ",
                              "storage { directory: \"", data_, "\" ", storage, " } ", config),
       .failpoints = failpoints,
       .file_faults = faults_.environment()});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  cluster_ = *std::move(cluster);
  client::ClientOptions options = cluster_->client_options();
  options.max_attempts = 1;
  options.client_id = "trainer";
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  api_ = std::make_unique<Api>(cluster_->address());
  // A shard that finds a log reads it first, and refuses until then.
  auto model = Await([&] { return client_->DeclareModel(CountingModel(kFaultyModel)); });
  ASSERT_TRUE(model.ok()) << model.status();
  model_ = *std::move(model);
}

absl::Status FileFaultsCluster::Train() {
  // A busy machine may take longer for a step than a batch is kept.
  absl::Time begin;
  return Await(
      [&] {
        begin = absl::Now();
        return TryTrain();
      },
      [&](const absl::Status& made) {
        return !absl::IsNotFound(made) || absl::Now() - begin < kBatchTtl;
      });
}

absl::Status FileFaultsCluster::TryTrain() {
  const std::vector<float> gradients(kRowIds.size() * model_.tables[0].embedding_dim, -1.0f);
  ASSIGN_OR_RETURN(
      const client::LookupResult found,
      client_->Lookup(model_, {{{"f", client::DenseIds{absl::MakeConstSpan(kRowIds), 1}}}}));
  if (!waits_) ++sequence_;
  waits_ = true;
  client::ApplyOptions options;
  options.sequence = sequence_;
  RETURN_IF_ERROR(client_
                      ->ApplyGradients(model_, found.batch,
                                       {{"f", gradients, static_cast<int64_t>(kRowIds.size())}},
                                       options)
                      .status());
  waits_ = false;
  ++made_;
  return absl::OkStatus();
}

absl::Status FileFaultsCluster::SaveNamed(const std::string& name, bool incremental) {
  RETURN_IF_ERROR(
      client_->SaveCheckpoint(kFaultyModel, {.name = name, .incremental = incremental}).status());
  checkpoints_[name] = made_;
  newest_ = name;
  return absl::OkStatus();
}

absl::Status FileFaultsCluster::List() { return client_->ListCheckpoints(kFaultyModel).status(); }

absl::Status FileFaultsCluster::Verify() {
  v1::VerifyCheckpointRequest request;
  request.set_model(kFaultyModel);
  v1::CheckpointProgress progress;
  const grpc::Status status =
      Call(&v1::CheckpointService::Stub::VerifyCheckpoint, *api_, request, &progress);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status FileFaultsCluster::Merge() {
  v1::MergeCheckpointRequest request;
  request.set_model(kFaultyModel);
  request.set_name(absl::StrCat("c", names_));
  v1::CheckpointProgress progress;
  const grpc::Status status =
      Call(&v1::CheckpointService::Stub::MergeCheckpoint, *api_, request, &progress);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status FileFaultsCluster::Restore() {
  restore_failed_ = true;
  ASSIGN_OR_RETURN(const client::CheckpointInfo info,
                   client_->RestoreCheckpoint(kFaultyModel, {.name = newest_}));
  restore_failed_ = false;
  made_ = checkpoints_[info.name];
  waits_ = false;
  return absl::OkStatus();
}

// All but the newest, which logs may begin with.
absl::Status FileFaultsCluster::Delete() {
  ASSIGN_OR_RETURN(const client::CheckpointList list, client_->ListCheckpoints(kFaultyModel));
  for (size_t i = 1; i < list.checkpoints.size(); ++i) {
    const std::string& name = list.checkpoints[i].name;
    if (name == newest_) continue;  // an automatic one is newer
    const absl::Status status = client_->DeleteCheckpoint(kFaultyModel, name).status();
    // The next one builds on it, or a log begins with it.
    if (absl::IsFailedPrecondition(status) &&
        absl::StrContains(status.message(), "checkpoint \"")) {
      continue;
    }
    RETURN_IF_ERROR(status);
    checkpoints_.erase(name);
    deleted_.insert(name);
  }
  return absl::OkStatus();
}

absl::Status FileFaultsCluster::DeclareAndDrop() {
  const absl::Status declared = client_->DeclareModel(CountingModel("other")).status();
  const absl::Status dropped = client_->DropModel("other").status();
  return declared.ok() ? dropped : declared;
}

absl::StatusOr<int64_t> FileFaultsCluster::Rows() {
  ASSIGN_OR_RETURN(const client::RowValues rows, client_->ReadRows(model_, "t", kRowIds));
  // Of an update in doubt, one shard may have made its share, and another one may have to be
  // restarted before it can.
  for (const float value : rows.values) {
    EXPECT_LE(std::abs(value - rows.values[0]), waits_ ? 1 : 0) << "half of an update";
  }
  return static_cast<int64_t>(*absl::c_min_element(rows.values));
}

void FileFaultsCluster::ExpectNothingOlder() {
  const absl::StatusOr<int64_t> rows = Rows();
  if (!rows.ok()) return ExpectSaysWhy(rows.status());
  EXPECT_GE(*rows, made_);
  EXPECT_LE(*rows, made_ + (waits_ ? 1 : 0));
}

void FileFaultsCluster::ExpectAllRun() {
  EXPECT_EQ(cluster_->pids().size(), static_cast<size_t>(shards_ + 1));
}

bool FileFaultsCluster::NeedsRestart(const absl::Status& status) {
  return absl::StrContains(status.message(), "until this process is restarted") ||
         absl::StrContains(status.message(), "a shard that is started again") ||
         absl::StrContains(status.message(), "could not recover from its log");
}

void FileFaultsCluster::ExpectSaysWhy(const absl::Status& status) {
  EXPECT_NE(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_NE(status.code(), absl::StatusCode::kUnknown) << status;
  EXPECT_NE(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_NE(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_FALSE(status.message().empty()) << status;
  EXPECT_FALSE(absl::StrContains(status.message(), "No message")) << status;
}

void FileFaultsCluster::ExpectGoesOn(const absl::Status& told) {
  const auto train = [&] {
    return Await([&] { return Train(); },
                 [&](const absl::Status& status) {
                   return status.ok() || NeedsRestart(status) ||
                          (absl::IsDataLoss(status) && restore_failed_);
                 });
  };
  absl::Status status = NeedsRestart(told) ? told : train();
  if (!status.ok()) {
    ASSERT_NO_FATAL_FAILURE(RestartShards());
    ++restarts_;
    // It may have given rows up: then it is to be repeated.
    status = restore_failed_ ? Await([&] { return Restore(); }) : absl::OkStatus();
    if (status.ok()) status = train();
  }
  restore_failed_ = false;
  ASSERT_TRUE(status.ok()) << status;
  const auto rows = Await([&] { return Rows(); });  // a checkpoint may keep another model in memory
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(*rows, made_);
}

void FileFaultsCluster::ExpectCheckpointsAsTold() {
  const auto list = client_->ListCheckpoints(kFaultyModel);
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_TRUE(list->damaged.empty()) << list->damaged[0];
  std::set<std::string> names;
  for (const client::CheckpointInfo& info : list->checkpoints) {
    names.insert(info.name);
    EXPECT_EQ(deleted_.count(info.name), 0u) << info.name << " was deleted";
    EXPECT_TRUE(info.automatic || checkpoints_.count(info.name) == 1)
        << info.name << " was refused";
  }
  for (const auto& [name, rows] : checkpoints_) {
    EXPECT_EQ(names.count(name), 1u) << name << " was saved";
  }
}

void FileFaultsCluster::ExpectNoLitter() {
  namespace fs = std::filesystem;
  const auto litter = [this] {
    std::vector<fs::path> found;
    for (const auto& entry :
         fs::directory_iterator(absl::StrCat(data_, "/checkpoints/", kFaultyModel))) {
      const std::string name = entry.path().filename();
      if (name[0] == '.' && entry.is_directory()) found.push_back(entry.path());
    }
    return found;
  };
  const auto long_ago = fs::file_time_type::clock::now() - std::chrono::minutes(2);
  for (const fs::path& folder : litter()) fs::last_write_time(folder, long_ago);
  ASSERT_TRUE(Save().ok());
  EXPECT_EQ(litter(), std::vector<fs::path>());
}

void FileFaultsCluster::RestartShards() {
  for (int shard = 0; shard < shards_; ++shard) cluster_->KillShard(shard);
  for (int shard = 0; shard < shards_; ++shard) ASSERT_TRUE(cluster_->LaunchShard(shard).ok());
  for (int shard = 0; shard < shards_; ++shard) ASSERT_TRUE(cluster_->AwaitShard(shard).ok());
}

void FileFaultsCluster::RestartAll() {
  cluster_->KillCoordinator(0);
  ASSERT_NO_FATAL_FAILURE(RestartShards());
  ASSERT_TRUE(cluster_->RestartCoordinator(0).ok());
  const auto rows = Await([&] { return Rows(); });
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(*rows, made_);
}

void FileFaultsCluster::Prepare(const NamedStep& step) {
  for (const Step before : step.before) {
    const absl::Status status = (this->*before)();
    ASSERT_TRUE(status.ok()) << status;
  }
}

void FileFaultsCluster::AddRecorded(const NamedStep& step, std::vector<Fault>* faults) {
  for (const FileCall& call : faults_.Recorded()) {
    const auto [once, lasting] = ErrorsOf(call.call);
    const bool before = absl::c_any_of(*faults, [&](const Fault& fault) {
      return fault.call.call == call.call && fault.call.path == call.path;
    });
    faults->push_back({step, call, once, 1, false});
    if (before) continue;
    faults->push_back({step, call, lasting, 1, true});
    if (call.count > 1) faults->push_back({step, call, once, call.count, false});
  }
}

std::vector<FileFaultsCluster::Fault> FileFaultsCluster::FaultsOf(
    const std::vector<NamedStep>& steps) {
  std::vector<Fault> faults;
  for (const NamedStep& step : steps) {
    Prepare(step);
    faults_.Forget();
    const absl::Status status = (this->*step.run)();
    EXPECT_TRUE(status.ok()) << step.name << ": " << status;
    AddRecorded(step, &faults);
  }
  return faults;
}

std::string FileFaultsCluster::Fault::Text() const {
  return absl::StrCat(step.name, ": ", call.call, " ", call.path, ", ", strerrorname_np(error),
                      ", number ", ordinal, lasting ? " and all later ones" : "");
}

bool FileFaultsCluster::Wanted(const Fault& fault) {
  const char* const only = std::getenv("EMBERD_FILE_FAULT");
  return only == nullptr || absl::StrContains(fault.Text(), only);
}

void FileFaultsCluster::Try(const Fault& fault) {
  if (!Wanted(fault)) return;
  SCOPED_TRACE(fault.Text());
  ASSERT_NO_FATAL_FAILURE(Prepare(fault.step));
  faults_.Fail(fault.call, fault.error, fault.ordinal, fault.lasting);
  const absl::Status status = (this->*fault.step.run)();
  ExpectAllRun();
  if (!status.ok()) ExpectSaysWhy(status);
  ExpectNothingOlder();
  faults_.Lift();
  ASSERT_NO_FATAL_FAILURE(ExpectGoesOn(status));
  ASSERT_NO_FATAL_FAILURE(ExpectMore());
  ASSERT_NO_FATAL_FAILURE(ExpectCheckpointsAsTold());
  const absl::Status deleted = Await([&] { return Delete(); });
  EXPECT_TRUE(deleted.ok()) << deleted;
}

void FileFaultsCluster::TryAll(const std::vector<NamedStep>& steps) {
  for (const NamedStep& step : steps) {  // the first time is another one
    ASSERT_NO_FATAL_FAILURE(Prepare(step));
    const absl::Status status = (this->*step.run)();
    ASSERT_TRUE(status.ok()) << step.name << ": " << status;
  }
  const std::vector<Fault> faults = FaultsOf(steps);
  ASSERT_FALSE(faults.empty());
  for (const Fault& fault : faults) {
    Try(fault);
    if (HasFailure()) return;
  }
}

}  // namespace emberd::testing
