// FTRL, in both forms.
#include <variant>

#include "shard/update/update_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/optimizers/ftrl.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/update/update_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {

template <>
struct Formula<FtrlRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const FtrlRule& rule, V g, V& w, V* slots) {
    V& a = slots[0];
    V& linear = slots[1];
    const V rate = hn::Set(d, rule.learning_rate);
    const V beta = hn::Set(d, rule.beta);
    const V old_power = Power(d, a, rule.power);
    a = hn::Add(a, hn::Mul(g, g));
    const V power = Power(d, a, rule.power);
    const V pull = hn::Mul(hn::Sub(power, old_power), w);
    float bound = rule.l1;
    V denominator;
    if (rule.multiply_linear) {
      linear = hn::Add(linear, hn::Sub(hn::Mul(rate, g), pull));
      bound *= rule.learning_rate;
      const float ridge = 2 * rule.learning_rate * rule.l2;
      denominator = hn::Add(hn::Add(power, hn::Set(d, ridge)), beta);
    } else {
      linear = hn::Add(linear, hn::Sub(g, hn::Div(pull, rate)));
      denominator = hn::Add(hn::Div(hn::Add(power, beta), rate), hn::Set(d, 2 * rule.l2));
    }
    w = DivOrZero(d, hn::Sub(Clamp(d, linear, -bound, bound), linear), denominator);
  }
};

}  // namespace

UpdateCounts UpdateByFtrlTarget(const UpdateArgs& args, const StepRule& step) {
  return RunUpdateLoop(args, step.common, std::get<FtrlRule>(step.rule));
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(UpdateByFtrlTarget);
UpdateCounts UpdateByFtrl(const UpdateArgs& args, const StepRule& rule) {
  return HWY_DYNAMIC_DISPATCH(UpdateByFtrlTarget)(args, rule);
}
}  // namespace emberd::shard
#endif
