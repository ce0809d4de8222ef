// A cluster whose files can fail, a model whose rows count their updates, and what must hold of
// them whatever fails.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/temp_dir.h"
#include "client/cpp/client.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/file_faults.h"

namespace emberd::testing {

// A model whose rows count their updates, on servers whose files can fail.
class FileFaultsCluster : public ::testing::Test {
 public:  // for pointers to members of tests
  using Step = absl::Status (FileFaultsCluster::*)();
  struct NamedStep {
    const char* name;
    Step run;
    std::vector<Step> before = {};  // what it needs; nothing fails there
  };
  struct Fault {
    NamedStep step;
    FileCall call;
    int error = 0;
    int ordinal = 1;  // which of these calls fails
    bool lasting = false;

    std::string Text() const;
  };

  void Start(const std::string& storage, int shards, const std::string& config = "",
             const std::map<std::string, std::string>& failpoints = {});
  void TearDown() override {
    faults_.Lift();
    client_.reset();
    api_.reset();
    cluster_.reset();
  }

  // ---- What trainers and operators do. Each returns the first error.

  absl::Status Train();
  absl::Status TryTrain();  // once; NOT_FOUND if the batch had expired
  absl::Status Save() { return SaveNamed(absl::StrCat("c", ++names_), false); }
  absl::Status SaveIncrementally() { return SaveNamed(absl::StrCat("c", ++names_), true); }
  absl::Status SaveNamed(const std::string& name, bool incremental);
  absl::Status List();
  absl::Status Verify();
  absl::Status Merge();
  absl::Status Restore();
  absl::Status Delete();
  absl::Status DeclareAndDrop();

  // ---- What must hold

  // What the oldest of the rows has seen, if they can be read.
  absl::StatusOr<int64_t> Rows();
  // Rows that are read have seen what was answered, and maybe what was not answered yet.
  void ExpectNothingOlder();
  void ExpectAllRun();
  // More that must hold when a fault is lifted.
  virtual void ExpectMore() {}
  // Training goes on: after a restart, if that is asked for, now or by what was `told` before.
  void ExpectGoesOn(const absl::Status& told = absl::OkStatus());
  void ExpectCheckpointsAsTold();
  void RestartShards();
  void RestartAll();
  // What saves and deletions left that failed goes with the next save after a minute.
  void ExpectNoLitter();
  // Whether the answer asks for a restart of the shard.
  static bool NeedsRestart(const absl::Status& status);
  static void ExpectSaysWhy(const absl::Status& status);

  // A fault once of each call that was recorded, and one that lasts, unless an earlier step has it.
  void AddRecorded(const NamedStep& step, std::vector<Fault>* faults);
  std::vector<Fault> FaultsOf(const std::vector<NamedStep>& steps);
  void Prepare(const NamedStep& step);
  static bool Wanted(const Fault& fault);
  void Try(const Fault& fault);
  void TryAll(const std::vector<NamedStep>& steps);

  const std::vector<NamedStep> kLife = {
      {"train", &FileFaultsCluster::Train},
      {"save", &FileFaultsCluster::Save},
      {"save incrementally", &FileFaultsCluster::SaveIncrementally, {&FileFaultsCluster::Train}},
      {"list", &FileFaultsCluster::List},
      {"verify",
       &FileFaultsCluster::Verify,
       {&FileFaultsCluster::Save, &FileFaultsCluster::Train,
        &FileFaultsCluster::SaveIncrementally}},
      {"merge",
       &FileFaultsCluster::Merge,
       {&FileFaultsCluster::Save, &FileFaultsCluster::Train,
        &FileFaultsCluster::SaveIncrementally}},
      {"restore", &FileFaultsCluster::Restore},
      {"delete", &FileFaultsCluster::Delete, {&FileFaultsCluster::Save}},
      {"declare and drop", &FileFaultsCluster::DeclareAndDrop},
  };

  static client::ModelDescription CountingModel(const std::string& name);

  static inline const std::vector<int64_t> kRowIds = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
  const TempDir dir_ = *TempDir::Create();
  const std::string data_ = dir_.Path("data");
  FileFaults faults_{dir_.Path("control"), data_};
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<Api> api_;  // for what a client cannot ask
  client::Model model_;
  int64_t made_ = 0;    // updates that were answered, and not taken back by a restore
  bool waits_ = false;  // one more was sent, and is to be sent again
  uint64_t sequence_ = 0;
  int names_ = 0;
  std::map<std::string, int64_t> checkpoints_;  // those that were answered, with their rows
  std::string newest_;
  std::set<std::string> deleted_;
  bool restore_failed_ = false;
  int restarts_ = 0;
  int shards_ = 0;
};

}  // namespace emberd::testing
