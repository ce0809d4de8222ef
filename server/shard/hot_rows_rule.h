// How many hot rows of each table a caller may ask for.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace emberd::server {

inline constexpr int kMaxHotRows = 100;

inline absl::Status CheckHotRows(int hot_rows) {
  if (hot_rows >= 0 && hot_rows <= kMaxHotRows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("hot_rows is ", hot_rows, "; it must be 0 to ", kMaxHotRows));
}

}  // namespace emberd::server
