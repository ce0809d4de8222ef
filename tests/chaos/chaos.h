// Trains on a cluster that is disturbed all the time; see chaos_main.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/child_process.h"
#include "client/cpp/client.h"
#include "tests/chaos/chaos_trainer.h"
#include "tests/testing/cluster.h"
#include "tests/testing/relay.h"

namespace emberd::chaos {

inline constexpr int kRanks = 2;
inline constexpr int kShards = 4;
inline constexpr int kCoordinators = 2;
inline constexpr Mode kModes[] = {Mode::kSync, Mode::kPipelined, Mode::kBounded, Mode::kUnary};
inline constexpr int kMostFaults = 5;  // at once
// A group that makes no progress for this long is stuck.
inline constexpr absl::Duration kPatience = absl::Seconds(90);

struct Options {
  double minutes = 10;
  int64_t max_faults = 1'000'000;
  uint64_t seed = 0;
  std::string plant;  // of the first rank of the bounded group
  // Shards keep logs, and are killed too.
  bool log = false;
  std::string fsync = "INTERVAL";
  bool checkpoint = false;   // no logs: the model is saved now and then, and before a clean stop
  bool power = false;        // with ALWAYS: when all are killed, what was not synced is lost
  bool one_machine = false;  // coordinators and shards share memory, which is not cut
};

// What went wrong with updates.
struct Damage {
  int lost = 0;     // rows with fewer updates than were acknowledged
  int doubled = 0;  // rows with more
  int torn = 0;     // ranks whose rows disagree, or tables that differ from the undisturbed ones
  int stuck = 0;    // groups that did not go on
  bool any() const { return lost + doubled + torn + stuck > 0; }
};

struct Trainer {
  Mode mode;
  int rank;
  std::unique_ptr<ChildProcess> process;
  std::string log_path;

  std::string name() const { return absl::StrCat("trainer ", NameOf(mode), ".", rank); }
};

class Chaos {
 public:
  Chaos(const Options& options, std::string program, std::string folder)
      : options_(options),
        program_(std::move(program)),
        folder_(std::move(folder)),
        random_(options.seed) {}

  ~Chaos();

  absl::Status Run();
  void PrintSummary() const;

 private:
  absl::Status Start();
  testing::ClusterOptions Cluster() const;
  absl::Status StartTrainer(Trainer* trainer);
  // Some faults at a time, and what heals them.
  absl::Status DisturbOnce();
  // Each begins a fault, which `heal` ends after `pause`. False: there is one in the same place.
  bool BeginFault();
  bool KillCoordinator(int coordinator);
  bool KillTrainer(Trainer* trainer);
  bool KillShard(int shard);
  // Also while it comes back, some times.
  absl::Status BringBack(int shard);
  // Coordinators, shards, and perhaps trainers.
  bool KillAll();
  // By SIGTERM, as an operator does: coordinators and shards, while the trainers go on trying.
  bool StopAll();
  // Whether coordinators and shards run, and from now on are disturbed.
  bool TakeAll();
  absl::Status BringAllBack(bool trainers);
  // What a process that was killed may leave behind the last record of its log.
  void TearTail(int shard);
  bool FillDisk();
  bool Stop(const std::string& what, ChildProcess* process);
  bool Disturb(const std::string& what, testing::Relay* link);
  void Begin(const std::string& what, absl::Duration pause, std::function<absl::Status()> heal);
  absl::Duration Pause();
  std::string storage() const { return absl::StrCat(folder_, "/storage"); }
  std::string machine() const { return absl::StrCat(storage(), "/machine"); }
  int64_t faults() const { return kills_ + stops_ + cuts_ + clean_stops_ + full_disks_; }
  // Until every rank has made a stride, or patience ends.
  absl::Status AwaitProgress();
  absl::Status Finish();
  absl::Status CheckCounts(client::Client& client, Mode mode);
  absl::Status CheckDigest(client::Client& client);
  std::vector<int64_t> Progress() const;
  void ShowEnd(const std::string& name, const std::string& log) const;
  // Between the two, in milliseconds.
  absl::Duration Between(int low, int high) {
    return absl::Milliseconds(std::uniform_int_distribution<int>(low, high)(random_));
  }
  int Below(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }
  void Say(const std::string& what) const {
    std::printf("%7.1f s  %s\n", absl::ToDoubleSeconds(absl::Now() - began_), what.c_str());
    std::fflush(stdout);
  }

  const Options options_;
  const std::string program_;
  const std::string folder_;
  std::mt19937_64 random_;
  const absl::Time began_ = absl::Now();
  std::unique_ptr<testing::Cluster> cluster_;
  std::vector<Trainer> trainers_;
  int64_t rounds_ = 0;
  int64_t kills_ = 0;
  int64_t stops_ = 0;
  int64_t cuts_ = 0;
  int64_t clean_stops_ = 0;
  std::multimap<absl::Time, std::function<absl::Status()>> faults_;  // by the end of each
  std::set<std::string> disturbed_;
  std::map<Mode, int64_t> ends_;  // the step that a mode's trainers stop before
  int64_t power_losses_ = 0;
  int64_t full_disks_ = 0;
  int64_t lost_bytes_ = 0;
  bool small_disk_ = false;  // storage_ has a file system of its own
  Damage damage_;
};

}  // namespace emberd::chaos
