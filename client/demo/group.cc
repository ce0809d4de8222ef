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
  packer.Add(contribution.round).Add(contribution.generation).Add(contribution.examples);
  AddAll(contribution.gradient, &packer);
  AddAll(contribution.logits, &packer);
  AddAll(contribution.labels, &packer);
  return packer.bytes();
}

bool Decode(std::string_view bytes, Contribution* contribution) {
  return Unpacker(bytes)
      .Take(&contribution->round)
      .Take(&contribution->generation)
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
      .Add(report.generation)
      .Add(report.rows_updated)
      .Add(report.minibatches)
      .Add(report.dense_seconds)
      .Add(report.wait_seconds)
      .Add(report.preprocess_seconds)
      .Add(report.shard_seconds)
      .Add(report.combine_seconds)
      .Add(report.rank_seconds)
      .bytes();
}

bool Decode(std::string_view bytes, RoundReport* report) {
  return Unpacker(bytes)
      .Take(&report->generation)
      .Take(&report->rows_updated)
      .Take(&report->minibatches)
      .Take(&report->dense_seconds)
      .Take(&report->wait_seconds)
      .Take(&report->preprocess_seconds)
      .Take(&report->shard_seconds)
      .Take(&report->combine_seconds)
      .Take(&report->rank_seconds)
      .Done();
}

std::string Encode(const Position& position) {
  Packer packer;
  packer.Add(position.round).Add(position.summed);
  AddAll(position.dense_state, &packer);
  return packer.bytes();
}

bool Decode(std::string_view bytes, Position* position) {
  return Unpacker(bytes)
      .Take(&position->round)
      .Take(&position->summed)
      .Take(&position->dense_state)
      .Done();
}

absl::StatusOr<std::string> SocketGroup::Expect(uint32_t kind) {
  absl::StatusOr<Frame> frame = reader_.Receive();
  if (!frame.ok()) return frame.status();
  if (frame->kind == kind) return std::move(frame->payload);
  if (frame->kind == kJoinAnew) return absl::AbortedError("another trainer joins anew");
  return absl::InternalError(absl::StrCat("frame of kind ", frame->kind, " instead of ", kind));
}

absl::StatusOr<Position> SocketGroup::Begin() {
  const absl::StatusOr<std::string> answer = Expect(kPosition);
  if (!answer.ok()) return answer.status();
  Position position;
  if (!Decode(*answer, &position)) return absl::InternalError("malformed position");
  return position;
}

absl::StatusOr<GradientSum> SocketGroup::Reduce(const Contribution& contribution) {
  if (auto s = SendFrame(socket_, kContribution, Encode(contribution)); !s.ok()) return s;
  const absl::StatusOr<std::string> answer = Expect(kSum);
  if (!answer.ok()) return answer.status();
  GradientSum sum;
  if (!Decode(*answer, &sum)) return absl::InternalError("malformed sum of gradients");
  return sum;
}

absl::Status SocketGroup::Finish(const RoundReport& report) {
  if (auto s = SendFrame(socket_, kApplied, Encode(report)); !s.ok()) return s;
  return Expect(kNextRound).status();
}

// If nobody listens any more, the next call of the round says so.
void SocketGroup::Leave(uint64_t generation) {
  SendFrame(socket_, kLeave, Packer().Add(generation).bytes()).IgnoreError();
}

void SocketGroup::Report(const std::string& message) {
  SendFrame(socket_, kReport, message).IgnoreError();
}

}  // namespace emberd::demo
