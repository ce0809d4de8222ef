#include "config/numbers.h"

#include <cmath>

#include "google/protobuf/io/strtod.h"
#include "google/protobuf/stubs/strutil.h"

namespace emberd::config {

std::optional<float> ToFloat(double value) {
  // What the parser of text proto does: FLT_MAX in 8 digits is a little more than FLT_MAX.
  const float rounded = google::protobuf::io::SafeDoubleToFloat(value);
  if (std::isfinite(value) && !std::isfinite(rounded)) return std::nullopt;
  return rounded == 0 ? 0 : rounded;
}

std::string NumberText(double value) { return google::protobuf::SimpleDtoa(value); }

}  // namespace emberd::config
