#include "client/emberctl/output.h"

#include <algorithm>
#include <charconv>

#include <google/protobuf/util/json_util.h>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace emberd::emberctl {

void PrintColumns(const std::vector<std::vector<std::string>>& lines, std::ostream& out) {
  std::vector<size_t> widths;
  for (const std::vector<std::string>& line : lines) {
    widths.resize(std::max(widths.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  for (const std::vector<std::string>& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      const bool last = i + 1 == line.size();
      out << line[i] << (last ? "\n" : std::string(widths[i] + 2 - line[i].size(), ' '));
    }
  }
}

void PrintJson(const google::protobuf::Message& message, std::ostream& out) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  if (google::protobuf::util::MessageToJsonString(message, &text, options).ok()) out << text;
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
  if (unit == 0 && (value == 0 || value >= 99.95)) return absl::StrFormat("%.0f", value);
  return absl::StrFormat(value < 99.95 ? "%.1f%s" : "%.0f%s", value, units[unit]);
}

std::string Seconds(double seconds) {
  if (seconds < 0.0009995) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 0.9995) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return absl::StrFormat("%.2f s", seconds);
}

std::string Percent(double part, double whole) {
  if (whole <= 0) return "-";
  const double percent = 100 * part / whole;
  return absl::StrFormat(percent < 9.95 && percent > 0 ? "%.1f%%" : "%.0f%%", percent);
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

namespace {
constexpr char kUnfinishedUrl[] = "emberctl/unfinished";
}  // namespace

absl::Status Unfinished(absl::string_view message) {
  absl::Status status = absl::DeadlineExceededError(message);
  status.SetPayload(kUnfinishedUrl, absl::Cord());
  return status;
}

bool IsUnfinished(const absl::Status& status) {
  return status.GetPayload(kUnfinishedUrl).has_value();
}

}  // namespace emberd::emberctl
