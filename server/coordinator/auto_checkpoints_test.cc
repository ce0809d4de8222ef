// What is saved, dropped and served while others are at work on the same models. A failure here
// means changes that are lost, rows that come back after a drop, or limits that go by themselves.
#include "server/coordinator/auto_checkpoints.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "config/config.h"
#include "server/coordinator/coordinator.h"
#include "server/host/shard_backend.h"

namespace emberd {

// Set by a test: runs when the folder of a checkpoint is there, and nothing is in it yet.
std::function<void()> when_a_save_begins;

// Instead of that of base/failpoint.cc, which does nothing.
void ReachFailpoint(const char* name) {
  if (std::string(name) == "save.begins" && when_a_save_begins) when_a_save_begins();
}

}  // namespace emberd

namespace emberd::coordinator {
namespace auto_checkpoints_test {

// A coordinator over one shard in the same process, which saves new models and nothing else by
// itself.
class AutoCheckpointsTest : public testing::Test {
 protected:
  void SetUp() override {
    cluster_ = *config::ParseCluster(
        absl::StrCat("shards { address: '127.0.0.1:1' } coordinators { address: '127.0.0.1:2' } ",
                     "sparsecores_per_shard: 1 storage { directory: '", folder_.path(),
                     "' durability: CHECKPOINT every_seconds: 100000 }"));
    ASSERT_TRUE(config::CompleteCluster(&cluster_).ok());
    shard_ = *host::MakeLocalShard(cluster_, 0, &metrics_, &threads_);
    coordinator_ =
        std::make_unique<Coordinator>(cluster_, 0, std::vector{shard_}, &metrics_, &threads_);
  }

  // Of one row.
  static v1::AssignRowsRequest AssignRequest(uint64_t model_id, const std::string& client,
                                             uint64_t sequence) {
    v1::AssignRowsRequest assign;
    assign.set_model_id(model_id);
    assign.set_table("t");
    assign.mutable_mutation()->set_client_id(client);
    assign.mutable_mutation()->set_sequence(sequence);
    const int64_t id = 3;
    assign.mutable_ids()->set_dtype(v1::INT64);
    assign.mutable_ids()->add_shape(1);
    assign.mutable_ids()->set_data(&id, sizeof(id));
    const float value = 0.5f;
    assign.mutable_values()->set_dtype(v1::FLOAT32);
    assign.mutable_values()->add_shape(1);
    assign.mutable_values()->add_shape(1);
    assign.mutable_values()->set_data(&value, sizeof(value));
    return assign;
  }

  // Makes a model, waits until it is saved, and changes a row of it.
  step::ServedModelPtr ChangeNew(const std::string& name) {
    v1::DeclareModelRequest declare;
    *declare.mutable_config() = *config::ParseModel(
        absl::StrCat("name: '", name, "' tables { name: 't' vocabulary_size: 8 embedding_dim: 1 ",
                     "optimizer { sgd {} } } features { name: 'f' table: 't' batch_size: 1 }"));
    const auto declared = coordinator_->DeclareModel(declare, &context_);
    EXPECT_TRUE(declared.ok()) << declared.status();
    EXPECT_TRUE(Eventually([&] { return SavedChanges(name) == 0; }));
    const auto assigned = coordinator_->resources().rows->AssignRows(
        AssignRequest(declared->model_id(), name, 1), &context_);
    EXPECT_TRUE(assigned.ok()) << assigned.status();
    ModelRegistry& registry = *coordinator_->resources().registry;
    const auto known = [&] { return registry.Recall(declared->model_id()); };
    EXPECT_TRUE(Eventually([&] { return known().rows.changes() == 1; }));
    return known().model;
  }

  // That the newest checkpoint has; -1: there is none.
  int64_t SavedChanges(const std::string& model) {
    const auto newest = coordinator_->resources().checkpoints->store().Newest(model);
    return newest.ok() ? newest->changes() : -1;
  }

  absl::Status Reset() {
    v1::ResetModelRequest reset;
    reset.set_name("a");
    return coordinator_->ResetModel(reset, &context_).status();
  }

  // Holds the model back as a save at another coordinator does, or does so for longer.
  bool Hold(const step::ServedModel& model) {
    auto pause = step::OfRows<internal::v1::PauseChangesRequest>(model.id, model.history);
    pause.set_pause_id(kPause);
    pause.set_lease_ms(60'000);
    return shard_->PauseChanges(pause, &context_).ok();
  }
  void LetGo(const step::ServedModel& model) {
    internal::v1::ResumeChangesRequest resume;
    resume.set_model_id(model.id);
    resume.set_pause_id(kPause);
    EXPECT_TRUE(shard_->ResumeChanges(resume, &context_).ok());
  }

  // A model's first checkpoint is one that others may build on when the shard has heard of it.
  bool MayBuildOnFirst(const step::ServedModel& model) {
    return Eventually([&] {
      auto pause = step::OfRows<internal::v1::PauseChangesRequest>(model.id, model.history);
      pause.set_pause_id(kPause);
      pause.set_lease_ms(60'000);
      const auto answer = shard_->PauseChanges(pause, &context_);
      LetGo(model);
      return answer.ok() && answer->checkpoint_id() != 0;
    });
  }
  // Of "a", an incremental one if that is possible.
  Checkpoints::Progress SaveOnTop(const std::string& name) {
    v1::SaveCheckpointRequest save;
    save.set_model("a");
    save.set_name(name);
    save.set_incremental(true);
    return coordinator_->resources().checkpoints->Save(
        save, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, &context_);
  }

  // Of another coordinator, which looks when it is asked to.
  ModelRegistryOptions OfOther() {
    ModelRegistryOptions options;
    options.topology = {.shards = 1, .sparsecores_per_shard = 1};
    options.threads = &threads_;
    options.metrics = &metrics_;
    return options;
  }

  // The newest checkpoint of "a".
  void Serve(const std::string& as, const Checkpoints::Report& report) {
    v1::ServeCheckpointRequest serve;
    serve.set_model("a");
    serve.set_serve_as(as);
    const auto served = coordinator_->resources().checkpoints->Serve(serve, report, &context_);
    EXPECT_TRUE(served.ok()) << served.status();
  }
  v1::StackLimits Limits(const std::string& model) {
    v1::GetLimitsRequest request;
    request.set_model(model);
    const auto limits = coordinator_->GetLimits(request, &context_);
    EXPECT_TRUE(limits.ok()) << limits.status();
    return limits.ok() && limits->stacks_size() == 1 ? limits->stacks(0) : v1::StackLimits();
  }

  static constexpr uint64_t kPause = 7;
  const TempDir folder_ = *TempDir::Create();
  ops::Metrics metrics_{"test"};
  ThreadPools threads_{2};
  rpc::CallContext context_{absl::InfiniteFuture()};
  v1::ClusterConfig cluster_;
  std::shared_ptr<host::ShardBackend> shard_;
  std::unique_ptr<Coordinator> coordinator_;
};

// Would catch: a stop that waits for one model, which another coordinator saves just then, for as
// long as it may take, and then has no time for the others.
TEST_F(AutoCheckpointsTest, AModelThatHasToWaitKeepsNoOtherFromBeingSavedAtTheStop) {
  const step::ServedModelPtr first = ChangeNew("a");
  ChangeNew("b");
  ASSERT_TRUE(Eventually([&] { return Hold(*first); }));
  std::thread other([&] {
    EXPECT_TRUE(Eventually([&] { return Hold(*first) && SavedChanges("b") == 1; }));
    EXPECT_EQ(SavedChanges("a"), 0);
    LetGo(*first);
  });
  EXPECT_TRUE(coordinator_->auto_checkpoints()->SaveAtStop(SteadyNow() + 2 * kPatience).ok());
  other.join();
  EXPECT_EQ(SavedChanges("a"), 1);
  EXPECT_EQ(SavedChanges("b"), 1);
}

// Would catch: changes that are lost without a word, because the shards do not find the folder that
// the coordinator has made, as where they do not share a file system: NOT_FOUND says of a model
// that it was dropped.
TEST_F(AutoCheckpointsTest, AStopNamesAModelWhoseFolderTheShardsDoNotFind) {
  ASSERT_TRUE(MayBuildOnFirst(*ChangeNew("a")));
  when_a_save_begins = [&] {
    const std::filesystem::path folder(absl::StrCat(cluster_.storage().checkpoints(), "/a"));
    for (const auto& one : std::filesystem::directory_iterator(folder)) {
      if (absl::StartsWith(one.path().filename().string(), ".saving-")) remove_all(one.path());
    }
  };
  testing::internal::CaptureStderr();
  const absl::Status saved =
      coordinator_->auto_checkpoints()->SaveAtStop(SteadyNow() + 2 * kPatience);
  const std::string log = testing::internal::GetCapturedStderr();
  when_a_save_begins = nullptr;
  EXPECT_TRUE(absl::StrContains(log, "a model could not be saved before the stop")) << log;
  EXPECT_EQ(saved.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(saved.message(), "model a;")) << saved;
  EXPECT_EQ(SavedChanges("a"), 0);
}

// Would catch: an alert about checkpoints that fail, because somebody has given one up.
TEST_F(AutoCheckpointsTest, ASaveThatIsGivenUpIsNoFailure) {
  ChangeNew("a");
  rpc::CallContext context(absl::InfiniteFuture());
  v1::SaveCheckpointRequest save;
  save.set_model("a");
  const auto give_up = [&](const v1::CheckpointProgress& progress) {
    if (progress.phase() == "saving") context.Cancel();
    return absl::OkStatus();
  };
  const auto saved = coordinator_->resources().checkpoints->Save(save, give_up, &context);
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kCancelled) << saved.status();
  const ops::MetricSnapshot metrics(metrics_.collectables());
  EXPECT_EQ(metrics.Value(ops::MetricId::kCheckpointFailures, {"a"}), 0);
}

// Would catch: a checkpoint that is said to need one that has been merged away since.
TEST_F(AutoCheckpointsTest, SaysWhatACheckpointNeedsNow) {
  ASSERT_TRUE(MayBuildOnFirst(*ChangeNew("a")));
  for (const char* name : {"b", "c"}) {
    const auto saved = SaveOnTop(name);
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  Checkpoints& checkpoints = *coordinator_->resources().checkpoints;
  const auto needs = [&] {
    v1::GetCheckpointRequest get;
    get.set_model("a");
    get.set_name("c");
    v1::VerifyCheckpointRequest verify;
    verify.set_model("a");
    verify.set_name("c");
    const auto ignored = [](const v1::CheckpointProgress&) { return absl::OkStatus(); };
    const auto verified = checkpoints.Verify(verify, ignored, &context_);
    EXPECT_TRUE(verified.ok()) << verified.status();
    EXPECT_EQ(verified->checkpoint().chain(), checkpoints.Get(get, &context_)->chain());
    return verified->checkpoint().chain();
  };
  EXPECT_EQ(needs(), 2);
  v1::MergeCheckpointRequest merge;
  merge.set_model("a");
  merge.set_name("b");
  ASSERT_TRUE(
      checkpoints
          .Merge(
              merge, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, &context_)
          .ok());
  EXPECT_EQ(needs(), 1);
}

// Would catch: a drop that goes by what its coordinator knew of a name, not by what is there now. A
// model that serves a checkpoint has none of its own; those of the model that took its place would
// bring that one back.
TEST_F(AutoCheckpointsTest, ADropGivesUpTheCheckpointsOfWhatIsThereNow) {
  ChangeNew("a");
  Serve("x", [](const v1::CheckpointProgress&) { return absl::OkStatus(); });
  std::vector<uint64_t> given_up;
  ModelRegistryOptions options = OfOther();
  options.give_up = [&](const std::string&, uint64_t history) {
    given_up.push_back(history);
    return absl::OkStatus();
  };
  ModelRegistry other(*coordinator_->resources().shards, options);
  const auto known = other.FindByName("x", &context_);
  ASSERT_TRUE(known.ok()) << known.status();
  ASSERT_TRUE((*known)->read_only());
  v1::DropModelRequest drop;
  drop.set_name("x");
  ASSERT_TRUE(coordinator_->DropModel(drop, &context_).ok());
  const uint64_t history = ChangeNew("x")->history;
  const auto dropped = other.Drop("x", nullptr, &context_);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_TRUE(*dropped);
  EXPECT_EQ(given_up, (std::vector<uint64_t>{0, history}));
  EXPECT_EQ(other.IdOf("x"), 0u);
}

// Would catch: an export that ends with ABORTED for a reset of before it began, because its
// coordinator has not heard of that; and an assignment that does.
TEST_F(AutoCheckpointsTest, WhatBeginsAfterAResetElsewhereHasTheNewRows) {
  const step::ServedModelPtr before = ChangeNew("a");
  ModelRegistry other(*coordinator_->resources().shards, OfOther());
  const auto known = other.FindByName("a", &context_);
  ASSERT_TRUE(known.ok()) << known.status();
  ASSERT_EQ((*known)->history, before->history);
  EXPECT_TRUE(Reset().ok());
  CoordinatorResources resources = coordinator_->resources();
  resources.registry = &other;
  RowAccess rows(&resources, /*max_message_bytes=*/1 << 20);
  const auto assigned = rows.AssignRows(AssignRequest(before->id, "a", 2), &context_);
  EXPECT_TRUE(assigned.ok()) << assigned.status();
  EXPECT_TRUE(Reset().ok());
  v1::ExportTableRequest request;
  request.set_model_id(before->id);
  request.set_table("t");
  const auto next = rows.StartExport(request, &context_);
  ASSERT_TRUE(next.ok()) << next.status();
  const auto part = (*next)();
  ASSERT_TRUE(part.ok()) << part.status();
  ASSERT_TRUE(part->has_value());
  EXPECT_NE((*part)->history(), before->history);
}

// Would catch: a checkpoint that logs continue from is deleted through a coordinator that has not
// heard that another model has taken the name, and takes it for one of no model.
TEST_F(AutoCheckpointsTest, ACheckpointOfWhatHasTakenTheNameIsNotDeleted) {
  ChangeNew("a");
  Serve("x", [](const v1::CheckpointProgress&) { return absl::OkStatus(); });
  // Of another coordinator, of a cluster with logs.
  const CoordinatorResources& resources = coordinator_->resources();
  ModelRegistry other(*resources.shards, OfOther());
  v1::StorageConfig storage = cluster_.storage();
  storage.set_durability(v1::StorageConfig::LOG);
  Checkpoints checkpoints(storage, *resources.shards, resources.mutations, &other,
                          &threads_.blocking);
  const auto known = other.FindByName("x", &context_);
  ASSERT_TRUE(known.ok()) << known.status();
  ASSERT_TRUE((*known)->read_only());
  v1::DropModelRequest drop;
  drop.set_name("x");
  ASSERT_TRUE(coordinator_->DropModel(drop, &context_).ok());
  const step::ServedModelPtr now = ChangeNew("x");
  v1::DeleteCheckpointRequest remove;
  remove.set_model("x");
  remove.set_name(checkpoints.store().Newest("x")->name());
  const absl::Status refused = checkpoints.Delete(remove, &context_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(SavedChanges("x"), 0);
  const auto found = other.FindByNameAnew("x", &context_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ((*found)->history, now->history);
}

// Would catch: rows that come with the limits that there were when their loading began. It may take
// hours, and an operator was told meanwhile that the limits are others now.
TEST_F(AutoCheckpointsTest, LimitsThatAreSetWhileACheckpointIsLoadedStay) {
  ChangeNew("a");
  Serve("x", [](const v1::CheckpointProgress&) { return absl::OkStatus(); });
  v1::SetLimitsRequest set;
  set.set_model("x");
  set.add_limits()->set_stack(Limits("x").stack());
  set.mutable_limits(0)->set_max_unique_ids_per_partition(3);
  int times = 0;
  Serve("x", [&](const v1::CheckpointProgress&) {
    if (times++ > 0) return absl::OkStatus();
    return coordinator_->resources().registry->SetLimits(set, &context_).status();
  });
  EXPECT_GT(times, 0);
  EXPECT_TRUE(Eventually([&] { return Limits("x").max_unique_ids_per_partition() == 3; }));
}

// Would catch: an alarm of damage where nothing is damaged, because another call has taken files
// away while they were read.
TEST_F(AutoCheckpointsTest, WhatIsMergedOrDeletedWhileItIsReadIsNotDamaged) {
  ASSERT_TRUE(MayBuildOnFirst(*ChangeNew("a")));
  Checkpoints& checkpoints = *coordinator_->resources().checkpoints;
  const auto ignore = [](const v1::CheckpointProgress&) { return absl::OkStatus(); };
  const auto saved = SaveOnTop("b");
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_EQ(saved->checkpoint().chain(), 1);
  v1::VerifyCheckpointRequest verify;
  verify.set_model("a");
  verify.set_name("b");
  // The files are read when this has heard that they will be.
  const auto merge = [&](const v1::CheckpointProgress& progress) {
    if (progress.phase() != "checking" || progress.bytes() > 0) return absl::OkStatus();
    v1::MergeCheckpointRequest request;
    request.set_model("a");
    request.set_name("b");
    return checkpoints.Merge(request, ignore, &context_).status();
  };
  const absl::Status merged = checkpoints.Verify(verify, merge, &context_).status();
  EXPECT_TRUE(absl::IsAborted(merged)) << merged;
  const auto again = checkpoints.Verify(verify, ignore, &context_);
  EXPECT_TRUE(again.ok()) << again.status();
  const auto remove = [&](const v1::CheckpointProgress&) {
    return checkpoints.store().Delete("a", "b").status();
  };
  const absl::Status deleted = checkpoints.Verify(verify, remove, &context_).status();
  EXPECT_TRUE(absl::IsNotFound(deleted)) << deleted;
}

// Would catch: the same of an export, or of a declaration. One that finds the checkpoint merged is
// to begin again, and a trainer is not to hear that the rows are lost.
TEST_F(AutoCheckpointsTest, WhatIsDeletedWhileItIsExportedOrDeclaredIsNotDamaged) {
  const v1::ModelConfig config = ChangeNew("a")->config;
  Checkpoints& checkpoints = *coordinator_->resources().checkpoints;
  v1::SaveCheckpointRequest save;
  save.set_model("a");
  save.set_name("b");
  const auto saved = checkpoints.Save(
      save, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, &context_);
  ASSERT_TRUE(saved.ok()) << saved.status();
  v1::ExportCheckpointRequest of_table;
  of_table.set_model("a");
  of_table.set_name("b");
  of_table.set_table("t");
  const auto next = checkpoints.StartExport(of_table, &context_);
  ASSERT_TRUE(next.ok()) << next.status();
  v1::DropModelRequest drop;
  drop.set_name("a");
  ASSERT_TRUE(coordinator_->DropModel(drop, &context_).ok());
  int deleted = 0;
  const auto find_rows = [&](const v1::ModelConfig&) -> absl::StatusOr<std::optional<RowSource>> {
    auto source = checkpoints.FindRows("a", "b");
    if (!source.ok()) return source.status();
    // The files are read when this has heard that they will be.
    source->begins = [&, begins = source->begins](uint64_t history) {
      const absl::Status begun = begins(history);
      if (history != 0 && checkpoints.store().Delete("a", "b").ok()) ++deleted;
      return begun;
    };
    return std::optional(*std::move(source));
  };
  const absl::Status declared =
      coordinator_->resources().registry->Declare(config, find_rows, &context_).status();
  EXPECT_TRUE(absl::IsNotFound(declared)) << declared;
  EXPECT_EQ(deleted, 1);
  const absl::Status exported = (*next)().status();
  EXPECT_TRUE(absl::IsNotFound(exported)) << exported;
}

// Would catch: rows of an older checkpoint that come back without a word, because the manifest of
// the newest one is damaged.
TEST_F(AutoCheckpointsTest, OperatorsHearOfADamagedManifestThatIsPassedOver) {
  ChangeNew("a");
  Checkpoints& checkpoints = *coordinator_->resources().checkpoints;
  for (const char* name : {"b", "c"}) {
    v1::SaveCheckpointRequest save;
    save.set_model("a");
    save.set_name(name);
    const auto saved = checkpoints.Save(
        save, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, &context_);
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  const std::string manifest = absl::StrCat(cluster_.storage().checkpoints(), "/a/c/manifest.json");
  std::filesystem::resize_file(manifest, 9);
  testing::internal::CaptureStderr();
  const auto rows = checkpoints.FindRows("a", "newest");
  const std::string log = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->chain.front().manifest().name(), "b");
  for (const std::string& told :
       {std::string("a checkpoint is damaged"), manifest, std::string("taken=b")}) {
    EXPECT_TRUE(absl::StrContains(log, told)) << told << " is not in: " << log;
  }
  // The same of one that is to be merged: what is newer stays as it is.
  v1::MergeCheckpointRequest merge;
  merge.set_model("a");
  merge.set_name("newest");
  testing::internal::CaptureStderr();
  const auto merged = checkpoints.Merge(
      merge, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, &context_);
  const std::string of_merge = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->checkpoint().name(), "b");
  EXPECT_TRUE(absl::StrContains(of_merge, "taken=b")) << of_merge;
}

// Would catch: all bytes of damaged checkpoints are read again every second; or they are never read
// again, though they have been mended.
TEST_F(AutoCheckpointsTest, DamagedCheckpointsAreReadAgainAfterAPause) {
  const step::ServedModelPtr model = ChangeNew("a");
  ASSERT_TRUE(SaveOnTop("b").ok());
  std::vector<std::filesystem::path> files;
  const std::filesystem::path folder(absl::StrCat(cluster_.storage().checkpoints(), "/a"));
  for (const auto& one : std::filesystem::recursive_directory_iterator(folder)) {
    if (one.path().extension() == ".pb") files.push_back(one.path());  // each has one
  }
  ASSERT_FALSE(files.empty());
  const auto away = [](const std::filesystem::path& file) { return file.string() + ".away"; };
  for (const auto& file : files) std::filesystem::rename(file, away(file));
  const auto drop = step::OfRows<internal::v1::DropModelRequest>(model->id, model->history);
  ASSERT_TRUE(shard_->DropModel(drop, &context_).ok());
  const auto recovery = [&] { return coordinator_->auto_checkpoints()->RecoveryOf("a"); };
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(recovery(), "the last attempt failed: ") &&
           absl::StrContains(recovery(), "the next attempt begins in ");
  })) << recovery();
  // Whoever takes the damaged checkpoints away, as the error advises, need not wait for its end.
  EXPECT_TRUE(Eventually([&] {
    std::filesystem::rename(folder, folder_.path() + "/aside");
    const absl::Status told =
        coordinator_->auto_checkpoints()->ExplainLost("a", absl::DataLossError("its rows"));
    const bool pauses = absl::StrContains(recovery(), "the next attempt begins in ");
    std::filesystem::rename(folder_.path() + "/aside", folder);
    return absl::IsDataLoss(told) && pauses;
  })) << recovery();
  for (const auto& file : files) std::filesystem::rename(away(file), file);
  ModelRegistry& registry = *coordinator_->resources().registry;
  EXPECT_TRUE(Eventually([&] { return registry.FindByName("a", &context_).ok(); })) << recovery();
  EXPECT_TRUE(Eventually([&] { return recovery().empty(); })) << recovery();
}

// Would catch: an incremental checkpoint that is a full one without a word of why.
TEST_F(AutoCheckpointsTest, OperatorsHearOfADamagedManifestThatNothingCanBuildOn) {
  ASSERT_TRUE(MayBuildOnFirst(*ChangeNew("a")));
  auto saved = SaveOnTop("b");
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_EQ(saved->checkpoint().chain(), 1);
  const std::string manifest = absl::StrCat(cluster_.storage().checkpoints(), "/a/b/manifest.json");
  std::filesystem::resize_file(manifest, 9);
  testing::internal::CaptureStderr();
  saved = SaveOnTop("c");
  v1::GetCheckpointRequest newest;
  newest.set_model("a");
  const auto shown = coordinator_->resources().checkpoints->Get(newest, &context_);
  const std::string log = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->checkpoint().chain(), 0);
  ASSERT_TRUE(shown.ok()) << shown.status();
  EXPECT_EQ(shown->name(), "c");
  for (const std::string& told :
       {manifest, std::string("none: a full one is saved"), std::string("taken=c")}) {
    EXPECT_TRUE(absl::StrContains(log, told)) << told << " is not in: " << log;
  }
}

// Would catch: a declaration that is to be tried again for ever, because the only checkpoint that
// can be read is one that was given up, and those since then are damaged.
TEST_F(AutoCheckpointsTest, WhatWasGivenUpIsNotTakenForWhatIsDamaged) {
  ChangeNew("a");
  ASSERT_TRUE(SaveOnTop("old").ok());
  v1::DropModelRequest drop;
  drop.set_name("a");
  ASSERT_TRUE(coordinator_->DropModel(drop, &context_).ok());
  const step::ServedModelPtr model = ChangeNew("a");
  ASSERT_TRUE(MayBuildOnFirst(*model));
  const auto saved = SaveOnTop("b");
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_EQ(saved->checkpoint().chain(), 1);
  std::filesystem::resize_file(absl::StrCat(cluster_.storage().checkpoints(), "/a/",
                                            saved->checkpoint().parent(), "/manifest.json"),
                               9);
  const absl::Status damaged =
      coordinator_->auto_checkpoints()->FindRows(model->config, "").status();
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  for (const char* told : {"emberctl checkpoint list a", "emberctl checkpoint delete a NAME"}) {
    EXPECT_TRUE(absl::StrContains(damaged.message(), told)) << damaged;
  }
}

// Would catch: a model that begins anew in silence, though its rows lie in a checkpoint whose
// manifest alone is damaged.
TEST_F(AutoCheckpointsTest, AModelWhoseCheckpointsAreAllDamagedDoesNotBeginAnew) {
  const v1::ModelConfig config = ChangeNew("a")->config;
  const checkpoint::CheckpointStore& store = coordinator_->resources().checkpoints->store();
  const auto newest = store.Newest("a");
  ASSERT_TRUE(newest.ok()) << newest.status();
  const std::string folder = absl::StrCat(cluster_.storage().checkpoints(), "/a");
  const auto manifest = [&] {
    for (const auto& one : std::filesystem::recursive_directory_iterator(folder)) {
      if (one.path().filename() == "manifest.json") return one.path();
    }
    return std::filesystem::path();
  }();
  std::string text;
  {
    std::ostringstream read;
    read << std::ifstream(manifest).rdbuf();
    text = read.str();
  }
  ASSERT_FALSE(text.empty()) << manifest;
  const auto declared = [&] {
    return coordinator_->auto_checkpoints()->FindRows(config, "").status();
  };
  EXPECT_TRUE(declared().ok()) << declared();
  std::ofstream(manifest) << text.substr(0, text.size() / 2);
  const absl::Status damaged = declared();
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), manifest.string())) << damaged;
  // What it says to do, also of a model that was dropped since.
  EXPECT_TRUE(absl::StrContains(damaged.message(), "emberctl checkpoint delete a NAME")) << damaged;
  v1::DropModelRequest drop;
  drop.set_name("a");
  ASSERT_TRUE(coordinator_->DropModel(drop, &context_).ok());
  EXPECT_TRUE(absl::IsDataLoss(declared())) << declared();
  v1::DeleteCheckpointRequest remove;
  remove.set_model("a");
  remove.set_name(newest->name());
  const auto removed = coordinator_->resources().checkpoints->Delete(remove, &context_);
  EXPECT_TRUE(removed.ok()) << removed.status();
  EXPECT_TRUE(declared().ok()) << declared();
}

}  // namespace auto_checkpoints_test
}  // namespace emberd::coordinator
