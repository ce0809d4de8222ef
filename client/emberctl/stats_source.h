// Statistics of one coordinator, again and again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/emberctl/session.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::emberctl {

// Stays with the coordinator that answered last, and turns to the next address when it does not.
class StatsSource {
 public:
  StatsSource(const Session& session, int hot_rows);

  // The error of the last address if none answers.
  absl::StatusOr<v1::GetStatsResponse> Fetch();
  // Whose answer it was.
  const std::string& address() const { return session_.addresses[current_]; }

 private:
  const Session& session_;
  const int hot_rows_;
  std::vector<std::unique_ptr<Session>> coordinators_;  // by address
  size_t current_ = 0;
};

}  // namespace emberd::emberctl
