// A process that takes the whole machine's memory for its own is killed in a container: these tests
// hold what is read against folders laid out as kernels and container engines lay them out.
#include "base/machine_memory.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "base/temp_dir.h"

namespace emberd {
namespace machine_memory_test {

constexpr int64_t kMiB = int64_t{1} << 20;

class MachineMemoryTest : public ::testing::Test {
 protected:
  MachineMemoryTest() {
    Write("/proc/meminfo",
          "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n");
  }
  void Write(const std::string& path, const std::string& content) {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content;
  }
  std::string root() const { return directory_.path(); }

  const TempDir directory_ = TempDir::Create().value();
};

TEST_F(MachineMemoryTest, IsTheMachinesWithoutGroups) {
  const MachineMemory memory = ReadMachineMemory(root());
  EXPECT_EQ(memory.limit, 8192 * kMiB);
  EXPECT_EQ(memory.available, 4096 * kMiB);
  EXPECT_EQ(ReadMemoryKills(root()).machine, 0);
}

TEST_F(MachineMemoryTest, IsTheLeastOfTheGroupsOfVersion2) {
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/memory.max", "1073741824\n");
  Write("/sys/fs/cgroup/a/memory.current", "838860800\n");
  Write("/sys/fs/cgroup/a/memory.stat", "file 1\ninactive_file 104857600\n");
  const MachineMemory memory = ReadMachineMemory(root());
  EXPECT_EQ(memory.limit, 1024 * kMiB);
  EXPECT_EQ(memory.available, (1024 - 800 + 100) * kMiB);
}

TEST_F(MachineMemoryTest, FindsTheGroupOfAContainerOfVersion1AtTheMount) {
  Write("/proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1572864000\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1572864000\n");
  const MachineMemory memory = ReadMachineMemory(root());
  EXPECT_EQ(memory.limit, 1500 * kMiB);
  EXPECT_EQ(memory.available, 0);
}

TEST_F(MachineMemoryTest, AGroupWithoutLimitLeavesTheMachines) {
  Write("/proc/self/cgroup", "4:memory:/\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4096\n");
  EXPECT_EQ(ReadMachineMemory(root()).limit, 8192 * kMiB);
  EXPECT_EQ(ReadMachineMemory(root()).available, 4096 * kMiB);
}

TEST_F(MachineMemoryTest, CountsWhatTheKernelKilled) {
  Write("/proc/vmstat", "pgfault 5\noom_kill 7\n");
  EXPECT_EQ(ReadMemoryKills(root()).machine, 7);
  EXPECT_EQ(ReadMemoryKills(root()).cgroup, 0);
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/sys/fs/cgroup/a/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0\n");
  EXPECT_EQ(ReadMemoryKills(root()).cgroup, 3);
}

TEST(ReadMachineMemory, ReadsThisMachine) {
  const MachineMemory memory = ReadMachineMemory();
  EXPECT_GT(memory.limit, 0);
  EXPECT_GT(memory.available, 0);
  EXPECT_LE(memory.available, memory.limit);
}

}  // namespace machine_memory_test
}  // namespace emberd
