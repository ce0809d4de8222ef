// What the processes of a machine that loses power leave in its folder: its boot id, and a journal
// of each process (see forgetful_files.cc).
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_descriptor.h"

namespace emberd::log {

// Made if there is none.
absl::StatusOr<std::string> BootOf(const std::string& machine);
absl::StatusOr<FileDescriptor> NewJournal(const std::string& machine);
// Of all processes, in the order in which they began; each as its lines.
absl::StatusOr<std::vector<std::vector<std::string>>> ReadJournals(const std::string& machine);
// The next boot: nothing is pending.
absl::Status BootAgain(const std::string& machine);

}  // namespace emberd::log
