#include "server/shard/part_agreement.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "shard/batch/batch.h"
#include "shard/store/model.h"
#include "shard/update/apply_check.h"

namespace emberd::server {
namespace {

const shard::StackEntries* FindEntries(const shard::ApplyPart& part, int stack) {
  for (const shard::StackEntries& entries : part.batch->stacks()) {
    if (entries.stack == stack) return &entries;
  }
  return nullptr;
}

absl::Status CheckStep(absl::Span<const shard::ApplyPart> held, int rank,
                       const shard::ApplyPart& part) {
  for (size_t other = 0; other < held.size(); ++other) {
    if (held[other].batch == nullptr) continue;
    if (held[other].input.step == part.input.step) return absl::OkStatus();
    return shard::RanksDisagree(rank, "step", absl::StrCat(part.input.step), other,
                                absl::StrCat(held[other].input.step));
  }
  return absl::OkStatus();
}

absl::Status CheckFeatures(absl::Span<const shard::ApplyPart> held, int rank,
                           const shard::StackEntries& entries, const std::string& stack_name) {
  for (size_t other = 0; other < held.size(); ++other) {
    if (held[other].batch == nullptr) continue;
    const shard::StackEntries* const theirs = FindEntries(held[other], entries.stack);
    if (theirs == nullptr) continue;
    if (theirs->feature_offsets.size() == entries.feature_offsets.size()) break;
    return shard::RanksDisagree(rank, absl::StrCat("the number of features of stack ", stack_name),
                                absl::StrCat(entries.feature_offsets.size() - 1), other,
                                absl::StrCat(theirs->feature_offsets.size() - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckHyperparameters(absl::Span<const shard::ApplyPart> held, int rank,
                                  const shard::StackGradients& gradients,
                                  const std::string& stack_name) {
  for (size_t other = 0; other < held.size(); ++other) {
    if (held[other].batch == nullptr) continue;
    const shard::StackGradients* const theirs =
        shard::FindGradients(held[other].input, gradients.stack);
    if (theirs == nullptr) continue;
    const shard::HyperparameterDifference difference =
        shard::FindDifference(gradients.hyperparameters, theirs->hyperparameters);
    if (difference.name.empty()) break;
    return shard::RanksDisagree(
        rank, absl::StrCat("hyperparameter ", difference.name, " of stack ", stack_name),
        difference.value, other, difference.other);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAgreement(absl::Span<const shard::ApplyPart> held, int rank,
                            const shard::ApplyPart& part) {
  const std::shared_ptr<shard::Model> model = part.batch->model();
  if (model == nullptr) return shard::ModelDropped();
  const auto name = [&](int stack) -> const std::string& {
    return model->stack(stack).spec().name;
  };
  if (absl::Status status = CheckStep(held, rank, part); !status.ok()) return status;
  for (const shard::StackEntries& entries : part.batch->stacks()) {
    absl::Status status = CheckFeatures(held, rank, entries, name(entries.stack));
    if (!status.ok()) return status;
  }
  for (const shard::StackGradients& gradients : part.input.stacks) {
    absl::Status status = CheckHyperparameters(held, rank, gradients, name(gradients.stack));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace emberd::server
