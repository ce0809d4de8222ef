// The disks of the tests' own build of the server. Where the variable EMBERD_POWER names a folder,
// the process is one of a machine that can lose power: after kill -9 of all of them LosePower
// (server/log/testing/forgetful_files.h) takes away what they had not synced.
#include <cstdlib>

#include "server/log/log_files.h"
#include "server/log/testing/forgetful_files.h"

namespace emberd::log {

LogFiles& SystemLogFiles() {
  static LogFiles* const files = []() -> LogFiles* {
    const char* const machine = std::getenv("EMBERD_POWER");
    if (machine == nullptr) return &DiskLogFiles();
    return new ForgetfulFiles(machine);
  }();
  return *files;
}

}  // namespace emberd::log
