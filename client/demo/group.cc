#include "client/demo/group.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace emberd::demo {

namespace {
void AddAll(const std::vector<float>& values, Packer* packer) {
  packer->Add(values.data(), static_cast<int64_t>(values.size()));
}
}  // namespace

std::string Encode(const Contribution& contribution) {
  Packer packer;
  packer.Add(contribution.round).Add(contribution.examples);
  AddAll(contribution.gradient, &packer);
  AddAll(contribution.logits, &packer);
  AddAll(contribution.labels, &packer);
  return packer.bytes();
}

bool Decode(std::string_view bytes, Contribution* contribution) {
  return Unpacker(bytes)
      .Take(&contribution->round)
      .Take(&contribution->examples)
      .Take(&contribution->gradient)
      .Take(&contribution->logits)
      .Take(&contribution->labels)
      .Done();
}

std::string Encode(const GradientSum& sum) {
  Packer packer;
  packer.Add(sum.examples);
  AddAll(sum.gradient, &packer);
  return packer.bytes();
}

bool Decode(std::string_view bytes, GradientSum* sum) {
  return Unpacker(bytes).Take(&sum->examples).Take(&sum->gradient).Done();
}

std::string Encode(const RoundReport& report) {
  return Packer()
      .Add(report.rows_updated)
      .Add(report.minibatches)
      .Add(report.lookup_seconds)
      .Add(report.dense_seconds)
      .Add(report.apply_seconds)
      .bytes();
}

bool Decode(std::string_view bytes, RoundReport* report) {
  return Unpacker(bytes)
      .Take(&report->rows_updated)
      .Take(&report->minibatches)
      .Take(&report->lookup_seconds)
      .Take(&report->dense_seconds)
      .Take(&report->apply_seconds)
      .Done();
}

absl::StatusOr<std::string> SocketGroup::Expect(uint32_t kind) {
  absl::StatusOr<Frame> frame = reader_.Receive();
  if (!frame.ok()) return frame.status();
  if (frame->kind == kind) return std::move(frame->payload);
  return absl::InternalError(absl::StrCat("frame of kind ", frame->kind, " instead of ", kind));
}

absl::StatusOr<GradientSum> SocketGroup::Reduce(const Contribution& contribution) {
  if (auto s = SendFrame(socket_, kContribution, Encode(contribution)); !s.ok()) return s;
  const absl::StatusOr<std::string> answer = Expect(kSum);
  if (!answer.ok()) return answer.status();
  GradientSum sum;
  if (!Decode(*answer, &sum)) return absl::InternalError("malformed sum of gradients");
  return sum;
}

absl::Status SocketGroup::AwaitTurn() { return Expect(kTurn).status(); }

absl::Status SocketGroup::Finish(const RoundReport& report) {
  if (auto s = SendFrame(socket_, kApplied, Encode(report)); !s.ok()) return s;
  return Expect(kNextRound).status();
}

void SocketGroup::Report(const std::string& message) {
  // If nobody listens any more, the next call of the round says so.
  SendFrame(socket_, kReport, message).IgnoreError();
}

}  // namespace emberd::demo
