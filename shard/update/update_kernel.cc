#include "shard/update/update_kernel.h"

#include <variant>

namespace emberd::shard {
namespace {

using Update = UpdateCounts (*)(const UpdateArgs&, const StepRule&);

struct FamilyOf {
  Update operator()(const SgdRule&) const { return UpdateByDescent; }
  Update operator()(const MomentumRule&) const { return UpdateByDescent; }
  Update operator()(const AdagradRule&) const { return UpdateByAdagrad; }
  Update operator()(const RowwiseAdagradRule&) const { return UpdateByAdagrad; }
  Update operator()(const AdagradMomentumRule&) const { return UpdateByAdagrad; }
  Update operator()(const F2aRule&) const { return UpdateByAdagrad; }
  Update operator()(const AdamRule&) const { return UpdateByAdam; }
  Update operator()(const LaPropRule&) const { return UpdateByAdam; }
  Update operator()(const RmsPropRule&) const { return UpdateByAdam; }
  Update operator()(const FtrlRule&) const { return UpdateByFtrl; }
};

}  // namespace

UpdateCounts UpdateRows(const UpdateArgs& args, const StepRule& rule) {
  return std::visit(FamilyOf(), rule.rule)(args, rule);
}

}  // namespace emberd::shard
