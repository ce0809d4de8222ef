#include "config/credentials.h"

#include <memory>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "config/config.h"

namespace emberd::config {
namespace {

constexpr size_t kMinTokenBytes = 16;
constexpr size_t kMaxTokenBytes = 4096;

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Bio = std::unique_ptr<BIO, Deleter<BIO_free>>;
using Certificate = std::unique_ptr<X509, Deleter<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY_free>>;

Bio MakeBio(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

Key PrivateKey(const std::string& pem) {
  // Nobody is there to type a password.
  const auto no_password = [](char*, int, int, void*) { return 0; };
  Key key(PEM_read_bio_PrivateKey(MakeBio(pem).get(), nullptr, +no_password, nullptr));
  ERR_clear_error();
  return key;
}

absl::Status Bad(absl::string_view field, const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", path, ": ", what));
}

absl::StatusOr<std::string> Read(absl::string_view field, const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return Bad(field, path, text.status().message());
  RETURN_IF_ERROR(Annotate(text.status(), absl::StrCat(field, ": ", path)));
  return text;
}

// The first of a file. Those behind it must be intact, too: the web server refuses the whole file
// otherwise.
absl::StatusOr<Certificate> FirstCertificate(absl::string_view field, const std::string& path,
                                             const std::string& pem) {
  const Bio bio = MakeBio(pem);
  const auto next = [&bio] {
    return Certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  };
  Certificate first = next();
  for (bool more = first != nullptr; more;) more = next() != nullptr;
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (first == nullptr) return Bad(field, path, "holds no certificate in PEM");
  if (at_end) return first;
  return Bad(field, path,
             "a certificate behind the first is damaged; the file was probably cut when it was "
             "copied: copy the whole of it again");
}

int DaysLeft(const X509& certificate) {
  int days = 0;
  int seconds = 0;
  ASN1_TIME_diff(&days, &seconds, nullptr, X509_get0_notAfter(&certificate));
  return seconds < 0 && days == 0 ? -1 : days;
}

absl::Status LoadCertificate(const PemPaths& paths, PemFiles* files) {
  if (paths.key_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(paths.key_field, ": empty; ", paths.certificate_field, " needs its key"));
  }
  if (paths.certificate_file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(paths.certificate_field, ": empty; ",
                                                   paths.key_field, " needs its certificate"));
  }
  ASSIGN_OR_RETURN(files->certificate, Read(paths.certificate_field, paths.certificate_file));
  ASSIGN_OR_RETURN(
      const Certificate certificate,
      FirstCertificate(paths.certificate_field, paths.certificate_file, files->certificate));
  files->days_left = DaysLeft(*certificate);
  ASSIGN_OR_RETURN(files->key, Read(paths.key_field, paths.key_file));
  const Key key = PrivateKey(files->key);
  if (key == nullptr) {
    return Bad(paths.key_field, paths.key_file, "holds no private key in PEM without a password");
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    return Bad(paths.key_field, paths.key_file,
               absl::StrCat("is not the key of the certificate in ", paths.certificate_field));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PemFiles> LoadPemFiles(const PemPaths& paths) {
  PemFiles files;
  if (!paths.certificate_file.empty() || !paths.key_file.empty()) {
    RETURN_IF_ERROR(LoadCertificate(paths, &files));
  }
  if (!paths.ca_file.empty()) {
    ASSIGN_OR_RETURN(files.ca, Read(paths.ca_field, paths.ca_file));
    RETURN_IF_ERROR(FirstCertificate(paths.ca_field, paths.ca_file, files.ca).status());
  }
  return files;
}

absl::StatusOr<std::string> LoadToken(absl::string_view field, const std::string& path) {
  ASSIGN_OR_RETURN(std::string token, Read(field, path));
  absl::StripAsciiWhitespace(&token);
  RETURN_IF_ERROR(CheckToken(absl::StrCat(field, ": ", path), token));
  return token;
}

absl::Status CheckToken(absl::string_view field, absl::string_view token) {
  const bool printable = absl::c_all_of(
      token, [](char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); });
  if (printable && token.size() >= kMinTokenBytes && token.size() <= kMaxTokenBytes) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": a token of ", token.size(), " bytes",
      printable ? "" : ", not all of them printable,", " is not allowed; it must have ",
      kMinTokenBytes, " to ", kMaxTokenBytes, " printable ASCII characters without blanks"));
}

std::string FileMarks(const std::vector<std::string>& paths) {
  return absl::StrJoin(paths, "\n", [](std::string* out, const std::string& path) {
    struct stat file = {};
    if (stat(path.c_str(), &file) != 0) return absl::StrAppend(out, "none");
    absl::StrAppend(out, file.st_dev, ":", file.st_ino, ":", file.st_size, ":", file.st_mtim.tv_sec,
                    ".", file.st_mtim.tv_nsec, ":", file.st_ctim.tv_sec, ".", file.st_ctim.tv_nsec);
  });
}

}  // namespace emberd::config
