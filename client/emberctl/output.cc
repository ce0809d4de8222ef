#include "client/emberctl/output.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include <google/protobuf/util/json_util.h>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

namespace emberd::emberctl {

namespace {

// Protobuf writes 64-bit integers as texts of decimal digits; those that are ids become hex.
void WriteIdsAsHex(nlohmann::ordered_json& json) {
  if (json.is_array()) {
    for (nlohmann::ordered_json& element : json) WriteIdsAsHex(element);
  }
  if (!json.is_object()) return;
  for (auto& [key, value] : json.items()) {
    uint64_t id = 0;
    const bool is_id = key == "model_id" || key == "batch_handle" || key == "incarnation" ||
                       key == "history" || key == "checkpoint_id" || key == "parent_id";
    if (is_id && value.is_string() && absl::SimpleAtoi(value.get<std::string>(), &id)) {
      value = HexId(id);
    } else {
      WriteIdsAsHex(value);
    }
  }
}

constexpr char kUnfinishedUrl[] = "emberctl/unfinished";
constexpr char kWrongUsageUrl[] = "emberctl/wrong_usage";

absl::Status Marked(absl::Status status, const char* url) {
  status.SetPayload(url, absl::Cord());
  return status;
}

}  // namespace

absl::Status PrintJson(const google::protobuf::Message& message, std::ostream& out) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  nlohmann::ordered_json json;
  if (google::protobuf::util::MessageToJsonString(message, &text, options).ok()) {
    json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  }
  if (!json.is_object()) return absl::InternalError("the answer cannot be written as JSON");
  WriteIdsAsHex(json);
  out << Dump(json, 1) << "\n";
  return absl::OkStatus();
}

absl::Status PrintJson(const Json& json, std::ostream& out) {
  out << Dump(json, 1) << "\n";
  return absl::OkStatus();
}

Json MessageJson(const google::protobuf::Message& message) {
  std::ostringstream text;
  return PrintJson(message, text).ok() ? Json::parse(text.str()) : Json();
}

std::string Counted(int64_t count, absl::string_view one, absl::string_view plural) {
  if (count == 1) return absl::StrCat("1 ", one);
  return plural.empty() ? absl::StrCat(count, " ", one, "s") : absl::StrCat(count, " ", plural);
}

std::string Bytes(int64_t bytes) {
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, units[unit]);
}

std::string Quantity(double value) {
  const char* const units[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < std::size(units); ++unit) value /= 1000;
  if (value > 0 && value < 0.05) return "<0.1";
  if (unit == 0 && (value == 0 || value >= 99.95)) return absl::StrFormat("%.0f", value);
  return value < 99.95 ? absl::StrFormat("%.1f%s", value, units[unit])
                       : absl::StrFormat("%.0f%s", value, units[unit]);
}

std::string Seconds(double seconds) {
  if (seconds < 0.0009995) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 0.9995) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return absl::StrFormat("%.2f s", seconds);
}

std::string Percent(double part, double whole) {
  if (whole <= 0) return "-";
  const double percent = 100 * part / whole;
  return percent < 9.95 && percent > 0 ? absl::StrFormat("%.1f%%", percent)
                                       : absl::StrFormat("%.0f%%", percent);
}

std::string Uptime(int64_t milliseconds) {
  const int64_t seconds = milliseconds / 1000;
  if (seconds >= 3600) return absl::StrCat(seconds / 3600, "h ", seconds / 60 % 60, "m");
  if (seconds >= 60) return absl::StrCat(seconds / 60, "m ", seconds % 60, "s");
  return absl::StrCat(seconds, "s");
}

std::string Float(float value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

absl::Status Unfinished(absl::string_view message) {
  return Marked(absl::DeadlineExceededError(message), kUnfinishedUrl);
}

bool IsUnfinished(const absl::Status& status) {
  return status.GetPayload(kUnfinishedUrl).has_value();
}

absl::Status WrongUsage(absl::string_view message) {
  return Marked(absl::InvalidArgumentError(message), kWrongUsageUrl);
}

bool IsWrongUsage(const absl::Status& status) {
  return status.GetPayload(kWrongUsageUrl).has_value();
}

std::string Styled(const std::string& text, Style style) {
  if (style == Style::kPlain) return text;
  const char* const code = style == Style::kBold ? "1" : style == Style::kWarning ? "33" : "1;31";
  return absl::StrCat("\x1b[", code, "m", text, "\x1b[0m");
}

std::vector<std::string> LayOut(const Table& table, bool colors, int width) {
  std::vector<size_t> widths;
  for (const CellLine& line : table) {
    widths.resize(std::max(widths.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].text.size());
  }
  std::vector<std::string> laid_out;
  for (size_t n = 0; n < table.size(); ++n) {
    CellLine line;
    for (size_t i = 0; i < table[n].size(); ++i) {
      const Cell& cell = table[n][i];
      if (i > 0) line.push_back(std::string(widths[i - 1] + 2 - table[n][i - 1].text.size(), ' '));
      line.emplace_back(cell.text, n == 0 ? Style::kBold : cell.style);
    }
    laid_out.push_back(LayOutLine(line, colors, width));
  }
  return laid_out;
}

void PrintColumns(const Table& table, std::ostream& out) {
  for (const std::string& line : LayOut(table, /*colors=*/false)) out << line << "\n";
}

std::string LayOutLine(const CellLine& cells, bool colors, int width) {
  std::string line;
  size_t room = width > 0 ? static_cast<size_t>(width) : std::string::npos;
  for (const Cell& cell : cells) {
    std::string shown = cell.text.substr(0, room);
    // What a server says must not move the cursor.
    std::replace_if(
        shown.begin(), shown.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
    if (width > 0) room -= shown.size();
    if (!shown.empty()) absl::StrAppend(&line, colors ? Styled(shown, cell.style) : shown);
  }
  return line;
}

}  // namespace emberd::emberctl
