// Text in columns, some of it in colour.
#pragma once

#include <string>
#include <vector>

namespace emberd::emberctl {

enum class Style { kPlain, kBold, kWarning, kAlarm };

struct Cell {
  Cell(std::string text, Style style = Style::kPlain) : text(std::move(text)), style(style) {}
  Cell(const char* text) : text(text) {}

  std::string text;  // ASCII
  Style style = Style::kPlain;
};
using CellLine = std::vector<Cell>;

// `text` with the escape sequences of its style around it.
std::string Styled(const std::string& text, Style style);

// Lines in columns as wide as their widest cell, without a line end, cut at `width` characters (0:
// nowhere). The first line is bold. `colors`: with escape sequences, which count for no width.
std::vector<std::string> LayOut(const std::vector<CellLine>& lines, bool colors, int width = 0);

// Lines that are not in columns, cut in the same way.
std::string LayOutLine(const CellLine& line, bool colors, int width = 0);

}  // namespace emberd::emberctl
