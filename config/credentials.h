// Certificates, keys and tokens in files. What they hold never stands in an error.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace emberd::config {

// Paths and, in front of them in errors, the fields that they come from.
struct PemPaths {
  std::string certificate_field = {};
  std::string certificate_file = {};  // with its key; empty: no certificate
  std::string key_field = {};
  std::string key_file = {};
  std::string ca_field = {};
  std::string ca_file = {};  // empty: no authorities
};

// The contents, as they stand in the files; empty where there is no path.
struct PemFiles {
  std::string certificate;  // with the chain above it
  std::string key;
  std::string ca;
  // Whole days until the certificate ends; afterwards minus the days since then, but at least one.
  int days_left = 0;
};

// INVALID_ARGUMENT: a file is not there or holds something else, a certificate in it is damaged, or
// the key is not that of the first certificate. FAILED_PRECONDITION: the machine cannot read one of
// the files. Certificates may be expired.
absl::StatusOr<PemFiles> LoadPemFiles(const PemPaths& paths);

// The token in a file of one line; white space around it does not count. Errors begin with `field`.
// FAILED_PRECONDITION: the machine cannot read the file.
absl::StatusOr<std::string> LoadToken(absl::string_view field, const std::string& path);
// INVALID_ARGUMENT unless `token` has 16 to 4096 characters of printable ASCII, without blanks.
absl::Status CheckToken(absl::string_view field, absl::string_view token);

// What differs, without reading them, when one of these files was written or replaced, itself or
// behind a link, which is how certificates are often replaced.
std::string FileMarks(const std::vector<std::string>& paths);

}  // namespace emberd::config
