// emberctl, the command line of an emberd cluster, as a function.
#pragma once

#include <ostream>

namespace emberd::emberctl {

// What emberctl ends with.
inline constexpr int kOk = 0;
inline constexpr int kRefused = 1;      // by the server, or by the check of a file
inline constexpr int kUsage = 2;        // the command line makes no sense
inline constexpr int kUnreachable = 3;  // no coordinator, or a shard, answers in time
inline constexpr int kUnfinished = 4;   // what was waited for has not happened in time

// Runs one command. Results go to `out`, errors and hints to `err`.
int Run(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace emberd::emberctl
