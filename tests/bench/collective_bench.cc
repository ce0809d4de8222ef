// What agreeing costs a synchronous group: one all-gather of 8-byte values among 1, 2 and 4 members
// that call at the same moment, inside one process and through a host over loopback gRPC.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "base/thread_pools.h"
#include "config/config.h"
#include "server/group/testing_group.h"
#include "server/host/collective_router.h"
#include "server/host/shard_server.h"
#include "server/host/testing_meeting.h"
#include "tests/bench/bench_report.h"

namespace emberd::bench {
namespace collective_bench {

constexpr int kRepeats = 11, kSteps = 500;
const group::GroupId kGroup{1, "bench"};

// One thread per member runs `work(rank)`.
template <typename Work>
void OnAllRanks(int members, const Work& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < members; ++rank) threads.emplace_back([&work, rank] { work(rank); });
  for (std::thread& thread : threads) thread.join();
}

// False: a call has failed.
bool Run(Report& report, const std::string& place, std::shared_ptr<host::ShardBackend> shard,
         BlockingPool* threads, int members) {
  const std::string name = "collective/" + place + "/members" + std::to_string(members);
  if (!report.Wants(name)) return true;
  v1::GroupOptions options;
  options.set_size(members);
  options.set_consistency(v1::SYNC);
  options.set_step_timeout_ms(60'000);
  rpc::CallContext context(absl::Now() + absl::Minutes(10));
  std::vector<uint64_t> generations(members);
  host::CollectiveRouter router({std::move(shard)}, threads);
  OnAllRanks(members, [&](int rank) {
    // Coordinators of their own, so that all meet at the host.
    const auto joined =
        router.Join(group::testing::JoinOf(kGroup, rank, options, std::to_string(rank)), &context);
    if (joined.ok()) generations[rank] = joined->generation();
  });
  int64_t begin = 0;
  std::atomic<bool> good = true;
  const double seconds = MedianSeconds(kRepeats, [&] {
    OnAllRanks(members, [&](int rank) {
      for (int64_t step = begin; step < begin + kSteps; ++step) {
        const auto gathered =
            router.AllGather(group::testing::GatherOf(kGroup, generations[rank], rank, step,
                                                      /*group_key=*/0, std::string(8, 'v')),
                             &context);
        if (!gathered.ok()) good = false;
      }
    });
    begin += kSteps;
  });
  router.Leave(group::testing::LeaveOf(kGroup, generations[0], 0, "done", /*finished=*/true));
  report.Add({name, seconds / kSteps * 1e6, "us", members, 0, 0});
  return good;
}

EMBERD_BENCHMARK(collective, argc, argv) {
  Report report(argc, argv);
  ops::Metrics metrics("shard");
  ThreadPools threads(2);
  group::Rendezvous rendezvous;
  const auto local = std::make_shared<host::MeetingShard>(&rendezvous);
  const v1::ClusterConfig cluster = *config::ParseCluster(
      "shards { address: '127.0.0.1:0' } coordinators { address: '127.0.0.1:0' }");
  auto server = host::ShardServer::Start(
      {.cluster = cluster, .shard_index = 0, .metrics = &metrics, .threads = &threads});
  if (!server.ok()) return 1;
  const auto remote = host::MakeRemoteShard({.index = 0,
                                             .address = (*server)->address(),
                                             .limits = {1 << 20, rpc::MemoryBudget()},
                                             .place = rpc::PlaceOf(cluster, 0)});
  bool good = true;
  for (const int members : {1, 2, 4}) {
    good = Run(report, "local", local, &threads.blocking, members) && good;
  }
  for (const int members : {1, 2, 4}) {
    good = Run(report, "grpc", remote, &threads.blocking, members) && good;
  }
  return good ? report.Finish() : 1;
}

}  // namespace collective_bench
}  // namespace emberd::bench
