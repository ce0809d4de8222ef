#include "client/emberctl/stats_source.h"

#include <utility>

namespace emberd::emberctl {

StatsSource::StatsSource(const Session& session, int hot_rows)
    : session_(session), hot_rows_(hot_rows) {
  for (const std::string& address : session.addresses) {
    coordinators_.push_back(std::make_unique<Session>(session.At(address)));
  }
}

absl::StatusOr<v1::GetStatsResponse> StatsSource::Fetch() {
  v1::GetStatsRequest request;
  request.set_hot_rows(hot_rows_);
  absl::Status status = absl::InvalidArgumentError("--address: none is given");
  for (size_t tried = 0; tried < coordinators_.size(); ++tried) {
    v1::GetStatsResponse response;
    status =
        coordinators_[current_]->Call([&](const client::Coordinator& coordinator, auto* context) {
          return coordinator.admin->GetStats(context, request, &response);
        });
    if (status.ok()) return response;
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) break;
    current_ = (current_ + 1) % coordinators_.size();
  }
  return status;
}

}  // namespace emberd::emberctl
