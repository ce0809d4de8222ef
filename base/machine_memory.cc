#include "base/machine_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace emberd {
namespace {

// The number in a file of one; none for "max".
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// The number after `name` in a file of lines like "name 123" or "name: 123 kB".
std::optional<int64_t> ReadNamed(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" :\t"), absl::SkipEmpty());
    int64_t number = 0;
    if (words.size() >= 2 && words[0] == name && absl::SimpleAtoi(words[1], &number)) return number;
  }
  return std::nullopt;
}

// Names of the files of a group, which differ between the versions.
struct Files {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // in memory.stat
  const char* kills;        // holds "oom_kill N"
};
constexpr Files kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                             "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"};
constexpr Files kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file",
                             "memory.events"};

struct Group {
  const Files* files;
  std::string directory;
};

// The memory groups around this process, the innermost first. Inside of a container the path that
// /proc gives may be the host's; the container's own group is then the mount itself.
std::vector<Group> Groups(const std::string& root) {
  std::vector<Group> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    const bool version1 =
        std::find(controllers.begin(), controllers.end(), "memory") != controllers.end();
    if (!version1 && parts[0] != "0") continue;
    const Files* const files = version1 ? &kVersion1 : &kVersion2;
    for (std::string path = parts[2]; !path.empty(); path.resize(path.rfind('/'))) {
      if (path.front() != '/') break;
      if (path != "/") groups.push_back({files, absl::StrCat(root, files->mount, path)});
    }
    groups.push_back({files, absl::StrCat(root, files->mount)});
  }
  return groups;
}

}  // namespace

MachineMemory ReadMachineMemory(const std::string& root) {
  const std::string meminfo = root + "/proc/meminfo";
  MachineMemory memory = {ReadNamed(meminfo, "MemTotal").value_or(0) * 1024,
                          ReadNamed(meminfo, "MemAvailable").value_or(0) * 1024};
  for (const Group& group : Groups(root)) {
    const auto path = [&](const char* name) { return absl::StrCat(group.directory, "/", name); };
    const std::optional<int64_t> limit = ReadNumber(path(group.files->limit));
    if (!limit.has_value()) continue;
    memory.limit = std::min(memory.limit, *limit);
    const int64_t used = ReadNumber(path(group.files->usage)).value_or(0) -
                         ReadNamed(path("memory.stat"), group.files->reclaimable).value_or(0);
    memory.available = std::min(memory.available, std::max<int64_t>(0, *limit - used));
  }
  return memory;
}

MemoryKills ReadMemoryKills(const std::string& root) {
  MemoryKills kills;
  kills.machine = ReadNamed(root + "/proc/vmstat", "oom_kill").value_or(0);
  for (const Group& group : Groups(root)) {
    const std::optional<int64_t> count =
        ReadNamed(absl::StrCat(group.directory, "/", group.files->kills), "oom_kill");
    if (!count.has_value()) continue;
    kills.cgroup = *count;
    break;
  }
  return kills;
}

}  // namespace emberd
