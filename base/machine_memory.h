// How much memory this process may use: that of the machine, or of the control group (cgroup) that
// it runs in, whichever is less.
#pragma once

#include <cstdint>
#include <string>

namespace emberd {

struct MachineMemory {
  int64_t limit = 0;      // bytes
  int64_t available = 0;  // bytes that can still be taken, what the kernel can reclaim included
};

// Reads /proc and /sys/fs/cgroup, versions 1 and 2, below `root`; takes some ten microseconds. Of
// several groups around this process, the one with the least counts. All zero if nothing can be
// read.
MachineMemory ReadMachineMemory(const std::string& root = "");

// How often the kernel has killed a process for want of memory: in this process's cgroup, and on
// the whole machine. 0 where the kernel does not count.
struct MemoryKills {
  int64_t cgroup = 0;
  int64_t machine = 0;
};
MemoryKills ReadMemoryKills(const std::string& root = "");

}  // namespace emberd
