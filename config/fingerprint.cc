// ModelFingerprint and FirstDifference: whether two complete configs are the same, and where they
// are not.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "config/config.h"
#include "config/fields.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace {

using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

// Keeps the first difference that is reported. Message 1 is the declared model, message 2 the
// requested one.
class FirstDifferenceReporter : public MessageDifferencer::Reporter {
 public:
  using Path = std::vector<MessageDifferencer::SpecificField>;

  void ReportAdded(const Message& declared, const Message& requested, const Path& path) override {
    Report(path, ValueOrAbsent(declared, path), Value(requested, path, path.back().new_index));
  }
  void ReportDeleted(const Message& declared, const Message& requested, const Path& path) override {
    Report(path, Value(declared, path, path.back().index), ValueOrAbsent(requested, path));
  }
  void ReportModified(const Message& declared, const Message& requested,
                      const Path& path) override {
    Report(path, Value(declared, path, path.back().index),
           Value(requested, path, path.back().new_index));
  }

  const std::string& first() const { return first_; }

 private:
  // `message` is the one that holds the last field of `path`.
  static std::string Value(const Message& message, const Path& path, int index) {
    return ValueText(message, *path.back().field, index);
  }
  // For the side on which a field is not set: plain proto3 fields have a value all the same.
  static std::string ValueOrAbsent(const Message& message, const Path& path) {
    const auto& field = *path.back().field;
    return field.is_repeated() || field.has_presence() ? "absent" : Value(message, path, -1);
  }

  void Report(const Path& path, const std::string& declared, const std::string& requested) {
    if (!first_.empty()) return;
    std::string name;
    for (const auto& step : path) name = FieldPath(name, step.field->name(), step.index);
    first_ = absl::StrCat(name, ": ", declared, " in the declared model, ", requested,
                          " in the requested one");
  }

  std::string first_;
};

}  // namespace

uint64_t ModelFingerprint(const v1::ModelConfig& model) {
  // Complete configs have no maps and no unknown fields, so their deterministic serialization is
  // canonical.
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    model.SerializeToCodedStream(&coded);
  }
  return std::max<uint64_t>(Sha256Prefix(bytes), 1);
}

std::string FirstDifference(const v1::ModelConfig& declared, const v1::ModelConfig& requested) {
  FirstDifferenceReporter reporter;
  MessageDifferencer differencer;
  differencer.ReportDifferencesTo(&reporter);
  differencer.Compare(declared, requested);
  return reporter.first();
}

}  // namespace emberd::config
