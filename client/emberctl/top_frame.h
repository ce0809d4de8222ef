// One screen of `emberctl top`.
#pragma once

#include <string>
#include <vector>

#include "client/emberctl/stats_view.h"

namespace emberd::emberctl {

struct FrameOptions {
  Order order = Order::kBusy;
  bool colors = false;
  int columns = 0;   // 0: as many as it takes
  int rows = 0;      // the same
  std::string hint;  // the last line, if not empty
};

// Lines that fit. Where there is too much, the last but the hint says how much is missing.
std::vector<std::string> TopFrame(const Rates& rates, const std::string& address,
                                  const FrameOptions& options);

}  // namespace emberd::emberctl
