#include "server/shard_host/part_agreement.h"

#include <memory>
#include <set>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "shard/apply_check.h"
#include "shard/batch.h"
#include "shard/model.h"

namespace emberd::server {
namespace {

using Values = absl::flat_hash_map<std::string, double>;

absl::Status Disagree(int rank, absl::string_view what, absl::string_view value, size_t other,
                      absl::string_view other_value) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": ", what, " is ", value, ", but ",
                                                 other_value, " for rank ", other));
}

std::string ValueText(const Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? "not given" : absl::StrFormat("%.9g", found->second);
}

// The first name, in the order of the alphabet, whose values differ.
std::string FirstDifference(const Values& a, const Values& b) {
  std::set<std::string> names;
  for (const auto& [name, value] : a) names.insert(name);
  for (const auto& [name, value] : b) names.insert(name);
  for (const std::string& name : names) {
    const auto in_a = a.find(name);
    const auto in_b = b.find(name);
    if (in_a == a.end() || in_b == b.end() || in_a->second != in_b->second) return name;
  }
  return "";
}

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
    return Disagree(rank, "step", absl::StrCat(part.input.step), other,
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
    return Disagree(rank, absl::StrCat("the number of features of stack ", stack_name),
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
    const Values& values = gradients.hyperparameters;
    if (theirs->hyperparameters == values) break;
    const std::string name = FirstDifference(theirs->hyperparameters, values);
    return Disagree(rank, absl::StrCat("hyperparameter ", name, " of stack ", stack_name),
                    ValueText(values, name), other, ValueText(theirs->hyperparameters, name));
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
