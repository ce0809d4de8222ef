// Text proto or JSON to a config message, from memory or from a file.
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "config/config.h"
#include "config/json_syntax.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/json_util.h"

namespace emberd::config {
namespace {

using google::protobuf::Message;

// Keeps the first error of a text proto parser.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (!text_.empty()) return;
    text_ = line < 0 ? message
                     : absl::StrCat("line ", line + 1, ", column ", column + 1, ": ", message);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

absl::Status ParseTextProto(const std::string& text, Message* message) {
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(text, message)) return absl::OkStatus();
  return absl::InvalidArgumentError(error.text());
}

// Protobuf writes "(tables[0]) foo: Cannot find field." and "(tables[0].name): invalid value 5
// ...".
std::string PathFirst(const std::string& message) {
  return absl::StrReplaceAll(absl::StripPrefix(message, "("),
                             {{"): ", ": "}, {") ", "."}, {"Cannot find field.", "unknown field"}});
}

absl::Status ParseJson(const std::string& text, Message* message) {
  absl::Status status = CheckJsonSyntax(text);
  if (!status.ok()) return status;
  const auto parsed = google::protobuf::util::JsonStringToMessage(text, message);
  if (parsed.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(PathFirst(std::string(parsed.message())));
}

// Blanks out white space and # comments at the start, so that JSON may follow them and keeps its
// line numbers.
std::string WithoutLeadingComments(absl::string_view text) {
  std::string result(text);
  for (size_t i = 0; i < result.size(); ++i) {
    if (absl::ascii_isspace(static_cast<unsigned char>(result[i]))) continue;
    if (result[i] != '#') break;
    for (; i < result.size() && result[i] != '\n'; ++i) result[i] = ' ';
  }
  return result;
}

absl::Status Parse(absl::string_view text, Message* message) {
  const std::string body = WithoutLeadingComments(text);
  const bool is_json = absl::StartsWith(absl::StripLeadingAsciiWhitespace(body), "{");
  return is_json ? ParseJson(body, message) : ParseTextProto(body, message);
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    const std::string reason = std::generic_category().message(errno);
    return errno == ENOENT ? absl::NotFoundError(reason) : absl::InvalidArgumentError(reason);
  }
  std::ostringstream text;
  // Inserting no characters at all is a failure to a stream, but an empty file is a file.
  if (file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (file.bad() || text.bad()) return absl::InvalidArgumentError("cannot be read");
  return text.str();
}

template <typename Config>
absl::StatusOr<Config> Load(const std::string& path,
                            absl::StatusOr<Config> (*parse)(absl::string_view)) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  absl::StatusOr<Config> config = text.ok() ? parse(*text) : text.status();
  if (config.ok()) return config;
  return absl::Status(config.status().code(), absl::StrCat(path, ": ", config.status().message()));
}

}  // namespace

absl::StatusOr<v1::ModelConfig> ParseModel(absl::string_view text) {
  v1::ModelConfig model;
  absl::Status status = Parse(text, &model);
  if (status.ok()) status = CompleteModel(&model);
  if (!status.ok()) return status;
  return model;
}

absl::StatusOr<v1::ClusterConfig> ParseCluster(absl::string_view text) {
  v1::ClusterConfig cluster;
  absl::Status status = Parse(text, &cluster);
  if (status.ok()) status = CompleteCluster(&cluster);
  if (!status.ok()) return status;
  return cluster;
}

absl::StatusOr<v1::TokenFile> ParseTokenFile(absl::string_view text) {
  v1::TokenFile file;
  // The parser quotes what it stumbles over: a token, where somebody has mixed up the files.
  if (!Parse(text, &file).ok()) {
    return absl::InvalidArgumentError("it is not a TokenFile as text proto or JSON");
  }
  const absl::Status status = CompleteTokenFile(&file);
  if (!status.ok()) return status;
  return file;
}

absl::StatusOr<v1::ModelConfig> LoadModel(const std::string& path) {
  return Load(path, &ParseModel);
}
absl::StatusOr<v1::ClusterConfig> LoadCluster(const std::string& path) {
  return Load(path, &ParseCluster);
}
absl::StatusOr<v1::TokenFile> LoadTokenFile(const std::string& path) {
  return Load(path, &ParseTokenFile);
}

}  // namespace emberd::config
