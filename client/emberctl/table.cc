#include "client/emberctl/table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace emberd::emberctl {
namespace {

// Appends to a line until it is `width` characters long.
class Line {
 public:
  Line(bool colors, int width) : colors_(colors), room_(width > 0 ? width : -1) {}

  void Append(const std::string& text, Style style) {
    std::string shown = room_ < 0 ? text : text.substr(0, room_);
    // What a server says must not move the cursor.
    std::replace_if(
        shown.begin(), shown.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
    if (room_ > 0) room_ -= static_cast<int>(shown.size());
    if (shown.empty()) return;
    absl::StrAppend(&line_, colors_ ? Styled(shown, style) : shown);
  }
  std::string Take() { return std::move(line_); }

 private:
  const bool colors_;
  int room_;  // < 0: as much as one likes
  std::string line_;
};

}  // namespace

std::string Styled(const std::string& text, Style style) {
  switch (style) {
    case Style::kPlain:
      return text;
    case Style::kBold:
      return absl::StrCat("\x1b[1m", text, "\x1b[0m");
    case Style::kWarning:
      return absl::StrCat("\x1b[33m", text, "\x1b[0m");
    case Style::kAlarm:
      return absl::StrCat("\x1b[1;31m", text, "\x1b[0m");
  }
  return text;
}

std::vector<std::string> LayOut(const std::vector<CellLine>& lines, bool colors, int width) {
  std::vector<size_t> widths;
  for (const CellLine& line : lines) {
    widths.resize(std::max(widths.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].text.size());
  }
  std::vector<std::string> laid_out;
  for (size_t n = 0; n < lines.size(); ++n) {
    Line line(colors, width);
    for (size_t i = 0; i < lines[n].size(); ++i) {
      const Cell& cell = lines[n][i];
      line.Append(cell.text, n == 0 ? Style::kBold : cell.style);
      if (i + 1 == lines[n].size()) break;
      line.Append(std::string(widths[i] + 2 - cell.text.size(), ' '), Style::kPlain);
    }
    laid_out.push_back(line.Take());
  }
  return laid_out;
}

std::string LayOutLine(const CellLine& cells, bool colors, int width) {
  Line line(colors, width);
  for (const Cell& cell : cells) line.Append(cell.text, cell.style);
  return line.Take();
}

}  // namespace emberd::emberctl
