#include "config/stack_groups.h"

#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/config.h"
#include "config/field_rules.h"
#include "config/fields.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace {

using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

std::string GroupPath(int group) { return FieldPath("plan", "groups", group); }
std::string MemberPath(int group, int member) {
  return FieldPath(GroupPath(group), "tables", member);
}

// What tables of a stack must share: the stack's rows are stored, looked up and updated by one set
// of settings.
absl::Status CheckStackable(const v1::TableConfig& first, const v1::TableConfig& table,
                            const std::string& path) {
  const char* unequal =
      !MessageDifferencer::Equals(first.optimizer(), table.optimizer()) ? "optimizer"
      : first.has_quantization() != table.has_quantization() ||
              !MessageDifferencer::Equals(first.quantization(), table.quantization())
          ? "quantization"
      : first.storage_dtype() != table.storage_dtype()                 ? "storage_dtype"
      : first.update_rounding() != table.update_rounding()             ? "update_rounding"
      : first.on_nonfinite_gradient() != table.on_nonfinite_gradient() ? "on_nonfinite_gradient"
      : first.result_mode() != table.result_mode()                     ? "result_mode"
                                                                       : nullptr;
  if (unequal == nullptr) return absl::OkStatus();
  return NotAllowed(path, QuotedText(table.name()),
                    absl::StrCat("a table with the same ", unequal, " as ",
                                 QuotedText(first.name()), ", the first of the group"));
}

class GroupChecker {
 public:
  explicit GroupChecker(const v1::ModelConfig& model) {
    for (const v1::TableConfig& table : model.tables()) tables_.emplace(table.name(), &table);
  }

  absl::Status CheckTables(const v1::StackGroup& group, int index) {
    if (group.tables().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(GroupPath(index), ".tables: empty; at least one is needed"));
    }
    for (int i = 0; i < group.tables_size(); ++i) {
      const std::string path = MemberPath(index, i);
      const std::string quoted = QuotedText(group.tables(i));
      const auto table = tables_.find(group.tables(i));
      if (table == tables_.end()) return NotAllowed(path, quoted, "the name of a table");
      const auto [earlier, inserted] = places_.emplace(group.tables(i), path);
      if (!inserted) {
        return NotAllowed(path, quoted,
                          absl::StrCat("in one group only, once; it is also ", earlier->second));
      }
      absl::Status status = CheckStackable(*tables_.at(group.tables(0)), *table->second, path);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status CheckName(const v1::StackGroup& group, int index) {
    const std::string path = FieldPath(GroupPath(index), "name");
    if (!HasNameCharacters(group.name())) {
      return NotAllowed(path, QuotedText(group.name()), "characters of [A-Za-z0-9_.-]");
    }
    const auto [earlier, inserted] = names_.emplace(group.name(), index);
    if (inserted) return absl::OkStatus();
    return NotAllowed(path, QuotedText(group.name()),
                      absl::StrCat("unique; it is also the name of ", GroupPath(earlier->second)));
  }

 private:
  absl::flat_hash_map<std::string, const v1::TableConfig*> tables_;
  absl::flat_hash_map<std::string, std::string> places_;  // table -> where it stands in a group
  absl::flat_hash_map<std::string, int> names_;           // group name -> group
};

}  // namespace

absl::Status CompleteGroups(v1::ModelConfig* model) {
  GroupChecker checker(*model);
  for (int i = 0; i < model->plan().groups_size(); ++i) {
    v1::StackGroup& group = *model->mutable_plan()->mutable_groups(i);
    absl::Status status = checker.CheckTables(group, i);
    if (!status.ok()) return status;
    if (group.name().empty()) group.set_name(absl::StrJoin(group.tables(), "_"));
    status = checker.CheckName(group, i);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace emberd::config
