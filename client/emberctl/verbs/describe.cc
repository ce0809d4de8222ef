#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

// What `rows` and `export` take as --slot; nothing where no optimizer has any.
void PrintSlots(const v1::DescribeModelResponse& model, std::ostream& out) {
  if (model.slots().empty()) return;
  std::vector<std::vector<std::string>> lines = {{"TABLE", "SLOT", "SHAPE"}};
  for (const v1::SlotShape& slot : model.slots()) {
    lines.push_back({slot.table(), slot.slot(), absl::StrJoin(slot.shape(), " x ")});
  }
  out << "\n";
  PrintColumns(lines, out);
}

absl::Status Describe(Session& session, const std::string& model) {
  ASSIGN_OR_RETURN(v1::DescribeModelResponse found, session.DescribeModel(model));
  if (session.json) {
    PrintJson(found, session.out);
    return absl::OkStatus();
  }
  const v1::ModelPlan& plan = found.plan();
  session.out << found.config().name() << ": id " << HexId(found.model_id()) << ", "
              << Bytes(plan.table_bytes()) << " on " << Counted(plan.shards(), "shard") << " x "
              << Counted(plan.sparsecores_per_shard(), "SparseCore") << " = "
              << Counted(plan.partitions(), "partition") << "\n";
  if (!found.serves().empty()) session.out << "serves checkpoint " << found.serves() << "\n";
  session.out << "\n";
  std::vector<std::vector<std::string>> lines = {TableHeadings()};
  AppendTableLines(found, &lines);
  PrintColumns(lines, session.out);
  session.out << "\n";
  PrintTraining(found.config(), session.out);
  PrintSlots(found, session.out);
  session.out << "\n";
  PrintStacks(plan, session.out);
  session.out << "\n";
  PrintFeatures(plan, session.out);
  return absl::OkStatus();
}

}  // namespace

void AddDescribe(CLI::App& app, Session& session, Command& command) {
  auto model = std::make_shared<std::string>();
  CLI::App* describe = app.add_subcommand(
      "describe",
      "A declared model: its tables, optimizers, slots, initializers, stacks and features; for its "
      "memory see plan");
  describe->add_option("MODEL", *model, "Name of the model")->required();
  SetExample(describe, "emberctl describe my_model");
  describe->callback([model, &session, &command] {
    command = [model, &session] { return Describe(session, *model); };
  });
}

}  // namespace emberd::emberctl
