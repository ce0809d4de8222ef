// Doubles that users give where a float32 or a text is wanted.
#pragma once

#include <optional>
#include <string>

namespace emberd::config {

// The float32 that a float field of a config would hold if `value` stood there: rounded, and 0 for
// -0. None if `value` is finite and too large for a float32; NaN and infinities stay what they are.
std::optional<float> ToFloat(double value);

// Short text that reads back as the same double: "0.5", "0.30000000000000004", "1e+300".
std::string NumberText(double value);

}  // namespace emberd::config
