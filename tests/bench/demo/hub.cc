#include "tests/bench/demo/hub.h"

#include <algorithm>
#include <utility>

#include "tests/bench/demo/dense_model.h"

namespace emberd::demo {

Hub::Hub(std::vector<int> sockets, Events events, const Position& start)
    : events_(std::move(events)), round_(start.round) {
  for (int socket : sockets) {
    members_.emplace_back(socket);
    Send(size() - 1, Frame::kPosition, Encode(start));
  }
}

int Hub::live() const {
  return static_cast<int>(
      std::count_if(members_.begin(), members_.end(), [](const Member& m) { return !m.gone; }));
}

void Hub::Replace(int rank, int socket) {
  members_[rank] = Member(socket);
  Send(rank, Frame::kPosition, Encode(Position{round_, summed_, events_.dense_state()}));
}

void Hub::OnReadable(int rank) {
  const int socket = members_[rank].socket;
  if (members_[rank].gone) return;
  const bool open = members_[rank].reader.Poll().ok();
  // A trainer may be replaced meanwhile: what the old one has said does not count any more.
  while (!members_[rank].gone && members_[rank].socket == socket) {
    const std::optional<Frame> frame = members_[rank].reader.Next();
    if (!frame) break;
    Handle(rank, *frame);
  }
  if (!open && members_[rank].socket == socket) Drop(rank);
  Advance();
}

void Hub::Handle(int rank, const Frame& frame) {
  Member& member = members_[rank];
  if (frame.kind == Frame::kReport) {
    events_.on_report(rank, frame.payload);
  } else if (Departure departure;
             frame.kind == Frame::kLeave && Decode(frame.payload, &departure)) {
    member.waiting = false;
    Leave(departure.generation);
  } else if (frame.kind == Frame::kContribution && !member.waiting && !summed_ &&
             Decode(frame.payload, &member.contribution) && member.contribution.round == round_) {
    Wait(rank, member.contribution.generation);
  } else if (frame.kind == Frame::kApplied && !member.waiting && summed_ &&
             Decode(frame.payload, &member.report)) {
    Wait(rank, member.report.generation);
  } else {
    events_.on_report(rank, "sent a message that nobody waits for");
    Drop(rank);
  }
}

void Hub::Wait(int rank, uint64_t generation) {
  members_[rank].waiting = true;
  members_[rank].generation = generation;
  latest_ = std::max(latest_, generation);
  if (generation != 0 && generation <= broken_) TellToJoin(rank);
}

void Hub::Leave(uint64_t generation) {
  // The other members' messages of a later generation may have come before this one.
  broken_ = std::max(broken_, generation != 0 ? generation : latest_);
  for (int rank = 0; rank < size(); ++rank) {
    const Member& member = members_[rank];
    const bool over = member.generation != 0 && member.generation <= broken_;
    if (!member.gone && member.waiting && over) TellToJoin(rank);
  }
}

void Hub::TellToJoin(int rank) {
  members_[rank].waiting = false;
  Send(rank, Frame::kJoinAnew, "");
}

void Hub::Drop(int rank) {
  if (members_[rank].gone) return;
  members_[rank].gone = true;
  Leave(0);
  events_.on_gone(rank);
}

void Hub::Send(int rank, uint32_t kind, const std::string& payload) {
  if (!members_[rank].gone && !SendFrame(members_[rank].socket, kind, payload).ok()) Drop(rank);
}

// Goes on if nobody is missing.
void Hub::Advance() {
  for (const Member& member : members_) {
    if (member.gone || !member.waiting) return;
  }
  for (Member& member : members_) member.waiting = false;
  if (summed_) {
    EndRound();
  } else {
    Sum();
  }
}

void Hub::Sum() {
  std::vector<Contribution> contributions;
  std::vector<std::vector<float>> gradients;
  GradientSum sum;
  for (Member& member : members_) {
    sum.examples += member.contribution.examples;
    gradients.push_back(std::move(member.contribution.gradient));
    contributions.push_back(std::move(member.contribution));
  }
  sum.gradient = SumByTree(std::move(gradients));
  summed_ = true;
  events_.on_sum(contributions, sum);
  const std::string payload = Encode(sum);
  for (int rank = 0; rank < size(); ++rank) Send(rank, Frame::kSum, payload);
}

void Hub::EndRound() {
  std::vector<RoundReport> reports;
  for (const Member& member : members_) reports.push_back(member.report);
  events_.on_round(round_, reports);
  summed_ = false;
  ++round_;
  for (int rank = 0; rank < size(); ++rank) Send(rank, Frame::kNextRound, "");
}

}  // namespace emberd::demo
