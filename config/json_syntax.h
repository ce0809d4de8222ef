// The JSON checks that protobuf's own JSON reader leaves out.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace emberd::config {

// INVALID_ARGUMENT with line and column for text that is not one strict JSON value in UTF-8; with
// the path for a field that stands twice in an object ("vocabulary_size" and "vocabularySize" name
// the same field), and for a null or a list inside a list, which protobuf would drop or flatten in
// silence.
absl::Status CheckJsonSyntax(absl::string_view text);

}  // namespace emberd::config
