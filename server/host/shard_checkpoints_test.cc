// What one shard promises a coordinator that saves and restores: the rows of a moment at rest or
// none, one save at a time, and rows of a checkpoint that nobody sees before all of them are there.
// Covers: row_files.cc, hosted_models.cc
#include "server/host/shard_checkpoints.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "server/host/testing_host.h"

namespace emberd {

// Set by a test before it begins a save: runs where the rows are in the files.
std::function<void()> when_rows_are_saved;

// Instead of that of base/failpoint.cc, which does nothing.
void ReachFailpoint(const char* name) {
  if (std::string(name) == "save.rows_are_here" && when_rows_are_saved) when_rows_are_saved();
}

namespace host {
namespace shard_checkpoints_test {

using internal::v1::GetTransferResponse;
using ::testing::HasSubstr;

constexpr uint64_t kModelId = 5;
constexpr uint64_t kLive = 6;  // serves the checkpoints of kModelId
constexpr uint64_t kPause = 7, kTransfer = 21, kCheckpoint = 31, kRestored = 18, kAnew = 19;

class ShardCheckpointsTest : public TestHost {
 protected:
  using TestHost::TestHost;
  ShardCheckpointsTest() = default;
  ShardCheckpoints& checkpoints() { return host_->checkpoints(); }

  // An update of rows 3 and 4.
  void Update(uint64_t sequence) {
    ASSERT_TRUE(Gather(sequence).ok());
    ASSERT_TRUE(Commit(*Stage(sequence, sequence)).ok());
  }
  absl::StatusOr<internal::v1::PauseChangesResponse> Pause(uint64_t pause_id = kPause,
                                                           uint64_t model_id = kModelId) {
    internal::v1::PauseChangesRequest request;
    request.set_model_id(model_id);
    request.set_history(kHistory);
    request.set_pause_id(pause_id);
    request.set_lease_ms(60'000);
    return checkpoints().PauseChanges(request);
  }
  // A model of its own that has never changed, paused.
  void CreateAndPause(uint64_t model_id) {
    internal::v1::CreateModelRequest request = CreateRequest();
    request.set_model_id(model_id);
    request.mutable_config()->set_name(absl::StrCat("m", model_id));
    ASSERT_TRUE(host_->CreateModel(request).ok());
    ASSERT_TRUE(Serve(kHistory, model_id).ok());
    ASSERT_TRUE(Pause(kPause, model_id).ok());
  }
  // The last change may still be on its way out.
  void PauseAtRest() {
    auto paused = Pause();
    while (paused.ok() && paused->entering() > 0) paused = Pause();
    EXPECT_TRUE(paused.ok()) << paused.status();
  }
  void Resume(uint64_t pause_id = kPause) {
    internal::v1::ResumeChangesRequest request;
    request.set_model_id(kModelId);
    request.set_pause_id(pause_id);
    EXPECT_TRUE(checkpoints().ResumeChanges(request).ok());
  }
  // Of a save, made if it is not there.
  std::string FolderOf(uint64_t transfer_id) {
    const std::string folder = folder_.Path(absl::StrCat(transfer_id));
    std::filesystem::create_directory(folder);
    return folder;
  }
  absl::Status BeginSave(uint64_t transfer_id, int64_t changes, uint64_t parent_id = 0,
                         uint64_t model_id = kModelId) {
    internal::v1::BeginSaveRequest request;
    request.set_model_id(model_id);
    request.set_history(kHistory);
    request.set_pause_id(kPause);
    request.set_transfer_id(transfer_id);
    request.set_folder(FolderOf(transfer_id));
    request.set_checkpoint_id(kCheckpoint);
    request.set_parent_id(parent_id);
    request.set_changes(changes);
    return checkpoints().BeginSave(request);
  }
  absl::Status Complete(uint64_t model_id = kModelId) {
    internal::v1::CompleteSaveRequest complete;
    complete.set_model_id(model_id);
    complete.set_history(kHistory);
    complete.set_checkpoint_id(kCheckpoint);
    return checkpoints().CompleteSave(complete);
  }
  absl::StatusOr<GetTransferResponse> GetTransfer(uint64_t transfer_id) {
    internal::v1::GetTransferRequest request;
    request.set_transfer_id(transfer_id);
    return checkpoints().GetTransfer(request);
  }
  GetTransferResponse Await(uint64_t transfer_id) {
    while (true) {
      const auto response = GetTransfer(transfer_id);
      EXPECT_TRUE(response.ok()) << response.status();
      if (!response.ok() || response->state() != GetTransferResponse::RUNNING) {
        return response.value_or(GetTransferResponse());
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  void Cancel(uint64_t transfer_id) {
    internal::v1::CancelTransferRequest request;
    request.set_transfer_id(transfer_id);
    EXPECT_TRUE(checkpoints().CancelTransfer(request).ok());
  }
  // A whole checkpoint of what is there now, which a save of its own has written.
  internal::v1::CheckpointSource SaveAll(int64_t changes) {
    PauseAtRest();
    const absl::Status begun = BeginSave(kTransfer, changes);
    EXPECT_TRUE(begun.ok()) << begun;
    Resume();
    const GetTransferResponse saved = Await(kTransfer);
    EXPECT_EQ(saved.state(), GetTransferResponse::DONE) << saved.error();
    internal::v1::CheckpointSource source;
    source.set_folder(FolderOf(kTransfer));
    v1::CheckpointManifest& manifest = *source.mutable_manifest();
    manifest.set_model("m");
    manifest.set_checkpoint_id(kCheckpoint);
    manifest.set_model_id(kModelId);
    *manifest.mutable_config() = config_;
    *manifest.mutable_plan() = preprocess::PlanToProto(config_, plan_);
    *manifest.mutable_files() = saved.files();
    *manifest.add_states() = saved.state_file();
    return source;
  }
  absl::Status BeginRestore(const internal::v1::CheckpointSource& source,
                            uint64_t transfer_id = kTransfer + 1, uint64_t history = kRestored) {
    internal::v1::BeginRestoreRequest request;
    *request.mutable_create() = CreateRequest();
    request.mutable_create()->set_history(history);
    request.mutable_create()->set_replaces(here_);
    request.set_transfer_id(transfer_id);
    *request.add_chain() = source;
    return checkpoints().BeginRestore(request);
  }
  internal::v1::BeginRestoreRequest LiveRequest(const internal::v1::CheckpointSource& source,
                                                uint64_t history, uint64_t replaces) {
    internal::v1::BeginRestoreRequest request;
    internal::v1::CreateModelRequest& create = *request.mutable_create();
    create = CreateRequest();
    create.set_model_id(kLive);
    v1::ModelConfig& config = *create.mutable_config();
    config.set_name("live");
    config.mutable_optimizer()->mutable_none();
    config.mutable_tables(0)->mutable_optimizer()->mutable_none();
    create.set_plan_fingerprint(
        preprocess::MakePlan(config, {.shards = 1, .sparsecores_per_shard = 2})->fingerprint);
    create.set_history(history);
    create.set_replaces(replaces);
    create.mutable_serves()->set_model("m");
    create.mutable_serves()->set_checkpoint("a");
    create.mutable_serves()->set_version(static_cast<int64_t>(history));
    request.set_transfer_id(history);
    *request.add_chain() = source;
    return request;
  }
  // Under a history that is greater than those before.
  absl::Status LoadLive(const internal::v1::CheckpointSource& source, uint64_t history,
                        uint64_t replaces) {
    RETURN_IF_ERROR(checkpoints().BeginRestore(LiveRequest(source, history, replaces)));
    EXPECT_EQ(Await(history).state(), GetTransferResponse::DONE);
    return absl::OkStatus();
  }
  absl::Status Serve(uint64_t history, uint64_t model_id = kModelId) {
    internal::v1::ServeModelRequest request;
    request.set_model_id(model_id);
    request.set_history(history);
    return host_->ServeModel(request);
  }
  absl::Status Drop(uint64_t history, bool unless_serving = false, uint64_t model_id = kModelId) {
    internal::v1::DropModelRequest request;
    request.set_model_id(model_id);
    request.set_history(history);
    request.set_unless_serving(unless_serving);
    return host_->DropModel(request);
  }
  absl::Status DropLive(uint64_t history, bool unless_only) {
    internal::v1::DropModelRequest request;
    request.set_model_id(kLive);
    request.set_history(history);
    request.set_unless_only(unless_only);
    return host_->DropModel(request);
  }
  // The first column of row 3 under a history.
  absl::StatusOr<float> RowThree(uint64_t history, uint64_t model_id = kModelId) {
    const preprocess::TablePlan& table = plan_.stacks[0].tables[0];
    const std::vector<int32_t> partitions = {static_cast<int32_t>((3 + table.shard_rotation) % 2)};
    const std::vector<int64_t> rows = {1 + table.row_offset};
    float value = 0;
    absl::Status read;
    absl::Notification done;
    host_->ReadRows({model_id, 0, "", partitions, rows, 1, history}, absl::MakeSpan(&value, 1),
                    [&](const absl::Status& status) {
                      read = status;
                      done.Notify();
                    });
    done.WaitForNotification();
    if (!read.ok()) return read;
    return value;
  }
  std::vector<std::string> Files() {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(FolderOf(kTransfer))) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
    return files;
  }

  uint64_t here_ = kHistory;  // what a restore replaces
  const TempDir folder_ = *TempDir::Create();
};

TEST_F(ShardCheckpointsTest, APauseTellsWhatIsHeldAndHoldsBackTheRest) {
  Update(1);
  ASSERT_TRUE(Gather(2).ok());
  auto staged = Stage(2, 2);
  ASSERT_TRUE(staged.ok()) << staged.status();
  PauseAtRest();
  const auto paused = Pause();
  ASSERT_TRUE(paused.ok()) << paused.status();
  EXPECT_EQ(paused->entering(), 0);
  EXPECT_EQ(paused->changes(), 1);
  ASSERT_EQ(paused->mutations_size(), 1);
  EXPECT_EQ(paused->mutations(0).name().sequence(), 2u);
  EXPECT_FALSE(paused->mutations(0).making());
  // Nobody else's vote comes in, but what is held is still decided.
  ASSERT_TRUE(Gather(3).ok());
  absl::Notification voted;
  ApplyCommand command = Command(3);
  command.mutation = {"c", 3, UpdateTag(kModelId)};
  command.attempt = 1;
  host_->Stage(std::move(command), [&](const auto& late) {
    EXPECT_TRUE(late.ok()) << late.status();
    voted.Notify();
  });
  EXPECT_FALSE(voted.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  ASSERT_TRUE(Commit(*std::move(staged)).ok());
  EXPECT_EQ(Pause()->changes(), 2);
  EXPECT_EQ(Pause()->mutations_size(), 0);
  Resume();
  voted.WaitForNotification();
}

TEST_F(ShardCheckpointsTest, OnlyWhatIsAtRestIsSaved) {
  Update(1);
  EXPECT_TRUE(absl::IsAborted(BeginSave(kTransfer, 1))) << "nobody has paused it";
  PauseAtRest();
  EXPECT_TRUE(absl::IsAborted(BeginSave(kTransfer, 0))) << "an update was made since";
  EXPECT_TRUE(absl::IsFailedPrecondition(BeginSave(kTransfer, 1, /*parent_id=*/99)));
  Resume();
  EXPECT_TRUE(absl::IsAborted(BeginSave(kTransfer, 1))) << "the pause is over";
  // A refusal leaves nothing that the next one would have to wait for.
  PauseAtRest();
  EXPECT_TRUE(BeginSave(kTransfer, 1).ok());
  EXPECT_EQ(Await(kTransfer).state(), GetTransferResponse::DONE);
}

TEST_F(ShardCheckpointsTest, OneSaveAtATime) {
  Update(1);
  PauseAtRest();
  ASSERT_TRUE(BeginSave(kTransfer, 1).ok());
  EXPECT_TRUE(absl::IsAborted(BeginSave(kTransfer + 1, 1)));
  EXPECT_EQ(Await(kTransfer).state(), GetTransferResponse::DONE);
  EXPECT_TRUE(absl::IsAborted(BeginSave(kTransfer + 1, 1))) << "it may become a checkpoint yet";
  Cancel(kTransfer);
  EXPECT_TRUE(BeginSave(kTransfer + 2, 1).ok());
  EXPECT_EQ(Await(kTransfer + 2).state(), GetTransferResponse::DONE);
  // Nobody asks about it any more.
  checkpoints().Sweep(absl::Now() + absl::Seconds(10));
  EXPECT_TRUE(absl::IsAborted(BeginSave(kTransfer + 3, 1)));
  checkpoints().Sweep(absl::Now() + absl::Minutes(2));
  PauseAtRest();  // the sweep has ended it
  EXPECT_TRUE(BeginSave(kTransfer + 3, 1).ok());
  EXPECT_EQ(Await(kTransfer + 3).state(), GetTransferResponse::DONE);
}

// A snapshot that waits for its reader stops updates, and these the readers of others: for good, if
// they take all threads.
TEST_F(ShardCheckpointsTest, ManySavesRunAtOnce) {
  constexpr int kSaves = 5;
  for (int i = 0; i < kSaves; ++i) ASSERT_NO_FATAL_FAILURE(CreateAndPause(100 + i));
  std::atomic<int> here = 0;
  when_rows_are_saved = [&] {
    ++here;
    EXPECT_TRUE(Eventually([&] { return here == kSaves; }));
  };
  for (uint64_t i = 0; i < kSaves; ++i) {
    EXPECT_TRUE(BeginSave(kTransfer + i, 0, /*parent_id=*/0, 100 + i).ok());
  }
  for (uint64_t i = 0; i < kSaves; ++i) {
    EXPECT_EQ(Await(kTransfer + i).state(), GetTransferResponse::DONE);
  }
  when_rows_are_saved = nullptr;
}

TEST_F(ShardCheckpointsTest, WhatBecameACheckpointIsWhatTheNextOneBuildsOn) {
  Update(1);
  SaveAll(1);
  EXPECT_TRUE(absl::IsAborted(Pause().status())) << "it is none yet";
  EXPECT_TRUE(Gather(2).ok());
  EXPECT_TRUE(Stage(2, 2).ok()) << "held back by a pause that was refused";
  ASSERT_TRUE(Complete().ok());
  EXPECT_EQ(Pause()->checkpoint_id(), kCheckpoint);
  PauseAtRest();
  EXPECT_TRUE(BeginSave(kTransfer + 1, 1, kCheckpoint).ok());
  EXPECT_EQ(Await(kTransfer + 1).files_size(), 0) << "nothing has changed";
}

// Whoever asks is about to make it a checkpoint: the newest one, from which the rows would come
// back.
TEST_F(ShardCheckpointsTest, ASaveOfRowsThatWereGivenUpIsOver) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  EXPECT_TRUE(GetTransfer(kTransfer).ok());
  ASSERT_TRUE(BeginRestore(source).ok());
  EXPECT_TRUE(absl::IsDataLoss(GetTransfer(kTransfer).status())) << "other rows are served now";
  Await(kTransfer + 1);
  ASSERT_TRUE(Drop(kRestored).ok());
  EXPECT_TRUE(absl::IsDataLoss(GetTransfer(kTransfer).status())) << "none are";
}

TEST_F(ShardCheckpointsTest, ARestoreIsServedWhenItIsToldTo) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  Update(2);
  EXPECT_EQ(*RowThree(kHistory), -1.0f);
  ASSERT_TRUE(BeginRestore(source).ok());
  EXPECT_TRUE(absl::IsDataLoss(RowThree(kHistory).status())) << "those rows are given up";
  EXPECT_EQ(Await(kTransfer + 1).state(), GetTransferResponse::DONE);
  EXPECT_TRUE(absl::IsDataLoss(RowThree(kRestored).status())) << "nobody has said so yet";
  EXPECT_TRUE(absl::IsAborted(Serve(kHistory)));
  ASSERT_TRUE(Serve(kRestored).ok());
  EXPECT_EQ(*RowThree(kRestored), 1.0f);
  const auto listed = host_->ListModels();
  ASSERT_EQ(listed.models_size(), 1);
  EXPECT_TRUE(listed.models(0).restored());
  EXPECT_EQ(listed.models(0).changes(), 1);
  // The record is that of the checkpoint.
  MutationVotes::Found first, second;
  const auto find = [&](uint64_t sequence, MutationVotes::Found* found) {
    host_->FindMutation({"c", sequence, UpdateTag(kModelId)}, 0, [&](auto answer) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      *found = *answer;
    });
  };
  find(1, &first);
  find(2, &second);
  EXPECT_EQ(first.state, internal::v1::FindMutationResponse::COMMITTED);
  EXPECT_EQ(first.rows.updated, 2);
  EXPECT_EQ(second.state, internal::v1::FindMutationResponse::UNKNOWN);
}

TEST_F(ShardCheckpointsTest, RowsOfOtherTablesAreNotRead) {
  Update(1);
  internal::v1::CheckpointSource source = SaveAll(1);
  source.mutable_manifest()->mutable_config()->mutable_tables(0)->set_vocabulary_size(40);
  const absl::Status refused = BeginRestore(source);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(*RowThree(kHistory), 1.0f) << "the rows stay";
}

TEST_F(ShardCheckpointsTest, RowsThatAreOnlyReadFollowOneAnother) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  ASSERT_TRUE(LoadLive(source, 100, 0).ok());
  EXPECT_TRUE(absl::IsDataLoss(RowThree(100, kLive).status())) << "nobody has said so yet";
  ASSERT_TRUE(Serve(100, kLive).ok());
  Update(2);
  EXPECT_EQ(*RowThree(100, kLive), 1.0f);
  EXPECT_TRUE(absl::IsAborted(LoadLive(source, 101, 99))) << "somebody else's are served";
  ASSERT_TRUE(LoadLive(source, 101, 100).ok());
  EXPECT_EQ(*RowThree(100, kLive), 1.0f) << "they stand beside each other";
  EXPECT_TRUE(absl::IsAborted(LoadLive(source, 102, 100))) << "two are enough";
  EXPECT_TRUE(absl::IsFailedPrecondition(DropLive(100, /*unless_only=*/true)));
  ASSERT_TRUE(Serve(101, kLive).ok());
  EXPECT_EQ(*RowThree(101, kLive), 1.0f);
  EXPECT_EQ(*RowThree(100, kLive), 1.0f) << "for calls that began on them";
  EXPECT_EQ(host_->ListModels().models_size(), 3);
  ASSERT_TRUE(DropLive(100, /*unless_only=*/true).ok());
  EXPECT_TRUE(absl::IsDataLoss(RowThree(100, kLive).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(DropLive(101, /*unless_only=*/true)));
  EXPECT_EQ(*RowThree(101, kLive), 1.0f);
  ASSERT_TRUE(DropLive(101, /*unless_only=*/false).ok());
  EXPECT_EQ(host_->ListModels().models_size(), 1);
  EXPECT_EQ(*RowThree(kHistory), -1.0f) << "training goes on";
}

// Would catch: limits that are set while shard 0 serves newer rows and other shards do not yet, and
// that go with the older ones.
TEST_F(ShardCheckpointsTest, LimitsThatAreSetForRowsAreThoseOfNewerRowsToo) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  for (const uint64_t history : {100, 101}) {
    ASSERT_TRUE(LoadLive(source, history, history == 100 ? 0 : 100).ok());
    ASSERT_TRUE(Serve(history, kLive).ok());
  }
  internal::v1::ServeModelRequest set;
  set.set_model_id(kLive);
  set.set_history(100);
  set.mutable_limits()->set_version(1);
  ASSERT_TRUE(host_->ServeModel(set).ok());
  const internal::v1::ListModelsResponse here = host_->ListModels();
  int64_t limits = 0;
  for (const internal::v1::HostedModel& model : here.models()) limits += model.limits().version();
  EXPECT_EQ(limits, 2);
}

TEST_F(ShardCheckpointsTest, RowsThatAreOnlyReadAreNotTrainedAndTakeNobodysPlace) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  internal::v1::BeginRestoreRequest request = LiveRequest(source, 100, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(host_->CreateModel(request.create()).status()));
  ASSERT_TRUE(LoadLive(source, 100, 0).ok());
  ASSERT_TRUE(Serve(100, kLive).ok());
  request.mutable_create()->clear_serves();
  request.mutable_create()->set_model_id(7);
  EXPECT_TRUE(absl::IsAlreadyExists(host_->CreateModel(request.create()).status()));
  request = LiveRequest(source, 101, kHistory);
  *request.mutable_create()->mutable_config() = config_;
  request.mutable_create()->set_plan_fingerprint(plan_.fingerprint);
  EXPECT_TRUE(absl::IsAlreadyExists(checkpoints().BeginRestore(request)));
  const std::vector<int32_t> partitions = {0};
  const std::vector<int64_t> rows = {0};
  const std::vector<float> values(8);
  AssignCommand assign;
  assign.rows = {kLive, 0, "", partitions, rows, 8, 100};
  assign.values = values;
  assign.mutation = {"c", 9, 1};
  assign.attempt = 1;
  absl::Status assigned;
  absl::Notification done;
  host_->StageAssign(assign, [&](const auto& staged) {
    assigned = staged.status();
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_TRUE(absl::IsFailedPrecondition(assigned)) << assigned;
}

TEST_F(ShardCheckpointsTest, ARestoreThatNobodyWantsAnyMoreLeavesNothing) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  ASSERT_TRUE(BeginRestore(source).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(BeginRestore(source, kTransfer + 2)));
  Await(kTransfer + 1);
  Cancel(kTransfer + 1);
  EXPECT_TRUE(absl::IsAborted(Serve(kRestored)));
  EXPECT_EQ(host_->ListModels().models_size(), 0);
  here_ = 0;
  // Dropped while its rows are on their way.
  ASSERT_TRUE(BeginRestore(source, kTransfer + 3, kRestored + 1).ok());
  ASSERT_TRUE(Drop(kRestored + 1, /*unless_serving=*/true).ok());
  Await(kTransfer + 3);
  EXPECT_TRUE(absl::IsAborted(Serve(kRestored + 1)));
  EXPECT_EQ(host_->ListModels().models_size(), 0);
  // The word that takes it back may be faster than the one that begins it.
  EXPECT_TRUE(absl::IsAborted(BeginRestore(source, kTransfer + 4, kRestored + 1)));
  ASSERT_TRUE(BeginRestore(source, kTransfer + 5, kRestored + 2).ok());
  EXPECT_EQ(Await(kTransfer + 5).state(), GetTransferResponse::DONE);
  EXPECT_TRUE(Serve(kRestored + 2).ok());
  EXPECT_EQ(*RowThree(kRestored + 2), 1.0f);
}

// A snapshot that nobody ends would be written to by updates when it is gone.
TEST_F(ShardCheckpointsTest, ATransferWhoseNumberIsTakenLeavesNothing) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  Cancel(kTransfer);
  internal::v1::BeginRestoreRequest check;
  check.set_transfer_id(kTransfer + 1);
  check.set_check_only(true);
  *check.add_chain() = source;
  ASSERT_TRUE(checkpoints().BeginRestore(check).ok());
  EXPECT_EQ(Await(kTransfer + 1).state(), GetTransferResponse::DONE);
  PauseAtRest();
  EXPECT_TRUE(absl::IsAlreadyExists(BeginSave(kTransfer + 1, 1)));
  Resume();
  Update(2);
  PauseAtRest();
  EXPECT_TRUE(BeginSave(kTransfer + 2, 2).ok());
  Resume();
  EXPECT_EQ(Await(kTransfer + 2).state(), GetTransferResponse::DONE);
  EXPECT_TRUE(absl::IsAlreadyExists(BeginRestore(source, kTransfer + 1)));
  EXPECT_EQ(host_->ListModels().models_size(), 0);
}

TEST_F(ShardCheckpointsTest, DamageIsFoundBeforeRowsAreGivenUpAndWhileTheyAreRead) {
  Update(1);
  const internal::v1::CheckpointSource source = SaveAll(1);
  ASSERT_FALSE(Files().empty());
  const std::string damaged = Files().front();
  std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
  file.close();
  internal::v1::BeginRestoreRequest check;
  check.set_transfer_id(kTransfer + 1);
  check.set_check_only(true);
  *check.add_chain() = source;
  ASSERT_TRUE(checkpoints().BeginRestore(check).ok());
  GetTransferResponse checked = Await(kTransfer + 1);
  EXPECT_EQ(checked.state(), GetTransferResponse::FAILED);
  EXPECT_EQ(checked.code(), static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_THAT(checked.error(), HasSubstr(damaged));
  EXPECT_EQ(*RowThree(kHistory), 1.0f) << "looking does no harm";
  ASSERT_TRUE(BeginRestore(source, kTransfer + 2).ok());
  checked = Await(kTransfer + 2);
  EXPECT_EQ(checked.state(), GetTransferResponse::FAILED);
  EXPECT_THAT(checked.error(), HasSubstr(damaged));
  EXPECT_TRUE(absl::IsAborted(Serve(kRestored)));
  EXPECT_EQ(host_->ListModels().models_size(), 0);
}

// Would catch: a shard that is killed for want of memory while it loads a model whose first table
// is stored in fewer bytes than the others.
TEST(BytesToLoadTest, EachTableCountsAsItIsStored) {
  shard::ModelSpec spec;
  spec.partitions = 4;
  spec.partition_count = 2;
  checkpoint::CheckpointChain chain(1);
  v1::CheckpointManifest& manifest = *chain[0].mutable_manifest();
  for (const char* const name : {"a", "b"}) {
    shard::StackSpec& stack = spec.stacks.emplace_back();
    stack.tables.emplace_back().name = name;
    stack.storage_dtype = spec.stacks.size() == 1 ? v1::BFLOAT16 : v1::FLOAT32;
    v1::StackPlan* const plan = manifest.mutable_plan()->add_stacks();
    plan->set_name(name);
    plan->set_embedding_dim(8);
    plan->add_tables()->set_name(name);
    v1::CheckpointFile* const file = manifest.add_files();
    file->set_stack(name);
    file->set_array(checkpoint::kWeightsArray);
    file->set_rows(100);
  }
  EXPECT_EQ(BytesToLoad(spec, chain), 100 * 8 * (2 + 4) / 2);
}

// A shard with room for the rows of one model, and not for slots beside them.
class FullShardTest : public ShardCheckpointsTest {
 protected:
  FullShardTest() : ShardCheckpointsTest(Full().c_str()) {}
  static std::string Full() {
    const auto plan = *preprocess::MakePlan(*config::ParseModel(kModel),
                                            {.shards = 1, .sparsecores_per_shard = 2});
    const int64_t rows = plan.stacks[0].rows_per_partition * plan.stacks[0].embedding_dim * 4;
    return absl::StrReplaceAll(
        kCluster,
        {{"max_batches: 2", absl::StrCat("max_batches: 2 bytes_per_sparsecore: ", rows * 3 / 2)}});
  }
  internal::v1::OpenGroupRequest RankRequest(uint64_t history) {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(kModelId);
    request.set_history(history);
    request.set_group("g#0");
    request.set_ranks(1);
    return request;
  }
  // A checkpoint. A rank has finished, and then the model is lost, for a restore did not fit.
  internal::v1::CheckpointSource FailToRestore() {
    internal::v1::OpenGroupRequest rank = RankRequest(kHistory);
    rank.set_size(1);
    rank.set_generation(1);
    rank.set_opener(1);
    EXPECT_TRUE(host_->OpenGroup(rank).ok());
    rank.set_finished(true);
    EXPECT_TRUE(host_->OpenGroup(rank).ok());
    Update(1);
    internal::v1::CheckpointSource source = SaveAll(1);
    Cancel(kTransfer);
    internal::v1::BeginRestoreRequest larger;  // slots take as much as the rows
    internal::v1::CreateModelRequest& create = *larger.mutable_create();
    create = CreateRequest();
    *create.mutable_config() =
        *config::ParseModel(absl::StrReplaceAll(kModel, {{"sgd {}", "adagrad {}"}}));
    create.set_plan_fingerprint(
        preprocess::MakePlan(create.config(), {.shards = 1, .sparsecores_per_shard = 2})
            ->fingerprint);
    create.set_history(kRestored);
    create.set_replaces(kHistory);
    larger.set_transfer_id(kTransfer + 1);
    *larger.add_chain() = source;
    EXPECT_TRUE(absl::IsResourceExhausted(checkpoints().BeginRestore(larger)));
    here_ = 0;
    return source;
  }
  // The ranks that are known when the checkpoint has been restored.
  internal::v1::OpenGroupResponse RanksAfter(const internal::v1::CheckpointSource& source) {
    EXPECT_TRUE(Eventually([&] {
      const absl::Status begun = BeginRestore(source);
      here_ = 0;  // after an error, too, nothing is here
      return begun.ok();
    }));
    EXPECT_EQ(Await(kTransfer + 1).state(), GetTransferResponse::DONE);
    EXPECT_TRUE(Serve(kRestored).ok());
    const auto known = host_->OpenGroup(RankRequest(kRestored));
    EXPECT_TRUE(known.ok()) << known.status();
    return known.value_or(internal::v1::OpenGroupResponse());
  }
};

// Would catch: ranks of a BOUNDED group that wait, after a restore that was refused and is tried
// again, for one whose trainer has done all its steps and is gone.
TEST_F(FullShardTest, FinishedRanksStaySoAfterARestoreThatDidNotFit) {
  const internal::v1::OpenGroupResponse known = RanksAfter(FailToRestore());
  ASSERT_EQ(known.ranks_size(), 1);
  EXPECT_TRUE(known.ranks(0).finished());
}

// Would catch: ranks of a later run that do not wait for one, since a rank of its number had
// finished in a run before the model was declared anew.
TEST_F(FullShardTest, FinishedRanksAreForgottenWhereTheModelBeginsAnew) {
  const internal::v1::CheckpointSource source = FailToRestore();
  internal::v1::CreateModelRequest anew = CreateRequest();
  anew.set_history(kAnew);
  ASSERT_TRUE(Eventually([&] { return host_->CreateModel(anew).ok(); }));
  ASSERT_TRUE(Serve(kAnew).ok());
  here_ = kAnew;
  EXPECT_EQ(RanksAfter(source).ranks_size(), 0);
}

// A shard with a log, and two models that share a table with each other alone.
class SharedSaveTest : public ShardCheckpointsTest {
 protected:
  static constexpr uint64_t kA = 8, kB = 9;

  SharedSaveTest() : ShardCheckpointsTest(Logged().c_str()) {
    for (const uint64_t id : {kA, kB}) EXPECT_TRUE(Create(id).ok());
  }
  static std::string Logged() {
    static const TempDir storage = *TempDir::Create();
    static int shards = 0;
    folder = storage.Path(absl::StrCat(++shards));
    return absl::StrCat(kCluster, " storage { directory: '", folder,
                        "' durability: LOG log_bytes: 1048576 }");
  }
  absl::Status Create(uint64_t id, bool served = true) {
    internal::v1::CreateModelRequest request = CreateRequest();
    request.set_model_id(id);
    v1::ModelConfig& config = *request.mutable_config();
    config.set_name(absl::StrCat("m", id));
    config.set_enable_variable_deduplication(true);
    config.mutable_tables(0)->mutable_resource()->set_name("r");
    config.mutable_tables(0)->set_name(absl::StrCat("t", id));
    config.mutable_features(0)->set_table(absl::StrCat("t", id));
    config.mutable_tables(0)->set_seed_name("t");
    const auto plan = preprocess::MakePlan(config, {.shards = 1, .sparsecores_per_shard = 2});
    RETURN_IF_ERROR(plan.status());
    request.set_plan_fingerprint(plan->fingerprint);
    RETURN_IF_ERROR(host_->CreateModel(request).status());
    return served ? Serve(kHistory, id) : absl::OkStatus();
  }
  // An update of the shared rows, through the first model.
  void Change(uint64_t number = 1) {
    static const std::vector<int64_t> samples = {3};
    const auto batch = Preprocess();
    std::vector<preprocess::StackBatchView> stacks = batch->ShardView(0);
    stacks[0].feature_samples = samples;
    const auto found = rpc::WaitForAnswer<absl::StatusOr<GatherResult>>([&](const auto& done) {
      host_->Gather({kA, kHistory, number, absl::Hours(1), std::move(stacks), batch, 0, {}}, done);
    });
    ASSERT_TRUE(found.ok()) << found.status();
    ApplyCommand command = Command(number);
    command.model_id = kA;
    command.mutation = {"c", number, UpdateTag(kA)};
    command.attempt = 1;
    const auto staged = Stage(std::move(command));
    ASSERT_TRUE(staged.ok()) << staged.status();
    ASSERT_TRUE(Commit(*staged).ok());
  }
  absl::Status SaveOf(const std::vector<uint64_t>& ids) {
    internal::v1::BeginSaveRequest all;
    for (const uint64_t id : ids) {
      auto paused = Pause(kPause, id);
      while (paused.ok() && paused->entering() > 0) paused = Pause(kPause, id);
      RETURN_IF_ERROR(paused.status());
      internal::v1::BeginSaveRequest& save = id == ids.front() ? all : *all.add_others();
      save.set_model_id(id);
      save.set_history(kHistory);
      save.set_pause_id(kPause);
      save.set_transfer_id(kTransfer);
      save.set_folder(FolderOf(100 + id));
      save.set_checkpoint_id(kCheckpoint);
      save.set_changes(paused->changes());
    }
    return checkpoints().BeginSave(all);
  }
  bool PinsLog(uint64_t id) {
    const internal::v1::ListModelsResponse listed = host_->ListModels();
    for (const internal::v1::HostedModel& model : listed.models()) {
      if (model.model_id() == id) return model.pins_log();
    }
    return false;
  }
  bool FirstSegmentIsThere() const {
    return std::filesystem::exists(folder + "/shard-0000/log/0000000001.records");
  }

  static inline std::string folder;
};

TEST_F(SharedSaveTest, AllThatShareRowsAreSavedAtOneMoment) {
  const absl::Status alone = SaveOf({kA});
  EXPECT_TRUE(absl::IsAborted(alone)) << alone;
  EXPECT_THAT(std::string(alone.message()),
              HasSubstr("model 'm9', which holds resource 'r', too, is not saved"));
  // Nothing of it is left that would be in the way.
  const absl::Status begun = SaveOf({kA, kB});
  ASSERT_TRUE(begun.ok()) << begun;
  const GetTransferResponse saved = Await(kTransfer);
  ASSERT_EQ(saved.state(), GetTransferResponse::DONE) << saved.error();
  ASSERT_EQ(saved.others_size(), 1);
  EXPECT_GT(saved.files_size(), 0);
  ASSERT_EQ(saved.files_size(), saved.others(0).files_size());
  for (int i = 0; i < saved.files_size(); ++i) {
    EXPECT_EQ(saved.files(i).stack(), "t8");
    EXPECT_EQ(saved.others(0).files(i).stack(), "t9");
    EXPECT_EQ(saved.files(i).rows(), saved.others(0).files(i).rows());
  }
  EXPECT_TRUE(absl::IsAborted(SaveOf({kB, kA}))) << "one is under way";
}

TEST_F(SharedSaveTest, TheLogGoesOnFromTheCheckpointOfAll) {
  // The third model, which has never changed, keeps no segment.
  ASSERT_NO_FATAL_FAILURE(Change());
  ASSERT_TRUE(SaveOf({kA, kB}).ok());
  ASSERT_EQ(Await(kTransfer).state(), GetTransferResponse::DONE);
  EXPECT_TRUE(FirstSegmentIsThere());
  // One that goes meanwhile does not stand in the way.
  ASSERT_TRUE(Drop(kHistory, /*unless_serving=*/false, kB).ok());
  const absl::Status complete = Complete(kA);
  ASSERT_TRUE(complete.ok()) << complete;
  EXPECT_FALSE(FirstSegmentIsThere());
}

TEST_F(SharedSaveTest, WhoJoinsMeanwhileKeepsTheLog) {
  ASSERT_NO_FATAL_FAILURE(Change());
  ASSERT_TRUE(SaveOf({kA, kB}).ok());
  ASSERT_EQ(Await(kTransfer).state(), GetTransferResponse::DONE);
  ASSERT_TRUE(Create(kB + 1).ok());
  ASSERT_TRUE(Complete(kA).ok());
  EXPECT_TRUE(FirstSegmentIsThere()) << "it has no checkpoint";
}

// What is saved follows from the log, whatever is known of changes: else it might never get
// shorter.
TEST_F(SharedSaveTest, WhatALongLogBeginsWithIsToBeSaved) {
  ASSERT_NO_FATAL_FAILURE(Change());
  EXPECT_FALSE(PinsLog(kA)) << "it is short";
  for (uint64_t number = 2; !PinsLog(kA); ++number) {
    ASSERT_NO_FATAL_FAILURE(Change(number));
    ASSERT_LT(number, 1'000'000u);
  }
  EXPECT_TRUE(PinsLog(kB)) << "it has the same rows";
  EXPECT_FALSE(PinsLog(kModelId)) << "it has never changed";
  ASSERT_TRUE(SaveOf({kA, kB}).ok());
  ASSERT_EQ(Await(kTransfer).state(), GetTransferResponse::DONE);
  EXPECT_TRUE(PinsLog(kA)) << "it may come to nothing yet";
  ASSERT_TRUE(Complete(kA).ok());
  EXPECT_FALSE(PinsLog(kA));
}

// As one is whose coordinator has died while it declared the model.
TEST_F(SharedSaveTest, AModelThatIsNotServedKeepsTheLogButStopsNoSave) {
  ASSERT_NO_FATAL_FAILURE(Change());
  ASSERT_TRUE(Create(kB + 1, /*served=*/false).ok());
  const absl::Status begun = SaveOf({kA, kB});
  ASSERT_TRUE(begun.ok()) << begun;
  ASSERT_EQ(Await(kTransfer).state(), GetTransferResponse::DONE);
  ASSERT_TRUE(Complete(kA).ok());
  EXPECT_TRUE(FirstSegmentIsThere());
  ASSERT_TRUE(Serve(kHistory, kB + 1).ok());
  EXPECT_TRUE(absl::IsAborted(SaveOf({kA, kB})));
}

}  // namespace shard_checkpoints_test
}  // namespace host
}  // namespace emberd
