// Adam and AdamW, LaProp, RMSProp.
#include <variant>

#include "shard/update/update_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/optimizers/adam.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/update/update_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {

template <>
struct Formula<AdamRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const AdamRule& rule, V g, V& w, V* slots) {
    V& m = slots[0];
    V& v = slots[1];
    m = hn::Add(m, hn::Mul(hn::Set(d, rule.one_minus_beta1), hn::Sub(g, m)));
    v = hn::Add(v, hn::Mul(hn::Set(d, rule.one_minus_beta2), hn::Sub(hn::Mul(g, g), v)));
    const V epsilon = hn::Set(d, rule.epsilon);
    const V root =
        rule.sum_inside_sqrt ? hn::Sqrt(hn::Add(v, epsilon)) : hn::Add(hn::Sqrt(v), epsilon);
    const V change = DivOrZero(d, hn::Mul(hn::Set(d, rule.rate), m), root);
    w = hn::Sub(hn::Mul(hn::Set(d, rule.keep), w), change);
  }
};

template <>
struct Formula<LaPropRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const LaPropRule& rule, V g, V& w, V* slots) {
    V& mu = slots[0];
    V& nu = slots[1];
    const V square = hn::Add(hn::Mul(g, g), hn::Set(d, rule.epsilon));
    nu = hn::Add(hn::Mul(hn::Set(d, rule.decay), nu),
                 hn::Mul(hn::Set(d, rule.one_minus_decay), square));
    const V scaled = DivOrZero(d, hn::Mul(hn::Set(d, rule.gradient_factor), g), hn::Sqrt(nu));
    mu = hn::Add(hn::Mul(hn::Set(d, rule.beta1), mu), scaled);
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), mu));
  }
};

template <>
struct Formula<RmsPropRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const RmsPropRule& rule, V g, V& w, V* slots) {
    V& v = slots[0];
    V& m = slots[1];
    v = hn::Add(v, hn::Mul(hn::Set(d, rule.one_minus_decay), hn::Sub(hn::Mul(g, g), v)));
    const V root = hn::Sqrt(hn::Add(v, hn::Set(d, rule.epsilon)));
    m = hn::Add(hn::Mul(hn::Set(d, rule.momentum), m),
                DivOrZero(d, hn::Mul(hn::Set(d, rule.learning_rate), g), root));
    w = hn::Sub(w, m);
  }
};

}  // namespace

UpdateCounts UpdateByAdamTarget(const UpdateArgs& args, const StepRule& step) {
  if (const auto* rule = std::get_if<AdamRule>(&step.rule))
    return RunUpdateLoop(args, step.common, *rule);
  if (const auto* rule = std::get_if<LaPropRule>(&step.rule))
    return RunUpdateLoop(args, step.common, *rule);
  return RunUpdateLoop(args, step.common, std::get<RmsPropRule>(step.rule));
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(UpdateByAdamTarget);
UpdateCounts UpdateByAdam(const UpdateArgs& args, const StepRule& rule) {
  return HWY_DYNAMIC_DISPATCH(UpdateByAdamTarget)(args, rule);
}
}  // namespace emberd::shard
#endif
