// Output for people (columns, colours, sizes, durations) and for programs (JSON).
#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <google/protobuf/message.h>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/suggest.h"

namespace emberd::emberctl {

// Numbers are floats, so that they are written with as few digits as a float needs.
using Json =
    nlohmann::basic_json<std::map, std::vector, std::string, bool, int64_t, uint64_t, float>;

// On one line, or with `indent`. What is no UTF-8 in it, which others may have sent or typed,
// becomes U+FFFD.
template <typename AnyJson>
std::string Dump(const AnyJson& json, int indent = -1) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, AnyJson::error_handler_t::replace);
}

// A message as JSON, with its own field names and all fields written. Ids of models, batches,
// processes, histories and checkpoints are texts of 16 hex digits. INTERNAL: a text in it is no
// UTF-8.
absl::Status PrintJson(const google::protobuf::Message& message, std::ostream& out);
absl::Status PrintJson(const Json& json, std::ostream& out);  // OK
// The same message as a part of other JSON.
Json MessageJson(const google::protobuf::Message& message);

// "1 batch", "2 batches". `plural`: where it is not `one` with an s.
std::string Counted(int64_t count, absl::string_view one, absl::string_view plural = "");
// "1.5 GiB"
std::string Bytes(int64_t bytes);
// "0", "<0.1", "1.5", "150", "12.3k", "4.0M": for what need not be exact. >= 0.
std::string Quantity(double value);
// "150 us", "2.5 ms", "1.20 s"
std::string Seconds(double seconds);
// "12%", "0.3%"; "-" of nothing.
std::string Percent(double part, double whole);
// "2h 3m", "3m 12s", "12s"
std::string Uptime(int64_t milliseconds);
// The shortest text that reads back as the same float.
std::string Float(float value);

// For a command that waited for something in vain: makes emberctl end with kUnfinished.
absl::Status Unfinished(absl::string_view message);
bool IsUnfinished(const absl::Status& status);

// For a command line that cannot be what was meant, as a command finds out: INVALID_ARGUMENT that
// makes emberctl end with kUsage.
absl::Status WrongUsage(absl::string_view message);
bool IsWrongUsage(const absl::Status& status);

enum class Style { kPlain, kBold, kWarning, kAlarm };

struct Cell {
  Cell(std::string text, Style style = Style::kPlain) : text(std::move(text)), style(style) {}
  Cell(const char* text) : text(text) {}
  template <std::integral Number>
  Cell(Number number) : text(absl::StrCat(number)) {}

  std::string text;  // ASCII
  Style style = Style::kPlain;
};
using CellLine = std::vector<Cell>;
using Table = std::vector<CellLine>;  // the first line are the headings

// `text` with the escape sequences of its style around it.
std::string Styled(const std::string& text, Style style);

// Lines in columns as wide as their widest cell, without a line end, cut at `width` characters (0:
// nowhere). The first line is bold. `colors`: with escape sequences, which count for no width.
std::vector<std::string> LayOut(const Table& table, bool colors, int width = 0);
// The same, plain.
void PrintColumns(const Table& table, std::ostream& out);

// Lines that are not in columns, cut in the same way.
std::string LayOutLine(const CellLine& line, bool colors, int width = 0);

}  // namespace emberd::emberctl
