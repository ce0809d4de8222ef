// Disks that are full or may not be written, files that are damaged, gone or in each other's place:
// an error names the file, nothing of it is used, and the live model serves on with its rows.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <sched.h>
#include <sys/mount.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "gmock/gmock.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace checkpoint_disk_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kModelName[] = "mixed";

class CheckpointDiskTest : public ClusterFixture {
 protected:
  void Start() {
    StartCluster({.config = absl::StrCat("storage { directory: \"", storage_.path(), "\" }")},
                 MixedModel(kModelName));
    Train();
  }
  // Changes rows, so that later tables are not those of a checkpoint.
  void Train() { ASSERT_TRUE(TrainStep(*client_, model_, ++steps_, 40).ok()); }
  absl::Status Save(const std::string& name) {
    return client_->SaveCheckpoint(kModelName, {.name = name}).status();
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    auto list = client_->ListCheckpoints(kModelName);
    EXPECT_TRUE(list.ok()) << list.status();
    for (size_t i = 0; list.ok() && i < list->checkpoints.size(); ++i) {
      names.push_back(list->checkpoints[i].name);
    }
    return names;
  }
  void ExpectRestorable(const std::string& name, const std::string& digest) {
    const absl::Status restored = client_->RestoreCheckpoint(kModelName, {.name = name}).status();
    ASSERT_TRUE(restored.ok()) << restored;
    EXPECT_EQ(TableDigest(), digest);
    Train();
  }
  // The model has its rows, and trains on.
  void ExpectServesOn(const std::string& digest) {
    EXPECT_EQ(TableDigest(), digest);
    ASSERT_NO_FATAL_FAILURE(Train());
    EXPECT_NE(TableDigest(), digest);
  }
  std::string FolderOf(const std::string& name) const {
    return absl::StrCat(storage_.path(), "/checkpoints/", kModelName, "/", name);
  }
  std::vector<std::string> FilesOf(const std::string& name) const {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(FolderOf(name))) {
      files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  const TempDir storage_ = *TempDir::Create();
  uint64_t steps_ = 0;
};

// As of a disk that is not mounted, or of a link to itself.
TEST_F(CheckpointDiskTest, ALinkThatLeadsNowhereIsAnErrorAndHeals) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::string place = storage_.Path("checkpoints");
  for (const std::string& target : {storage_.Path("gone"), place}) {
    std::filesystem::remove_all(place);
    std::filesystem::create_directory_symlink(target, place);
    for (const absl::Status& status : {Save("a"), client_->ListCheckpoints(kModelName).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(place + ": is a link to " + target));
    }
    ExpectServesOn(TableDigest());
  }
  std::filesystem::remove(place);
  const std::string digest = TableDigest();
  ASSERT_TRUE(Save("a").ok());
  Train();
  ExpectRestorable("a", digest);
}

// Whatever is done to a file of it, a restore says which one, and has changed nothing.
class DamagedFileTest : public CheckpointDiskTest {
 protected:
  void SetUp() override {
    Start();
    ASSERT_TRUE(Save("c").ok());
    saved_ = TableDigest();
    Train();
  }
  void ExpectRefused(const std::string& file) {
    SCOPED_TRACE(file);
    const std::string before = TableDigest();
    const absl::Status restored = client_->RestoreCheckpoint(kModelName, {.name = "c"}).status();
    EXPECT_TRUE(absl::IsDataLoss(restored)) << restored;
    EXPECT_THAT(std::string(restored.message()), HasSubstr(file));
    ExpectServesOn(before);
  }

  std::string saved_;
};

TEST_F(DamagedFileTest, AFlippedByteOfAnyFileIsFound) {
  for (const std::string& path : FilesOf("c")) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto place = static_cast<std::streamoff>(std::filesystem::file_size(path) / 2);
    const auto flip = [&] {
      file.seekg(place);
      const auto byte = static_cast<char>(file.get());
      file.seekp(place);
      file.put(static_cast<char>(byte ^ 4));
      file.flush();
    };
    flip();
    ASSERT_NO_FATAL_FAILURE(ExpectRefused(std::filesystem::path(path).filename()));
    flip();
  }
  ExpectRestorable("c", saved_);
}

TEST_F(DamagedFileTest, AMissingFileIsNamed) {
  for (const std::string& path : FilesOf("c")) {
    const std::string aside = storage_.Path("aside");
    std::filesystem::rename(path, aside);
    if (absl::EndsWith(path, "manifest.json")) {
      EXPECT_FALSE(client_->RestoreCheckpoint(kModelName, {.name = "c"}).ok());
    } else {
      ASSERT_NO_FATAL_FAILURE(ExpectRefused(std::filesystem::path(path).filename()));
    }
    std::filesystem::rename(aside, path);
  }
  ExpectRestorable("c", saved_);
}

TEST_F(DamagedFileTest, FilesInEachOthersPlaceAreFound) {
  std::vector<std::string> files;
  for (const std::string& path : FilesOf("c")) {
    if (absl::EndsWith(path, ".safetensors")) files.push_back(path);
  }
  ASSERT_GE(files.size(), 4u);
  const std::string aside = storage_.Path("aside");
  const auto swap = [&](const std::string& a, const std::string& b) {
    std::filesystem::rename(a, aside);
    std::filesystem::rename(b, a);
    std::filesystem::rename(aside, b);
  };
  for (size_t i = 0; i + 1 < files.size(); i += 3) {
    swap(files[i], files[i + 1]);
    // Either of the two may be looked at first.
    ASSERT_NO_FATAL_FAILURE(ExpectRefused(".safetensors"));
    swap(files[i], files[i + 1]);
  }
  ExpectRestorable("c", saved_);
}

// A file system of its own for the checkpoints, which this process and its children see alone.
class MountedTest : public CheckpointDiskTest {
 protected:
  bool Mount(const char* options) {
    mounted_ = unshare(CLONE_NEWNS) == 0 &&
               mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               mount("none", storage_.path().c_str(), "tmpfs", 0, options) == 0;
    return mounted_;
  }
  void TearDown() override {
    client_.reset();
    cluster_.reset();
    if (!mounted_) return;
    EXPECT_EQ(umount2(storage_.path().c_str(), MNT_DETACH), 0);
  }

  bool mounted_ = false;
};

TEST_F(MountedTest, AFullDiskIsAnErrorAndHeals) {
  if (!Mount("size=1m")) GTEST_SKIP() << "no file system may be mounted here";
  Start();
  std::string last;
  absl::Status full;
  std::vector<std::string> names;
  for (int i = 0; i < 100 && full.ok(); ++i) {
    const std::string name = absl::StrCat("c", i);
    const std::string digest = TableDigest();
    full = Save(name);
    if (!full.ok()) break;
    last = digest;
    names.insert(names.begin(), name);
    Train();
  }
  ASSERT_FALSE(names.empty()) << full;
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr(storage_.path()));
  EXPECT_EQ(Names(), names) << "nothing is half there";
  ASSERT_NO_FATAL_FAILURE(ExpectServesOn(TableDigest()));
  ASSERT_NO_FATAL_FAILURE(ExpectRestorable(names.front(), last));
  // What the failed one had written is gone, so there is room where one was.
  ASSERT_TRUE(client_->DeleteCheckpoint(kModelName, names.back()).ok());
  const absl::Status healed = Save("healed");
  EXPECT_TRUE(healed.ok()) << healed;
}

TEST_F(MountedTest, ADirectoryThatMayNotBeWrittenIsAnErrorAndIsReadAllTheSame) {
  if (!Mount("size=16m")) GTEST_SKIP() << "no file system may be mounted here";
  Start();
  ASSERT_TRUE(Save("c").ok());
  const std::string saved = TableDigest();
  Train();
  const auto remount = [&](unsigned long flags) {
    return mount("none", storage_.path().c_str(), nullptr, MS_REMOUNT | flags, nullptr);
  };
  ASSERT_EQ(remount(MS_RDONLY), 0);
  const absl::Status refused = Save("d");
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr(storage_.path()));
  EXPECT_THAT(Names(), ElementsAre("c"));
  ASSERT_NO_FATAL_FAILURE(ExpectServesOn(TableDigest()));
  ASSERT_NO_FATAL_FAILURE(ExpectRestorable("c", saved));
  ASSERT_EQ(remount(0), 0);
  const absl::Status healed = Save("d");
  EXPECT_TRUE(healed.ok()) << healed;
}

}  // namespace checkpoint_disk_test
}  // namespace emberd::testing
