// SGD and Momentum.
#include <variant>

#include "shard/update/update_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/optimizers/descent.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/update/update_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {

template <>
struct Formula<SgdRule> : ColumnFormula {
  static constexpr int kSlots = 0;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const SgdRule& rule, V g, V& w, V*) {
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), g));
  }
};

template <>
struct Formula<MomentumRule> : ColumnFormula {
  static constexpr int kSlots = 1;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const MomentumRule& rule, V g, V& w, V* slots) {
    const V momentum = hn::Set(d, rule.momentum);
    V& m = slots[0];
    m = hn::Add(hn::Mul(momentum, m), g);
    const V change = rule.nesterov ? hn::Add(hn::Mul(momentum, m), g) : m;
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), change));
  }
};

}  // namespace

UpdateCounts UpdateByDescentTarget(const UpdateArgs& args, const StepRule& step) {
  if (const auto* rule = std::get_if<MomentumRule>(&step.rule))
    return RunUpdateLoop(args, step.common, *rule);
  return RunUpdateLoop(args, step.common, std::get<SgdRule>(step.rule));
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(UpdateByDescentTarget);
UpdateCounts UpdateByDescent(const UpdateArgs& args, const StepRule& rule) {
  return HWY_DYNAMIC_DISPATCH(UpdateByDescentTarget)(args, rule);
}
}  // namespace emberd::shard
#endif
