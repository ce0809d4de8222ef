// What may happen to checkpoints: bytes that flip, files that go or change places, processes that
// die at any step, disks that are full or may not be written, and many processes at work at once.
// Each time, what was there before is whole, and what is damaged is named.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/temp_dir.h"
#include "base/testing/sanitized.h"
#include "base/testing/seed.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/store.h"
#include "server/checkpoint/testing/tables.h"
#include "server/files/files.h"

namespace emberd {

std::string armed_failpoint;  // in a child of the test

// Instead of that of base/failpoint.cc, which does nothing.
void ReachFailpoint(const char* name) {
  if (armed_failpoint == name) raise(SIGKILL);
}

namespace checkpoint {
namespace damage_test {

using testing::ElementsAre;
using testing::HasSubstr;

absl::Status GoOn(int64_t, int64_t) { return absl::OkStatus(); }

// How a child that does `work` ends. Failed expectations are those of the test.
int StatusOfChild(const std::function<void()>& work) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    work();
    std::fflush(nullptr);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

class DamageTest : public testing::Test {
 protected:
  DamageTest() : random_(TestSeed()), tables_(RandomTables(random_), 2) {
    do {
      tables_.Change(random_);
    } while (tables_.rows_changed() == 0);  // it may be of no row
    EXPECT_TRUE(tables_.Save(store_, "a").ok());
    before_ = tables_.arrays();
    tables_.Change(random_);
  }

  absl::Status Verify(const std::string& name) {
    const auto chain = store_.Chain("m", name);
    return chain.ok() ? VerifyChain(*chain, GoOn) : chain.status();
  }

  // Whole, and with these values.
  void ExpectWhole(const std::string& name, const std::vector<TestTables::Array>& arrays) {
    ASSERT_TRUE(Verify(name).ok()) << Verify(name);
    const auto chain = store_.Chain("m", name);
    for (const TestTables::Array& array : arrays) {
      auto reader = *TableReader::Open(&*chain, array.table, array.slot);
      std::vector<float> values(array.values.size());
      ASSERT_TRUE(reader->Read({.count = array.rows}, values.data()).ok());
      EXPECT_EQ(values, array.values);
    }
  }

  std::vector<std::string> Names() {
    std::vector<std::string> names;
    const auto list = *store_.List("m");
    for (const auto& info : list.checkpoints()) names.push_back(info.name());
    return names;
  }

  std::vector<std::string> Folders() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir_.Path("m"))) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::vector<std::string> FilesOf(const std::string& folder) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      if (entry.is_regular_file() && entry.path().filename() != ".lock")
        files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  void ExpectKilled(const std::string& failpoint, const std::function<void()>& work) {
    const int status = StatusOfChild([&] {
      armed_failpoint = failpoint;
      work();
    });
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << failpoint << " " << status;
  }

  // As if a minute had passed, and somebody saved.
  void CleanUp() {
    const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::seconds(62);
    for (const std::string& folder : Folders()) {
      if (folder[0] == '.') std::filesystem::last_write_time(dir_.Path("m/" + folder), long_ago);
    }
    store_.Abandon(*store_.BeginSave("m", "next"));
  }

  std::mt19937_64 random_;
  const TempDir dir_ = *TempDir::Create();
  const CheckpointStore store_{dir_.path()};
  TestTables tables_;
  std::vector<TestTables::Array> before_;
};

TEST_F(DamageTest, AnyFlippedByteIsFound) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  tables_.Change(random_);
  ASSERT_TRUE(tables_.Save(store_, "c", "b").ok());
  const std::vector<std::string> files = FilesOf(dir_.path());
  for (int i = 0; i < Rounds(1000); ++i) {
    const std::string& path = files[random_() % files.size()];
    const auto at = static_cast<std::streamoff>(random_() % std::filesystem::file_size(path));
    std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
    stream.seekg(at);
    const auto byte = static_cast<char>(stream.get());
    const auto put = [&](char value) {
      stream.seekp(at);
      stream.put(value);
      stream.flush();
    };
    put(static_cast<char>(byte ^ 1 << random_() % 8));
    const absl::Status status = Verify("c");
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << path << " byte " << at;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path)) << " byte " << at;
    put(byte);
  }
  ExpectWhole("c", tables_.arrays());
}

TEST_F(DamageTest, AMissingFileIsNamed) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  for (const std::string& path : FilesOf(dir_.path())) {
    std::filesystem::rename(path, dir_.Path("gone"));
    const absl::Status status = Verify("b");
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << path;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(path, ": is missing")));
    std::filesystem::rename(dir_.Path("gone"), path);
  }
  ExpectWhole("b", tables_.arrays());
}

// Of one checkpoint, or of two of them.
TEST_F(DamageTest, FilesThatChangedPlacesAreNamed) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  const std::vector<std::string> files = FilesOf(dir_.path());
  for (int i = 0; i < 100; ++i) {
    const std::string& one = files[random_() % files.size()];
    const std::string& other = files[random_() % files.size()];
    if (*files::ReadFileWhole(one) == *files::ReadFileWhole(other)) continue;
    const auto swap = [&] {
      std::filesystem::rename(one, dir_.Path("swap"));
      std::filesystem::rename(other, one);
      std::filesystem::rename(dir_.Path("swap"), other);
    };
    swap();
    const absl::Status status = Verify("b");
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << one << " " << other;
    EXPECT_TRUE(absl::StrContains(status.message(), one) ||
                absl::StrContains(status.message(), other))
        << status;
    swap();
  }
  ExpectWhole("b", tables_.arrays());
}

// Such a file would be read as it is, without a word, by whoever trusts names.
TEST_F(DamageTest, AReaderRefusesADamagedFileBeforeItGivesARow) {
  CheckpointChain chain = *store_.Chain("m", "a");
  for (const v1::CheckpointFile& file : chain[0].manifest().files()) {
    if (file.array() != kWeightsArray || file.rows() == 0) continue;
    std::fstream stream(files::PathIn(chain[0].folder(), file.path()),
                        std::ios::binary | std::ios::in | std::ios::out);
    stream.seekg(file.bytes() / 2 + 2048);
    const auto byte = static_cast<char>(stream.get());
    stream.seekp(file.bytes() / 2 + 2048);
    stream.put(static_cast<char>(byte ^ 1));
  }
  int refused = 0;
  for (const TestTables::Array& array : before_) {
    if (!array.slot.empty()) continue;
    SCOPED_TRACE(array.table);
    auto reader = *TableReader::Open(&chain, array.table, "");
    std::vector<float> values(array.values.size());
    const absl::Status status = reader->Read({.count = array.rows}, values.data());
    if (status.ok()) {  // it has no file, for nobody has touched its rows
      EXPECT_EQ(values, array.values);
      continue;
    }
    ++refused;
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(values, testing::Each(0.0f));
  }
  EXPECT_GT(refused, 0);
}

TEST_F(DamageTest, DyingWhileSavingLeavesACheckpointOrNone) {
  for (const std::string failpoint : {"save.rows_are_written", "save.manifest_is_written"}) {
    ExpectKilled(failpoint, [&] { (void)tables_.Save(store_, "b", "a"); });
    EXPECT_THAT(Names(), ElementsAre("a")) << failpoint;
    EXPECT_EQ(Folders().size(), 2u);
    ExpectWhole("a", before_);
    CleanUp();
    EXPECT_THAT(Folders(), ElementsAre("a"));
  }
  ExpectKilled("save.is_renamed", [&] { (void)tables_.Save(store_, "b", "a"); });
  EXPECT_THAT(Folders(), ElementsAre("a", "b"));
  ExpectWhole("a", before_);
  ExpectWhole("b", tables_.arrays());
}

TEST_F(DamageTest, DyingWhileMergingLeavesItAsItWasOrWhole) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  const std::vector<std::string> files = FilesOf(dir_.Path("m/b"));
  const auto merge = [&] { (void)MergeCheckpoint(store_, "m", "b", GoOn); };
  ExpectKilled("merge.is_written", merge);
  EXPECT_EQ(store_.Chain("m", "b")->size(), 2u);
  ExpectWhole("b", tables_.arrays());
  CleanUp();
  EXPECT_EQ(FilesOf(dir_.Path("m/b")), files);
  EXPECT_THAT(Folders(), ElementsAre("a", "b"));

  ExpectKilled("merge.is_renamed", merge);
  EXPECT_EQ(store_.Chain("m", "b")->size(), 1u);
  ExpectWhole("b", tables_.arrays());
  CleanUp();
  EXPECT_EQ(FilesOf(dir_.Path("m/b")).size(), files.size());  // as many, but others
  EXPECT_THAT(Folders(), ElementsAre("a", "b"));
  ASSERT_TRUE(store_.Delete("m", "a").ok());
  ExpectWhole("b", tables_.arrays());
}

// Without anybody who cleans up in between.
TEST_F(DamageTest, AMergeCanBeTriedAgain) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  const size_t files = FilesOf(dir_.Path("m/b")).size();
  ExpectKilled("merge.is_written", [&] { (void)MergeCheckpoint(store_, "m", "b", GoOn); });
  ASSERT_TRUE(MergeCheckpoint(store_, "m", "b", GoOn).ok());
  EXPECT_EQ(FilesOf(dir_.Path("m/b")).size(), files);
  ExpectWhole("b", tables_.arrays());
}

TEST_F(DamageTest, DyingWhileDeletingLeavesNoHalf) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  ExpectKilled("delete.is_renamed", [&] { (void)store_.Delete("m", "b"); });
  EXPECT_THAT(Names(), ElementsAre("a"));
  EXPECT_EQ(store_.List("m")->damaged_size(), 0);
  EXPECT_EQ(Folders().size(), 2u);
  ExpectWhole("a", before_);
  CleanUp();
  EXPECT_THAT(Folders(), ElementsAre("a"));
}

TEST_F(DamageTest, ADamagedRowIsNotMergedIn) {
  ASSERT_TRUE(tables_.Save(store_, "b", "a").ok());
  const CheckpointChain chain = *store_.Chain("m", "b");
  const v1::CheckpointFile& file = chain[1].manifest().files(0);
  std::fstream stream(files::PathIn(chain[1].folder(), file.path()),
                      std::ios::binary | std::ios::in | std::ios::out);
  stream.seekp(file.bytes() - 1);
  stream.put('\x7f');
  stream.close();
  const auto merged = MergeCheckpoint(store_, "m", "b", GoOn);
  EXPECT_EQ(merged.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(store_.Chain("m", "b")->size(), 2u);
  EXPECT_THAT(Folders(), ElementsAre("a", "b"));
}

// --- File systems that do not take it.

// For this process alone, in a child; false if that is not allowed.
bool MountMemory(const std::string& folder, const char* options) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", folder.c_str(), "tmpfs", 0, options) == 0;
}

constexpr int kNotAllowed = 77;

TEST_F(DamageTest, AFullDiskIsAnErrorThatSaysSo) {
  const TempDir disk = *TempDir::Create();
  const int status = StatusOfChild([&] {
    if (!MountMemory(disk.path(), "size=8k")) _exit(kNotAllowed);
    const CheckpointStore store(disk.path());
    const absl::Status full = tables_.Save(store, "a");
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
    EXPECT_THAT(std::string(full.message()), HasSubstr("No space left on device"));
    EXPECT_THAT(std::string(full.message()), HasSubstr(disk.Path("m/.saving-")));
    EXPECT_EQ(store.List("m")->checkpoints_size(), 0);
  });
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) {
    GTEST_SKIP() << "no file system may be mounted here";
  }
  EXPECT_EQ(status, 0);
}

TEST_F(DamageTest, ALimitOfFileSizesIsAnErrorThatSaysSo) {
  const int status = StatusOfChild([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {2000, 2000};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const absl::Status full = tables_.Save(store_, "b", "a");
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
    EXPECT_THAT(std::string(full.message()), HasSubstr("File too large"));
    EXPECT_THAT(std::string(full.message()), HasSubstr(".safetensors: cannot be written"));
  });
  EXPECT_EQ(status, 0);
  EXPECT_THAT(Names(), ElementsAre("a"));
  ExpectWhole("a", before_);
}

// It may come back: a restore goes to an older checkpoint only for what is gone.
TEST_F(DamageTest, WhatCannotBeReadJustNowIsNoDamage) {
  const CheckpointChain chain = *store_.Chain("m", "a");
  const std::string path = files::PathIn(chain[0].folder(), chain[0].manifest().files(0).path());
  std::filesystem::remove(path);
  std::filesystem::create_symlink(path, path);
  const absl::Status status = Verify("a");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
}

TEST_F(DamageTest, AFolderThatMayNotBeWrittenIsAnErrorThatSaysSo) {
  const auto look = [&](const CheckpointStore& store, const std::string& path) {
    const std::vector<absl::Status> errors = {
        store.BeginSave("m", "b").status(), store.Delete("m", "a").status(),
        store.BeginSave("m", "").status(), store.BeginSave("new", "b").status()};
    for (const absl::Status& status : errors) {
      EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    }
    EXPECT_TRUE(VerifyChain(*store.Chain("m", "a"), GoOn).ok());
  };
  const TempDir disk = *TempDir::Create();
  const int status = StatusOfChild([&] {
    if (geteuid() != 0) {  // who may write whatever the permissions are
      const auto none = std::filesystem::perms::owner_write;
      for (const std::string& folder : {dir_.path(), dir_.Path("m")}) {
        std::filesystem::permissions(folder, none, std::filesystem::perm_options::remove);
      }
      look(store_, dir_.path());
      for (const std::string& folder : {dir_.path(), dir_.Path("m")}) {
        std::filesystem::permissions(folder, none, std::filesystem::perm_options::add);
      }
      return;
    }
    if (!MountMemory(disk.path(), "size=10m")) _exit(kNotAllowed);
    const CheckpointStore store(disk.path());
    EXPECT_TRUE(tables_.Save(store, "a").ok());
    EXPECT_EQ(mount("none", disk.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr), 0);
    look(store, disk.path());
  });
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) {
    GTEST_SKIP() << "no file system may be mounted here";
  }
  EXPECT_EQ(status, 0);
}

// --- Many at once.

// Each process saves, merges and deletes under a few names that all of them use.
void WorkTogether(const CheckpointStore& store, const v1::ModelConfig& config, uint64_t seed) {
  std::mt19937_64 random(seed);
  TestTables tables(config, 1);
  for (int i = 0; i < 100; ++i) {
    const std::string name = absl::StrCat("s", random() % 3);
    const std::string next = absl::StrCat("s", random() % 3);
    absl::Status status;
    switch (random() % 4) {
      case 0:
        tables.Change(random);
        status = tables.Save(store, name);
        break;
      case 1:
        tables.Change(random);
        status = tables.Save(store, name, name == next ? "" : next);
        break;
      case 2:
        status = MergeCheckpoint(store, "m", name, GoOn).status();
        break;
      default:
        status = store.Delete("m", name).status();
    }
    // DATA_LOSS: the chain that it read changed under its hands.
    const std::vector<absl::StatusCode> fair = {
        absl::StatusCode::kOk,       absl::StatusCode::kAlreadyExists,
        absl::StatusCode::kNotFound, absl::StatusCode::kFailedPrecondition,
        absl::StatusCode::kAborted,  absl::StatusCode::kDataLoss};
    EXPECT_THAT(fair, testing::Contains(status.code())) << status;
  }
}

TEST_F(DamageTest, ManyProcessesWorkOnOneFolder) {
  const TempDir shared = *TempDir::Create();
  const CheckpointStore store(shared.path());
  const v1::ModelConfig config = RandomTables(random_);
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const uint64_t seed = random_();
    std::fflush(nullptr);
    children.push_back(fork());
    if (children.back() != 0) continue;
    WorkTogether(store, config, seed);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  const auto list = store.List("m");
  EXPECT_EQ(list->damaged_size(), 0) << list->DebugString();
  for (const v1::CheckpointInfo& info : list->checkpoints()) {
    const auto chain = store.Chain("m", info.name());
    ASSERT_TRUE(chain.ok()) << chain.status();
    EXPECT_TRUE(VerifyChain(*chain, GoOn).ok()) << VerifyChain(*chain, GoOn);
  }
}

}  // namespace damage_test
}  // namespace checkpoint
}  // namespace emberd
