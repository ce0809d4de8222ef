// Text proto or JSON to a config message, from memory or from a file.
#include <cerrno>
#include <filesystem>
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
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/fields.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/json_util.h"

namespace emberd::config {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
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

std::vector<std::string> FieldNames(const Descriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.field_count(); ++i) names.push_back(type.field(i)->name());
  return names;
}

std::vector<std::string> ValueNames(const google::protobuf::EnumDescriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) {
    if (type.value(i)->number() != 0) names.push_back(type.value(i)->name());
  }
  return names;
}

// The first of `type` and the messages that its fields hold for which `fits` says so; null: none.
template <typename Fits>
const Descriptor* FindType(const Descriptor& type, const Fits& fits) {
  if (fits(type)) return &type;
  for (int i = 0; i < type.field_count(); ++i) {
    const Descriptor* const inner = type.field(i)->message_type();
    const Descriptor* const found = inner == nullptr ? nullptr : FindType(*inner, fits);
    if (found != nullptr) return found;
  }
  return nullptr;
}

// What stands in quotes in `text`, in order.
std::vector<std::string> Quoted(absl::string_view text) {
  std::vector<std::string> parts = absl::StrSplit(text, '"');
  std::vector<std::string> quoted;
  for (size_t i = 1; i < parts.size(); i += 2) quoted.push_back(parts[i]);
  return quoted;
}

// Protobuf's errors of text proto in words for people who do not know protobuf, with the names that
// are known.
std::string InWords(const std::string& message, const Descriptor& root) {
  const std::vector<std::string> quoted = Quoted(message);
  if (absl::StrContains(message, "has no field named") && quoted.size() == 2) {
    const Descriptor* const type =
        FindType(root, [&](const Descriptor& one) { return one.full_name() == quoted[0]; });
    if (type == nullptr) return message;
    return absl::StrCat("there is no field \"", quoted[1], "\" in ", type->name(), "; ",
                        KnownNames("fields", quoted[1], FieldNames(*type)));
  }
  if (absl::StrContains(message, "Unknown enumeration value") && quoted.size() == 2) {
    const Descriptor* const type = FindType(root, [&](const Descriptor& one) {
      const FieldDescriptor* const field = one.FindFieldByName(quoted[1]);
      return field != nullptr && field->enum_type() != nullptr;
    });
    if (type == nullptr) return message;
    const auto& values = *type->FindFieldByName(quoted[1])->enum_type();
    return absl::StrCat(quoted[1], ": ", quoted[0], " is not allowed; ",
                        KnownNames("values", quoted[0], ValueNames(values)));
  }
  if (absl::StartsWith(message, "Expected ") && absl::EndsWith(message, "got: ")) {
    return "the text ends too soon; is a } missing?";
  }
  return message;
}

absl::Status ParseTextProto(const std::string& text, Message* message) {
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(text, message)) return absl::OkStatus();
  const std::string place = error.text().substr(0, error.text().find(": ") + 2);
  const bool placed = absl::StartsWith(place, "line ");
  return absl::InvalidArgumentError(absl::StrCat(
      placed ? place : "",
      InWords(error.text().substr(placed ? place.size() : 0), *message->GetDescriptor())));
}

// The type of the message at a path like "tables[0].optimizer"; null if there is none.
const Descriptor* TypeAt(const Descriptor& root, absl::string_view path) {
  const Descriptor* type = &root;
  for (absl::string_view part : absl::StrSplit(path, '.', absl::SkipEmpty())) {
    const std::string name(part.substr(0, part.find('[')));
    const FieldDescriptor* field = type->FindFieldByName(name);
    if (field == nullptr) field = type->FindFieldByCamelcaseName(name);
    if (field == nullptr || field->message_type() == nullptr) return nullptr;
    type = field->message_type();
  }
  return type;
}

// Adds the names that are known in place of the one that `message`, which is PathFirst's, complains
// of.
std::string JsonInWords(const std::string& message, const Descriptor& root) {
  const std::string path = message.substr(0, message.find(": "));
  const size_t dot = path.rfind('.');
  const std::string parent = dot == std::string::npos ? "" : path.substr(0, dot);
  const std::string name = path.substr(dot == std::string::npos ? 0 : dot + 1);
  const Descriptor* const type = TypeAt(root, parent);
  if (type == nullptr) return message;
  if (absl::EndsWith(message, ": unknown field")) {
    return absl::StrCat(message, "; ", KnownNames("fields", name, FieldNames(*type)));
  }
  const FieldDescriptor* const field = type->FindFieldByName(name);
  const std::vector<std::string> quoted = Quoted(message);
  if (field == nullptr || field->enum_type() == nullptr || quoted.empty()) return message;
  return absl::StrCat(path, ": \"", quoted[0], "\" is not allowed; ",
                      KnownNames("values", quoted[0], ValueNames(*field->enum_type())));
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
  const std::string fault = PathFirst(std::string(parsed.message()));
  return absl::InvalidArgumentError(JsonInWords(fault, *message->GetDescriptor()));
}

// Leaves out a byte order mark, and blanks out white space and # comments at the start, so that
// JSON may follow them and keeps its line numbers.
std::string WithoutLeadingComments(absl::string_view text) {
  std::string result(absl::StripPrefix(text, "\xEF\xBB\xBF"));
  for (size_t i = 0; i < result.size(); ++i) {
    if (absl::ascii_isspace(static_cast<unsigned char>(result[i]))) continue;
    if (result[i] != '#') break;
    for (; i < result.size() && result[i] != '\n'; ++i) result[i] = ' ';
  }
  return result;
}

// Whether a text that is no text proto looks like YAML: its first line of content is "---", or a
// name, a colon and nothing or a text without quotes, and lists follow in lines of their own.
bool LooksLikeYaml(absl::string_view text) {
  bool lists = false;
  bool name_first = false;
  bool first = true;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    if (first && line == "---") return true;
    if (first) name_first = absl::StrContains(line, ":") && !absl::StrContains(line, "{");
    first = false;
    lists |= absl::StartsWith(line, "- ");
  }
  return name_first && lists;
}

absl::Status Parse(absl::string_view text, Message* message) {
  const std::string body = WithoutLeadingComments(text);
  if (LooksLikeYaml(body)) {
    return absl::InvalidArgumentError(
        "this looks like YAML, which emberd cannot read; write text proto (shards { address: "
        "\"a:1\" }) or JSON ({\"shards\": [{\"address\": \"a:1\"}]}). config/samples has examples "
        "of both");
  }
  return IsJson(body) ? ParseJson(body, message) : ParseTextProto(body, message);
}

template <typename Config>
absl::StatusOr<Config> ParseAs(absl::string_view text, absl::Status (*complete)(Config*)) {
  Config config;
  RETURN_IF_ERROR(Parse(text, &config));
  RETURN_IF_ERROR(complete(&config));
  return config;
}

template <typename Config>
absl::StatusOr<Config> Load(const std::string& path,
                            absl::StatusOr<Config> (*parse)(absl::string_view)) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  absl::StatusOr<Config> config = text.ok() ? parse(*text) : text.status();
  if (config.ok()) return config;
  return Annotate(config.status(), path);
}

absl::Status CannotRead(int error) {
  const std::string reason = std::generic_category().message(error);
  if (error == ENOENT) return absl::NotFoundError(reason);
  if (IsWrongPath(error)) return absl::InvalidArgumentError(reason);
  return absl::FailedPreconditionError(
      absl::StrCat(reason,
                   "; the path is not what is wrong: look at the kernel's log, and at the "
                   "limits of this process and its machine"));
}

}  // namespace

bool IsJson(absl::string_view text) {
  return absl::StartsWith(absl::StripLeadingAsciiWhitespace(WithoutLeadingComments(text)), "{");
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError("is a folder; name a file in it");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return CannotRead(errno);
  std::ostringstream text;
  // Inserting no characters at all is a failure to a stream, but an empty file is a file.
  if (file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  // Where reading fails on the way, it is the target that says so.
  if (file.bad() || !text) return CannotRead(EIO);
  return text.str();
}

absl::StatusOr<v1::ModelConfig> ParseModel(absl::string_view text) {
  return ParseAs(text, &CompleteModel);
}

absl::StatusOr<v1::ClusterConfig> ParseCluster(absl::string_view text) {
  return ParseAs(text, &CompleteCluster);
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
absl::StatusOr<v1::ClusterConfig> ReadCluster(const std::string& path) {
  return Load<v1::ClusterConfig>(path, [](absl::string_view text) {
    return ParseAs<v1::ClusterConfig>(text, [](auto*) { return absl::OkStatus(); });
  });
}

}  // namespace emberd::config
