#include "tests/chaos/small_disk.h"

#include <algorithm>
#include <string>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include "base/file_descriptor.h"

namespace emberd::chaos {

bool MountDisk(const std::string& folder) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", folder.c_str(), "tmpfs", 0, "size=384m") == 0;
}

void UnmountDisk(const std::string& folder) { umount2(folder.c_str(), MNT_DETACH); }

void Fill(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  const std::string zeros(size_t{1} << 20, '\0');
  for (size_t size = zeros.size(); size > 0;) {
    const ssize_t written = write(file.get(), zeros.data(), size);
    if (written <= 0) size /= 2;
  }
}

}  // namespace emberd::chaos
