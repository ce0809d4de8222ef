#include "client/emberctl/top_frame.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace emberd::emberctl {

std::vector<std::string> TopFrame(const Rates& rates, const std::string& address,
                                  const FrameOptions& options) {
  std::vector<std::string> lines;
  for (const CellLine& line : SummaryLines(rates, address)) {
    lines.push_back(LayOutLine(line, options.colors, options.columns));
  }
  for (const auto& table : StatsTables(rates, {.per_second = true, .order = options.order})) {
    lines.emplace_back();
    for (std::string& line : LayOut(table, options.colors, options.columns)) {
      lines.push_back(std::move(line));
    }
  }
  const int hints = options.hint.empty() ? 0 : 1;
  const auto room = static_cast<size_t>(std::max(options.rows - hints, 1));
  if (options.rows > 0 && lines.size() > room) {
    const size_t missing = lines.size() - room + 1;
    lines.resize(room - 1);
    lines.push_back(LayOutLine(
        {Cell(absl::StrCat("... ", missing, " more lines; the window is too low"), Style::kBold)},
        options.colors, options.columns));
  }
  if (hints > 0 && (options.rows == 0 || options.rows > 1)) {
    lines.push_back(
        LayOutLine({Cell(options.hint, Style::kBold)}, options.colors, options.columns));
  }
  return lines;
}

}  // namespace emberd::emberctl
