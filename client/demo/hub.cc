#include "client/demo/hub.h"

#include <algorithm>
#include <utility>

namespace emberd::demo {

Hub::Hub(std::vector<int> sockets, Events events) : events_(std::move(events)) {
  for (int socket : sockets) members_.emplace_back(socket);
}

int Hub::live() const {
  return static_cast<int>(
      std::count_if(members_.begin(), members_.end(), [](const Member& m) { return !m.gone; }));
}

void Hub::OnReadable(int rank) {
  Member& member = members_[rank];
  if (member.gone) return;
  const bool open = member.reader.Poll().ok();
  while (!member.gone) {
    const std::optional<Frame> frame = member.reader.Next();
    if (!frame) break;
    Handle(rank, *frame);
  }
  if (!open) Drop(rank);
  Advance();
}

void Hub::Handle(int rank, const Frame& frame) {
  Member& member = members_[rank];
  if (frame.kind == kReport) {
    events_.on_report(rank, frame.payload);
  } else if (frame.kind == kContribution && !summed_ &&
             Decode(frame.payload, &member.contribution)) {
    member.contributed = true;
  } else if (frame.kind == kApplied && turn_ == rank && Decode(frame.payload, &member.report)) {
    member.applied = true;
    turn_ = -1;
  } else {
    events_.on_report(rank, "sent a message out of turn");
    Drop(rank);
  }
}

void Hub::Drop(int rank) {
  if (members_[rank].gone) return;
  members_[rank].gone = true;
  if (turn_ == rank) turn_ = -1;
  events_.on_gone(rank);
}

void Hub::Send(int rank, uint32_t kind, const std::string& payload) {
  if (!members_[rank].gone && !SendFrame(members_[rank].socket, kind, payload).ok()) Drop(rank);
}

// Goes on as far as it can without another message.
void Hub::Advance() {
  if (live() == 0) return;
  if (!summed_) {
    if (!std::all_of(members_.begin(), members_.end(),
                     [](const Member& m) { return m.gone || m.contributed; })) {
      return;
    }
    Sum();
  }
  if (turn_ < 0 && !GiveTurn() && live() > 0) EndRound();
}

void Hub::Sum() {
  std::vector<Contribution> contributions;
  GradientSum sum;
  for (Member& member : members_) {
    if (member.gone) continue;
    const Contribution& contribution = member.contribution;
    sum.examples += contribution.examples;
    sum.gradient.resize(std::max(sum.gradient.size(), contribution.gradient.size()));
    for (size_t i = 0; i < contribution.gradient.size(); ++i) {
      sum.gradient[i] += contribution.gradient[i];
    }
    round_ = contribution.round;
    contributions.push_back(std::move(member.contribution));
  }
  summed_ = true;
  events_.on_sum(contributions, sum);
  const std::string payload = Encode(sum);
  for (int rank = 0; rank < size(); ++rank) Send(rank, kSum, payload);
}

// False if all have had their turn.
bool Hub::GiveTurn() {
  for (int rank = 0; rank < size(); ++rank) {
    if (members_[rank].gone || members_[rank].applied) continue;
    turn_ = rank;
    Send(rank, kTurn, "");
    if (turn_ == rank) return true;
  }
  return false;
}

void Hub::EndRound() {
  std::vector<RoundReport> reports;
  for (const Member& member : members_) {
    if (member.applied) reports.push_back(member.report);
  }
  events_.on_round(round_, reports);
  summed_ = false;
  for (Member& member : members_) member.contributed = member.applied = false;
  for (int rank = 0; rank < size(); ++rank) Send(rank, kNextRound, "");
}

}  // namespace emberd::demo
