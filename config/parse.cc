// Text proto or JSON to a config message, from memory or from a file.
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "config/config.h"
#include "config/fields.h"
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

// The JSON checks that protobuf's own JSON reader leaves out: strict JSON in UTF-8, with line and
// column; no field twice in an object ("vocabulary_size" and "vocabularySize" name the same one);
// no null and no list inside a list, which protobuf would drop or flatten in silence. Receives the
// parser's events; returning false stops it.
class SyntaxChecker : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return BeginValue("null"); }
  bool boolean(bool) override { return BeginValue(); }
  bool number_integer(number_integer_t) override { return BeginValue(); }
  bool number_unsigned(number_unsigned_t) override { return BeginValue(); }
  bool number_float(number_float_t, const string_t&) override { return BeginValue(); }
  bool string(string_t&) override { return BeginValue(); }
  bool binary(binary_t&) override { return BeginValue(); }
  bool start_array(std::size_t) override { return BeginValue("a list") && Open(true); }
  bool end_array() override { return Close(); }
  bool start_object(std::size_t) override { return BeginValue() && Open(false); }
  bool end_object() override { return Close(); }

  bool key(string_t& key) override {
    open_.back().key = key;
    const std::string spelling = absl::AsciiStrToLower(absl::StrReplaceAll(key, {{"_", ""}}));
    return open_.back().keys.insert(spelling).second || Fail("is given more than once");
  }

  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 2, column 9: ..."
    absl::string_view text = error.what();
    const size_t prefix = text.find("] ");
    if (prefix != absl::string_view::npos) text.remove_prefix(prefix + 2);
    status_ = absl::InvalidArgumentError(absl::StrCat("JSON ", text));
    return false;
  }

  const absl::Status& status() const { return status_; }

 private:
  // A list or object that has begun and not ended.
  struct Container {
    bool is_list = false;
    int index = -1;                         // of a list: the element we are in
    std::string key;                        // of an object: the field we are in
    absl::flat_hash_set<std::string> keys;  // of an object: the fields so far
  };

  // `misfit` names a kind of value that must not be an element of a list.
  bool BeginValue(absl::string_view misfit = "") {
    if (open_.empty() || !open_.back().is_list) return true;
    ++open_.back().index;
    return misfit.empty() || Fail(absl::StrCat(misfit, " is not allowed in a list"));
  }
  bool Open(bool is_list) {
    open_.emplace_back().is_list = is_list;
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }
  bool Fail(absl::string_view what) {
    std::string path;
    for (const Container& container : open_) {
      path = container.is_list ? absl::StrCat(path, "[", container.index, "]")
                               : FieldPath(path, absl::CEscape(container.key));
    }
    status_ = absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
    return false;
  }

  std::vector<Container> open_;
  absl::Status status_;
};

absl::Status ParseJson(const std::string& text, Message* message) {
  SyntaxChecker checker;
  nlohmann::json::sax_parse(text, &checker);
  RETURN_IF_ERROR(checker.status());
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
  return Annotate(config.status(), path);
}

}  // namespace

absl::StatusOr<v1::ModelConfig> ParseModel(absl::string_view text) {
  v1::ModelConfig model;
  RETURN_IF_ERROR(Parse(text, &model));
  RETURN_IF_ERROR(CompleteModel(&model));
  return model;
}

absl::StatusOr<v1::ClusterConfig> ParseCluster(absl::string_view text) {
  v1::ClusterConfig cluster;
  RETURN_IF_ERROR(Parse(text, &cluster));
  RETURN_IF_ERROR(CompleteCluster(&cluster));
  return cluster;
}

absl::StatusOr<v1::TokenFile> ParseTokenFile(absl::string_view text) {
  v1::TokenFile file;
  // The error of the parser quotes the text: a token, if somebody has mixed up the files.
  if (!Parse(text, &file).ok()) {
    return absl::InvalidArgumentError("it is not a TokenFile as text proto or JSON");
  }
  RETURN_IF_ERROR(CompleteTokenFile(&file));
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
