#include "client/demo/solo_group.h"

#include <cstdio>

#include "absl/time/clock.h"

namespace emberd::demo {

namespace {
constexpr int64_t kMetricsWindow = 32'768;
constexpr absl::Duration kPrintEvery = absl::Seconds(5);
}  // namespace

SoloGroup::SoloGroup() : metrics_(kMetricsWindow), start_(absl::Now()), last_print_(start_) {}

absl::StatusOr<GradientSum> SoloGroup::Reduce(const Contribution& contribution) {
  metrics_.Add(contribution.logits, contribution.labels);
  examples_ += contribution.examples;
  return GradientSum{contribution.examples, contribution.gradient};
}

absl::Status SoloGroup::Finish(const RoundReport&) {
  if (absl::Now() - last_print_ < kPrintEvery) return absl::OkStatus();
  last_print_ = absl::Now();
  Print();
  return absl::OkStatus();
}

void SoloGroup::Report(const std::string& message) {
  std::fprintf(stderr, "trainer %s\n", message.c_str());
}

void SoloGroup::Print() const {
  std::printf(
      "%lld examples, %.0f examples/s, loss %.4f, AUC %.4f (of the latest, before learning from "
      "them)\n",
      static_cast<long long>(examples_),
      static_cast<double>(examples_) / absl::ToDoubleSeconds(absl::Now() - start_),
      metrics_.log_loss(), metrics_.auc());
  std::fflush(stdout);
}

}  // namespace emberd::demo
