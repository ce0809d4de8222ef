#include "config/json_syntax.h"

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

// Receives the parser's events; returning false stops it.
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
    return misfit.empty() || Fail(absl::StrCat("is ", misfit, ", which may not stand in a list"));
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

}  // namespace

absl::Status CheckJsonSyntax(absl::string_view text) {
  SyntaxChecker checker;
  nlohmann::json::sax_parse(text.begin(), text.end(), &checker);
  return checker.status();
}

}  // namespace emberd::config
