#include "shard/update_kernel.h"

#include <variant>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/update_kernel.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/update_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {

template <>
struct Formula<SgdRule> {
  static constexpr int kSlots = 0;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const SgdRule& rule, V g, V& w, V*) {
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), g));
  }
};

template <>
struct Formula<AdagradRule> {
  static constexpr int kSlots = 1;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const AdagradRule& rule, V g, V& w, V* slots) {
    slots[0] = hn::Add(slots[0], hn::Mul(g, g));
    w = hn::Sub(w, hn::Div(hn::Mul(hn::Set(d, rule.learning_rate), g), hn::Sqrt(slots[0])));
  }
};

}  // namespace

int64_t UpdateSgd(const UpdateArgs& args, const CommonRule& common, const SgdRule& rule) {
  return RunUpdateLoop(args, common, rule);
}
int64_t UpdateAdagrad(const UpdateArgs& args, const CommonRule& common, const AdagradRule& rule) {
  return RunUpdateLoop(args, common, rule);
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(UpdateSgd);
HWY_EXPORT(UpdateAdagrad);

namespace {
struct Dispatch {
  const UpdateArgs& args;
  const CommonRule& common;
  int64_t operator()(const SgdRule& rule) const {
    return HWY_DYNAMIC_DISPATCH(UpdateSgd)(args, common, rule);
  }
  int64_t operator()(const AdagradRule& rule) const {
    return HWY_DYNAMIC_DISPATCH(UpdateAdagrad)(args, common, rule);
  }
};
}  // namespace

int64_t UpdateRows(const UpdateArgs& args, const StepRule& rule) {
  return std::visit(Dispatch{args, rule.common}, rule.rule);
}

}  // namespace emberd::shard
#endif
