#include "client/emberctl/shard_state.h"

#include "absl/strings/str_cat.h"

namespace emberd::emberctl {
namespace {

// How much of its checkpoints and its log has been read; empty: it is not known.
std::string ShareRead(const v1::LogStatus& log) {
  if (log.recovery_bytes() == 0) return "";
  return absl::StrCat(" ", 100 * log.recovered_bytes() / log.recovery_bytes(), "%");
}

}  // namespace

Cell StateOf(const v1::ShardStatus& shard) {
  if (!shard.reachable()) return Cell("DOWN", Style::kAlarm);
  const v1::LogStatus& log = shard.log();
  if (log.recovering()) return Cell(absl::StrCat("RECOVERING", ShareRead(log)), Style::kWarning);
  return log.failure().empty() ? Cell("ok") : Cell("NO CHANGES", Style::kAlarm);
}

absl::Status CheckShard(const v1::ShardStatus& shard) {
  const std::string name = absl::StrCat("shard ", shard.index(), " (", shard.address(), ")");
  if (!shard.reachable()) {
    return absl::UnavailableError(absl::StrCat(name, " does not answer: ", shard.error()));
  }
  const v1::LogStatus& log = shard.log();
  if (log.recovering()) {
    const std::string share = ShareRead(log);
    return absl::UnavailableError(
        absl::StrCat(name, " reads its log", share.empty() ? "" : ":", share));
  }
  if (log.failure().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(name, " refuses changes: ", log.failure()));
}

}  // namespace emberd::emberctl
