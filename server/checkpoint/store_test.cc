// Checkpoints that come and go, as everybody sees them.
#include "server/checkpoint/store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace store_test {

using absl::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;

class StoreTest : public testing::Test {
 protected:
  // With one state file, and no rows.
  absl::Status Save(const std::string& name, const std::string& parent = "", bool automatic = false,
                    uint64_t history = 0) {
    const auto folder = store_.BeginSave(model_, name);
    if (!folder.ok()) return folder.status();
    return Commit(*folder, name, parent, automatic, history);
  }

  absl::Status Commit(const std::string& folder, const std::string& name,
                      const std::string& parent = "", bool automatic = false, uint64_t history = 0,
                      const std::function<absl::Status()>& still_wanted = nullptr) {
    v1::CheckpointManifest manifest;
    manifest.set_format_version(kManifestVersion);
    manifest.set_model(model_);
    manifest.set_name(name);
    manifest.set_checkpoint_id(std::hash<std::string>()(name));
    manifest.set_saved_at_ms(++clock_);
    manifest.set_automatic(automatic);
    manifest.set_history(history);
    manifest.mutable_plan()->set_partitions(2);
    if (!parent.empty()) {
      manifest.set_parent(parent);
      manifest.set_parent_id(std::hash<std::string>()(parent));
      manifest.set_chain(store_.Read(model_, parent)->chain() + 1);
    }
    *manifest.add_states() = *files::WriteListedFile(folder, "state.s0000.pb", name);
    return store_.Commit(folder, &manifest, still_wanted);
  }

  std::vector<std::string> Names(const std::string& model = "m/1") {
    const auto list = store_.List(model);
    EXPECT_TRUE(list.ok()) << list.status();
    std::vector<std::string> names;
    for (const v1::CheckpointInfo& info : list->checkpoints()) names.push_back(info.name());
    return names;
  }

  // What is in the folder of the model, hidden or not.
  std::vector<std::string> Folders() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir_.Path("m%2F1"))) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  const TempDir dir_ = *TempDir::Create();
  const CheckpointStore store_{dir_.path()};
  std::string model_ = "m/1";  // of what is saved
  int64_t clock_ = 0;
};

TEST_F(StoreTest, ListsWhatWasSavedNewestFirst) {
  EXPECT_THAT(Names(), ElementsAre());
  EXPECT_THAT(Names(""), ElementsAre());
  EXPECT_EQ(store_.Newest("m/1").status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(Save("b").ok());
  ASSERT_TRUE(Save("a").ok());
  EXPECT_THAT(Names(), ElementsAre("a", "b"));
  EXPECT_THAT(Names(""), ElementsAre("a", "b"));
  EXPECT_THAT(Names("other"), ElementsAre());
  EXPECT_EQ(store_.Newest("m/1")->name(), "a");
  EXPECT_EQ(store_.Read("m/1", "b")->saved_at_ms(), 1);
  EXPECT_EQ(*files::ReadListedFile(dir_.Path("m%2F1/b"), store_.Read("m/1", "b")->states(0)), "b");
  EXPECT_THAT(Folders(), ElementsAre("a", "b"));
}

TEST_F(StoreTest, AFolderWithoutACommitIsNoCheckpoint) {
  const auto folder = store_.BeginSave("m/1", "a");
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_THAT(Names(), ElementsAre());
  EXPECT_EQ(store_.Read("m/1", "a").status().code(), StatusCode::kNotFound);
  store_.Abandon(*folder);
  store_.Abandon(*folder);
  EXPECT_THAT(Folders(), ElementsAre());
  EXPECT_EQ(store_.Heartbeat(*folder).code(), StatusCode::kAborted);
  EXPECT_FALSE(std::filesystem::exists(*folder));
}

TEST_F(StoreTest, ANameIsTakenOnce) {
  const auto first = store_.BeginSave("m/1", "a");
  const auto second = store_.BeginSave("m/1", "");  // named later
  ASSERT_TRUE(Commit(*first, "a").ok());
  EXPECT_EQ(store_.BeginSave("m/1", "a").status().code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(Commit(*second, "a").code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(store_.Read("m/1", "a")->saved_at_ms(), 1);
}

TEST_F(StoreTest, RefusesNamesThatAreNone) {
  for (const std::string name : {"", ".", "..", "../x", "a/b", "-a", "a b", "ä"}) {
    if (!name.empty()) {
      EXPECT_EQ(store_.BeginSave("m/1", name).status().code(), StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(store_.Read("m/1", name).status().code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(store_.Delete("m/1", name).status().code(), StatusCode::kInvalidArgument) << name;
  }
  EXPECT_TRUE(CheckCheckpointName(std::string(128, 'a')).ok());
  EXPECT_FALSE(CheckCheckpointName(std::string(129, 'a')).ok());
}

// A script whose variable is not set: DIR/ as the folder of a model has models for checkpoints.
TEST_F(StoreTest, NoModelIsNotAllModels) {
  model_ = "clicks";
  ASSERT_TRUE(Save("a").ok());
  ASSERT_TRUE(Save("b", "", true).ok());
  for (const std::string name : {"clicks", "a", "newest"}) {
    EXPECT_EQ(store_.Read("", name).status().code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(store_.Chain("", name).status().code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(store_.Delete("", name).status().code(), StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(store_.Newest("").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_.RemoveAutomatic("", 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store_.GiveUp("").code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(Names("clicks"), ElementsAre("b", "a"));
  EXPECT_FALSE(std::filesystem::exists(dir_.Path(".lock")));
}

TEST_F(StoreTest, FindsAllThatACheckpointBuildsOn) {
  ASSERT_TRUE(Save("a").ok());
  ASSERT_TRUE(Save("b", "a").ok());
  ASSERT_TRUE(Save("c", "b").ok());
  const auto chain = store_.Chain("m/1", "c");
  ASSERT_TRUE(chain.ok()) << chain.status();
  ASSERT_EQ(chain->size(), 3u);
  EXPECT_EQ((*chain)[0].manifest().name(), "c");
  EXPECT_EQ((*chain)[2].folder(), dir_.Path("m%2F1/a"));
  EXPECT_EQ(store_.List("m/1")->checkpoints(0).chain(), 2);
}

TEST_F(StoreTest, WhatAnotherBuildsOnStays) {
  ASSERT_TRUE(Save("a").ok());
  ASSERT_TRUE(Save("b", "a").ok());
  EXPECT_THAT(std::string(store_.Delete("m/1", "a").status().message()),
              HasSubstr("checkpoint \"b\" builds on \"a\""));
  EXPECT_EQ(store_.Delete("m/1", "a").status().code(), StatusCode::kFailedPrecondition);
  const int64_t bytes = *store_.Delete("m/1", "b");
  EXPECT_GT(bytes, 0);
  EXPECT_TRUE(store_.Delete("m/1", "a").ok());
  EXPECT_EQ(store_.Delete("m/1", "a").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(Folders(), ElementsAre());
}

// The parent may go, or be another one of its name, while the child is written.
TEST_F(StoreTest, AChildNeedsTheParentThatItWasMadeOf) {
  ASSERT_TRUE(Save("a").ok());
  const auto folder = store_.BeginSave("m/1", "b");
  v1::CheckpointManifest manifest = *store_.Read("m/1", "a");
  manifest.set_name("b");
  manifest.set_parent("a");
  manifest.set_parent_id(5);
  manifest.set_chain(1);
  *manifest.mutable_states(0) = *files::WriteListedFile(*folder, "state.s0000.pb", "b");
  EXPECT_EQ(store_.Commit(*folder, &manifest).code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(Names(), ElementsAre("a"));
  // What builds on other arrays could never be read.
  manifest.set_parent_id(store_.Read("m/1", "a")->checkpoint_id());
  manifest.mutable_plan()->set_partitions(4);
  const absl::Status other = store_.Commit(*folder, &manifest);
  EXPECT_EQ(other.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.message()), HasSubstr("has other arrays than \"a\""));
  EXPECT_THAT(Names(), ElementsAre("a"));
}

TEST_F(StoreTest, NeedsAllFilesThatTheManifestLists) {
  const auto folder = store_.BeginSave("m/1", "a");
  v1::CheckpointManifest manifest;
  manifest.set_format_version(kManifestVersion);
  manifest.set_model("m/1");
  manifest.set_name("a");
  manifest.mutable_plan()->set_partitions(1);
  *manifest.add_states() = *files::WriteListedFile(*folder, "state.s0000.pb", "b");
  std::filesystem::remove(files::PathIn(*folder, "state.s0000.pb"));
  EXPECT_EQ(store_.Commit(*folder, &manifest).code(), StatusCode::kDataLoss);
  EXPECT_THAT(Names(), ElementsAre());
}

TEST_F(StoreTest, AutomaticOnesGoWhenThereAreEnough) {
  ASSERT_TRUE(Save("kept").ok());
  for (const std::string name : {"1", "2"}) ASSERT_TRUE(Save(name, "", true).ok());
  ASSERT_TRUE(Save("3", "2", true).ok());
  ASSERT_TRUE(Save("4", "3", true).ok());
  EXPECT_GT(*store_.RemoveAutomatic("m/1", 2), 0);
  EXPECT_THAT(Names(), ElementsAre("4", "3", "2", "kept"));  // 4 needs 3 and 2
  ASSERT_TRUE(Save("5", "", true).ok());
  ASSERT_TRUE(Save("6", "", true).ok());
  EXPECT_GT(*store_.RemoveAutomatic("m/1", 2), 0);
  EXPECT_THAT(Names(), ElementsAre("6", "5", "kept"));
  // Their rows were given up.
  const int64_t given_up = store_.List("m/1")->checkpoints(0).saved_at_ms();
  EXPECT_GT(*store_.RemoveAutomatic("m/1", 2, 0, given_up), 0);
  EXPECT_THAT(Names(), ElementsAre("kept"));
}

// A clock that is set back, or the one of another coordinator that is behind: by its own date, the
// checkpoint that was saved last would be the oldest, and the first to be deleted.
TEST_F(StoreTest, TheNewestIsTheOneThatWasCommittedLastWhateverTheClockSays) {
  constexpr uint64_t kHistory = 7;
  clock_ = 100;
  for (const char* name : {"1", "2", "3"}) ASSERT_TRUE(Save(name, "", true, kHistory).ok());
  clock_ = 0;
  ASSERT_TRUE(Save("4", "", true, kHistory).ok());
  ASSERT_TRUE(Save("5", "", true, kHistory).ok());
  EXPECT_THAT(Names(), ElementsAre("5", "4", "3", "2", "1"));
  EXPECT_EQ(store_.Newest("m/1")->name(), "5");
  EXPECT_EQ(store_.Read("m/1", "5")->saved_at_ms(), 105);
  ASSERT_TRUE(store_.SetBeginning(*store_.Read("m/1", "5"), kHistory).ok());
  EXPECT_EQ(store_.Delete("m/1", "5", kHistory).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_GT(*store_.RemoveAutomatic("m/1", 2, kHistory), 0);
  EXPECT_THAT(Names(), ElementsAre("5", "4"));
}

TEST_F(StoreTest, WhatIsSavedAfterRowsWereGivenUpIsLaterThanThat) {
  clock_ = 100;
  ASSERT_TRUE(Save("a").ok());
  ASSERT_TRUE(store_.GiveUp("m/1").ok());
  EXPECT_EQ(*store_.GivenUpUntil("m/1"), 101);
  ASSERT_TRUE(store_.Delete("m/1", "a").ok());
  clock_ = 0;
  ASSERT_TRUE(Save("b", "", /*automatic=*/false, /*history=*/7).ok());
  EXPECT_GT(store_.Read("m/1", "b")->saved_at_ms(), *store_.GivenUpUntil("m/1"));
  ASSERT_TRUE(store_.GiveUp("m/1", /*history=*/8).ok());
  EXPECT_EQ(*store_.GivenUpUntil("m/1"), 101) << "the newest has other rows";
  ASSERT_TRUE(store_.GiveUp("m/1", /*history=*/7).ok());
  EXPECT_EQ(*store_.GivenUpUntil("m/1"), store_.Read("m/1", "b")->saved_at_ms());
}

// The rows are dropped while they are being committed, through another coordinator: either the save
// hears of it, or the note is of its checkpoint, too.
TEST_F(StoreTest, NoCheckpointSlipsPastANoteOfItsRows) {
  const auto folder = store_.BeginSave("m/1", "a");
  ASSERT_TRUE(folder.ok()) << folder.status();
  const auto dropped = [] { return absl::DataLossError("its rows were dropped"); };
  EXPECT_EQ(Commit(*folder, "a", "", true, /*history=*/7, dropped).code(), StatusCode::kDataLoss);
  EXPECT_THAT(Names(), ElementsAre());
  const auto lock = std::filesystem::canonical(dir_.Path("m%2F1/.lock"));
  const auto lockers = [&] {  // that have the lock, or wait for it
    std::error_code gone;
    return std::count_if(std::filesystem::directory_iterator("/proc/self/fd"), {},
                         [&](const std::filesystem::directory_entry& file) {
                           return std::filesystem::read_symlink(file.path(), gone) == lock;
                         });
  };
  std::thread drop;
  std::atomic<bool> over{false};
  const auto still_there = [&] {
    drop = std::thread([&] {
      EXPECT_TRUE(store_.GiveUp("m/1", /*history=*/7).ok());
      over = true;
    });
    EXPECT_TRUE(Eventually([&] { return over || lockers() == 2; }));
    return absl::OkStatus();
  };
  const absl::Status committed = Commit(*folder, "a", "", true, /*history=*/7, still_there);
  EXPECT_TRUE(committed.ok()) << committed;
  drop.join();
  EXPECT_EQ(store_.GivenUpUntil("m/1").value_or(-1), store_.Read("m/1", "a")->saved_at_ms());
}

// Would catch: a model that was dropped, and comes back by itself when somebody puts a file of a
// checkpoint back that was damaged at the time.
TEST_F(StoreTest, WhatWasDamagedWhenRowsWereGivenUpIsGivenUpToo) {
  for (const bool has_older : {false, true}) {
    model_ = has_older ? "two" : "one";
    clock_ = absl::ToUnixMillis(absl::Now()) - 3'600'000;  // a date
    ASSERT_TRUE(!has_older || Save("a").ok());
    ASSERT_TRUE(Save("b").ok());
    const std::string manifest = dir_.Path(absl::StrCat(model_, "/b/manifest.json"));
    std::filesystem::rename(manifest, dir_.Path("aside"));
    ASSERT_TRUE(store_.GiveUp(model_).ok());
    std::filesystem::rename(dir_.Path("aside"), manifest);
    EXPECT_GE(store_.GivenUpUntil(model_).value_or(0), store_.Read(model_, "b")->saved_at_ms());
    ASSERT_TRUE(Save("c").ok());
    EXPECT_LT(store_.GivenUpUntil(model_).value_or(0), store_.Read(model_, "c")->saved_at_ms());
  }
}

// Through two coordinators: each may drop the model.
TEST_F(StoreTest, SeveralMayGiveUpRowsAtOnce) {
  ASSERT_TRUE(Save("a").ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      for (int k = 0; k < 50; ++k) {
        const absl::Status given_up = store_.GiveUp("m/1");
        ASSERT_TRUE(given_up.ok()) << given_up;
        ASSERT_EQ(store_.GivenUpUntil("m/1").value_or(-1), 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// storage.durability LOG: without the checkpoint that it goes on from a log is worth nothing.
TEST_F(StoreTest, WhatALogBeginsWithStays) {
  constexpr uint64_t kHistory = 7;
  const auto deletes = [&](const std::string& name) {
    const absl::Status status = store_.Delete("m/1", name, kHistory).status();
    EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status)) << status;
    return status.ok();
  };
  ASSERT_TRUE(Save("other", "", false, kHistory - 1).ok());
  ASSERT_TRUE(Save("restored", "", false, kHistory - 1).ok());
  ASSERT_TRUE(store_.SetBeginning(*store_.Read("m/1", "restored"), kHistory).ok());
  ASSERT_TRUE(Save("later", "", false, kHistory - 1).ok());
  EXPECT_FALSE(deletes("restored"));
  EXPECT_TRUE(deletes("later"));
  EXPECT_TRUE(deletes("other"));
  // Some shards have heard of it.
  ASSERT_TRUE(Save("a", "", false, kHistory).ok());
  EXPECT_FALSE(deletes("restored"));
  EXPECT_FALSE(deletes("a"));
  // All have.
  ASSERT_TRUE(Save("b", "", false, kHistory).ok());
  ASSERT_TRUE(store_.SetBeginning(*store_.Read("m/1", "b"), kHistory).ok());
  EXPECT_TRUE(deletes("restored"));
  EXPECT_TRUE(deletes("a"));
  const absl::Status refused = store_.Delete("m/1", "b", kHistory).status();
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("emberctl checkpoint save m/1"));
  EXPECT_TRUE(store_.Delete("m/1", "b").ok());  // the model was dropped
  v1::CheckpointManifest gone;
  gone.set_model("m/1");
  gone.set_name("b");
  EXPECT_EQ(store_.SetBeginning(gone, kHistory).code(), StatusCode::kNotFound);
}

TEST_F(StoreTest, PruningLeavesWhatALogBeginsWith) {
  constexpr uint64_t kHistory = 7;
  for (const char* name : {"1", "2", "3", "4"}) ASSERT_TRUE(Save(name, "", true, kHistory).ok());
  // No shard is known to have heard of any.
  EXPECT_TRUE(store_.RemoveAutomatic("m/1", 1, kHistory).ok());
  EXPECT_THAT(Names(), ElementsAre("4", "3", "2", "1"));
  ASSERT_TRUE(store_.SetBeginning(*store_.Read("m/1", "2"), kHistory).ok());
  EXPECT_TRUE(store_.RemoveAutomatic("m/1", 1, kHistory).ok());
  EXPECT_THAT(Names(), ElementsAre("4", "3", "2"));
  ASSERT_TRUE(store_.SetBeginning(*store_.Read("m/1", "4"), kHistory).ok());
  EXPECT_TRUE(store_.RemoveAutomatic("m/1", 1, kHistory).ok());
  EXPECT_THAT(Names(), ElementsAre("4"));
}

TEST_F(StoreTest, DamagedOnesAreToldAndPassedOver) {
  ASSERT_TRUE(Save("a").ok());
  ASSERT_TRUE(Save("b").ok());
  ASSERT_TRUE(Save("c", "b").ok());
  std::ofstream(dir_.Path("m%2F1/b/manifest.json"), std::ios::app) << " ";
  const auto list = store_.List("m/1");
  ASSERT_EQ(list->damaged_size(), 1);
  EXPECT_THAT(list->damaged(0), HasSubstr("m%2F1/b/manifest.json: its checksum is wrong"));
  EXPECT_EQ(store_.Read("m/1", "b").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(store_.Chain("m/1", "c").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(store_.Newest("m/1")->name(), "a");
  // A folder that was copied to another name is not the checkpoint of this name.
  std::filesystem::copy(dir_.Path("m%2F1/a"), dir_.Path("m%2F1/d"));
  EXPECT_THAT(std::string(store_.Read("m/1", "d").status().message()),
              HasSubstr("it is the manifest of checkpoint \"a\""));
  std::filesystem::create_directory(dir_.Path("m%2F1/e"));
  EXPECT_EQ(store_.List("m/1")->damaged_size(), 3);
  // Where none is intact, the error names them.
  std::filesystem::rename(dir_.Path("m%2F1/a"), dir_.Path("m%2F1/.a"));
  const absl::Status none = store_.Newest("m/1").status();
  EXPECT_EQ(none.code(), StatusCode::kDataLoss);
  EXPECT_THAT(
      std::string(none.message()),
      testing::AllOf(HasSubstr("only 4 damaged"), HasSubstr("m%2F1/b/manifest.json: its checksum"),
                     HasSubstr("checkpoint \"c\" builds on \"b\"")));
  std::filesystem::rename(dir_.Path("m%2F1/.a"), dir_.Path("m%2F1/a"));
  // They can be deleted.
  ASSERT_TRUE(store_.Delete("m/1", "c").ok());
  for (const char* name : {"b", "d", "e"}) EXPECT_TRUE(store_.Delete("m/1", name).ok()) << name;
  EXPECT_THAT(Folders(), ElementsAre("a"));
}

// An error of the disk, which may pass.
TEST_F(StoreTest, WhatCannotBeReadNowIsReplacedByNothingOlder) {
  ASSERT_TRUE(Save("a", "", /*automatic=*/true).ok());
  ASSERT_TRUE(Save("b", "a", /*automatic=*/true).ok());
  ASSERT_TRUE(Save("c").ok());
  for (const char* name : {"b", "c"}) {
    const std::string path = dir_.Path(absl::StrCat("m%2F1/", name, "/manifest.json"));
    std::filesystem::rename(path, dir_.Path("aside"));
    std::filesystem::create_symlink(path, path);
    EXPECT_EQ(store_.List("m/1")->damaged_size(), 1);
    for (const absl::Status& status :
         {store_.ListAll("m/1").status(), store_.Newest("m/1").status(),
          store_.Delete("m/1", "a").status(), store_.RemoveAutomatic("m/1", 1).status(),
          store_.GiveUp("m/1")}) {
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    }
    std::filesystem::rename(dir_.Path("aside"), path);
  }
  EXPECT_EQ(store_.Newest("m/1")->name(), "c");
  EXPECT_THAT(Folders(), ElementsAre("a", "b", "c"));
}

TEST_F(StoreTest, FindsAnyFlippedByteOfAManifest) {
  ASSERT_TRUE(Save("a").ok());
  const std::string path = dir_.Path("m%2F1/a/manifest.json");
  const std::string text = *files::ReadFileWhole(path);
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int bit : {0, 5, 7}) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ 1 << bit);
      EXPECT_EQ(ParseManifest(changed).status().code(), StatusCode::kDataLoss) << i;
    }
    EXPECT_FALSE(ParseManifest(text.substr(0, i)).ok()) << i;
  }
}

// What a dead process left goes when the next one begins; what a live one is writing stays.
TEST_F(StoreTest, LitterGoesWithTheNextSave) {
  const auto dead = *store_.BeginSave("m/1", "a");
  const auto alive = *store_.BeginSave("m/1", "a");
  std::filesystem::create_directory(dir_.Path("m%2F1/.deleted-1"));
  std::ofstream(files::PathIn(dead, "x.safetensors")) << "rows";
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::seconds(62);
  for (const std::string& folder : {dead, alive, dir_.Path("m%2F1/.deleted-1")}) {
    std::filesystem::last_write_time(folder, long_ago);
  }
  ASSERT_TRUE(store_.Heartbeat(alive).ok());
  ASSERT_TRUE(Save("b").ok());
  EXPECT_EQ(Folders().size(), 2u);
  EXPECT_TRUE(std::filesystem::exists(alive));
  EXPECT_TRUE(Commit(alive, "a").ok());
  EXPECT_THAT(Folders(), ElementsAre("a", "b"));
}

// Whatever stands where folders of checkpoints should: an error that names it, and no end of the
// process, from every function.
TEST_F(StoreTest, SurvivesEveryStateOfTheFileSystem) {
  namespace fs = std::filesystem;
  const std::string top = dir_.Path("checkpoints");
  const struct {
    const char* what;
    std::function<void()> make;
    const char* said;  // of a save
  } cases[] = {
      {"a link that leads nowhere", [&] { fs::create_symlink(dir_.Path("gone"), top); }, "/gone"},
      {"a link to itself", [&] { fs::create_symlink(top, top); }, "is a link to"},
      {"links in a circle",
       [&] {
         fs::create_symlink(dir_.Path("other"), top);
         fs::create_symlink(top, dir_.Path("other"));
       },
       "is a link to"},
      {"a file", [&] { std::ofstream(top) << "x"; }, "checkpoints"},
      {"a model that is a link to itself",
       [&] { fs::create_directory(top), fs::create_symlink(top + "/m%2F1", top + "/m%2F1"); },
       "is a link to"},
      {"a model that is a file",
       [&] { fs::create_directory(top), std::ofstream(top + "/m%2F1") << "x"; }, "m%2F1"},
      {"a device", [&] { fs::create_symlink("/dev/null", top); }, "checkpoints"},
      {"a place where nobody may write", [&] { fs::create_symlink("/proc/1", top); }, "m%2F1"},
  };
  for (const auto& one : cases) {
    SCOPED_TRACE(one.what);
    one.make();
    const CheckpointStore store(top);
    const auto folder = store.BeginSave("m/1", "a");
    EXPECT_FALSE(folder.ok());
    EXPECT_THAT(std::string(folder.status().message()), HasSubstr(one.said));
    for (const absl::Status& status :
         {store.Read("m/1", "a").status(), store.Newest("m/1").status(),
          store.Chain("m/1", "a").status(), store.BeginSave("m/1", "").status(),
          store.Delete("m/1", "a").status()}) {
      EXPECT_FALSE(status.ok());
      EXPECT_FALSE(status.message().empty());
    }
    EXPECT_FALSE(store.List("m/1").ok() && store.List("").ok() &&
                 !absl::StrContains(one.what, "nobody may write"))
        << "looks like an empty folder";
    store.RemoveAutomatic("m/1", 1).status().IgnoreError();
    store.GiveUp("m/1").IgnoreError();
    store.GivenUpUntil("m/1").status().IgnoreError();
    store.Abandon(top);
    for (const char* name : {"checkpoints", "other"}) fs::remove_all(dir_.Path(name));
  }
}

TEST_F(StoreTest, ListsFoldersWhoseNamesAreNoText) {
  ASSERT_TRUE(Save("a").ok());
  std::filesystem::create_directory(dir_.Path("m%2F1/caf\xe9"));
  const auto list = store_.List("m/1");
  ASSERT_TRUE(list.ok()) << list.status();
  ASSERT_EQ(list->damaged_size(), 1);
  EXPECT_THAT(list->damaged(0), HasSubstr("caf\\xe9/manifest.json: is missing"));
  v1::ListCheckpointsResponse received;  // which refuses what is not UTF-8
  EXPECT_TRUE(received.ParseFromString(list->SerializeAsString()));
  EXPECT_THAT(Names(), ElementsAre("a"));
}

// As lost+found, where the checkpoints have a disk of their own: by the list of all, coordinators
// find the models that are to come back.
TEST_F(StoreTest, AFolderThatMayNotBeReadHidesNoModel) {
  ASSERT_TRUE(Save("a").ok());
  const std::string folder = dir_.Path("lost+found");
  std::filesystem::create_directory(folder);
  std::filesystem::permissions(folder, std::filesystem::perms::none);
  absl::StatusOr<v1::ListCheckpointsResponse> all;
  absl::Status unreadable;
  std::thread reader([&] {
    __user_cap_header_struct self = {_LINUX_CAPABILITY_VERSION_3, 0};
    const __user_cap_data_struct none[2] = {};  // root may read everything
    ASSERT_EQ(syscall(SYS_capset, &self, none), 0);
    all = store_.List("", &unreadable);
  });
  reader.join();
  std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->checkpoints_size(), 1);
  EXPECT_EQ(all->checkpoints(0).name(), "a");
  ASSERT_EQ(all->damaged_size(), 1);
  EXPECT_THAT(all->damaged(0), HasSubstr("lost+found: cannot be read"));
  EXPECT_EQ(unreadable.code(), StatusCode::kPermissionDenied);
}

TEST_F(StoreTest, NewestIsNoNameOfACheckpoint) {
  ASSERT_TRUE(Save("a").ok());
  ASSERT_TRUE(Save("b", "a").ok());
  EXPECT_EQ(store_.Read("m/1", "newest")->name(), "b");
  const auto chain = store_.Chain("m/1", "newest");
  ASSERT_TRUE(chain.ok()) << chain.status();
  EXPECT_EQ(chain->at(0).folder(), dir_.Path("m%2F1/b"));
  for (const absl::Status& status : {Save("newest"), store_.Delete("m/1", "newest").status()}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("stands for the newest checkpoint"));
  }
  EXPECT_THAT(Names(), ElementsAre("b", "a"));
}

}  // namespace store_test
}  // namespace emberd::checkpoint
