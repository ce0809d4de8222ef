#include "base/region_server.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/local_socket.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

using regions::kTicketBytes;

// A peer that asks for more tickets than it uses costs the oldest of them.
constexpr size_t kMaxTickets = 256;
constexpr int kBacklog = 64;

// Nobody can guess it, so to know it is to have been given the region. Never 0.
uint64_t NewRegionName() {
  uint64_t name = 0;
  while (name == 0) std::memcpy(&name, RandomBytes(sizeof(name)).data(), sizeof(name));
  return name;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RegionServer>> RegionServer::Start(Options options) {
  std::unique_ptr<RegionServer> server(new RegionServer(std::move(options)));
  RETURN_IF_ERROR(server->Listen());
  server->thread_ = std::thread([raw = server.get()] { raw->Serve(); });
  return server;
}

absl::Status RegionServer::Listen() {
  const auto failed = [] {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for peers on this machine: ", strerror(errno)));
  };
  socket_name_ =
      absl::StrCat(options_.name, "/", absl::BytesToHexString(RandomBytes(kTicketBytes)));
  const regions::AbstractAddress address(socket_name_);
  listener_ = FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  if (!address.fits() || listener_.get() < 0 || wake_.get() < 0 ||
      bind(listener_.get(), address.get(), address.length) != 0 ||
      listen(listener_.get(), kBacklog) != 0) {
    return failed();
  }
  return absl::OkStatus();
}

RegionServer::~RegionServer() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
}

RegionServer::Invitation RegionServer::Invite() {
  Invitation invitation{socket_name_, RandomBytes(kTicketBytes)};
  MutexLock lock(&mutex_);
  if (tickets_.size() == kMaxTickets) tickets_.pop_front();
  tickets_.push_back({invitation.ticket, SteadyNow() + options_.ticket_life});
  return invitation;
}

absl::StatusOr<std::shared_ptr<char>> RegionServer::Find(uint64_t region, uint64_t offset,
                                                         uint64_t bytes) const {
  const std::shared_ptr<SharedRegion> found = Region(region);
  if (found == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no shared region ", absl::Hex(region, absl::kZeroPad16),
                     "; ask for new ones, or send the data in the message"));
  }
  if (!found->Holds(offset, bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("offset ", offset, " and size ", bytes, " are not inside shared region ",
                     absl::Hex(region, absl::kZeroPad16), " of ", found->size(), " bytes"));
  }
  return std::shared_ptr<char>(found, found->data() + offset);
}

std::shared_ptr<SharedRegion> RegionServer::Region(uint64_t region) const {
  MutexLock lock(&mutex_);
  const auto held = regions_.find(region);
  return held == regions_.end() ? nullptr : held->second.region;
}

int RegionServer::peers() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(peers_.size());
}

int RegionServer::regions() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(regions_.size());
}

void RegionServer::Serve() {
  std::vector<pollfd> watched;
  while (true) {
    watched.assign({{wake_.get(), POLLIN, 0}});
    int timeout_ms = -1;
    {
      MutexLock lock(&mutex_);
      if (SendStrangersAway()) timeout_ms = 1000;
      // More have to wait in the backlog, where they cost nothing.
      const bool full = Full();
      watched.push_back({full ? -1 : listener_.get(), POLLIN, 0});
      for (const auto& [socket, peer] : peers_) watched.push_back({socket, POLLIN, 0});
    }
    if (poll(watched.data(), watched.size(), timeout_ms) < 0) continue;
    if (watched[0].revents != 0) return;
    FileDescriptor arrival;
    if (watched[1].revents != 0) arrival = AcceptLocal(listener_.get(), options_.any_user);
    {
      MutexLock lock(&mutex_);
      for (size_t i = 2; i < watched.size(); ++i) {
        if (watched[i].revents == 0) continue;
        const auto found = peers_.find(watched[i].fd);
        if (!Answer(found->first, &found->second)) Forget(watched[i].fd);
      }
      const int socket = arrival.get();
      if (socket >= 0) peers_[socket] = {.socket = std::move(arrival), .since = SteadyNow()};
    }
    forgotten_.clear();
  }
}

bool RegionServer::SendStrangersAway() {
  const absl::Time latest = SteadyNow() - kStrangerPatience;
  std::vector<std::pair<absl::Time, int>> strangers;
  for (const auto& [socket, peer] : peers_) {
    if (!peer.invited) strangers.emplace_back(peer.since, socket);
  }
  std::sort(strangers.begin(), strangers.end());
  const size_t most = Full() ? 0 : kMaxStrangers;
  size_t gone = 0;
  while (gone < strangers.size() &&
         (strangers.size() - gone > most || strangers[gone].first < latest)) {
    peers_.erase(strangers[gone++].second);
  }
  return gone < strangers.size();
}

bool RegionServer::Answer(int socket, Peer* peer) {
  FileDescriptor file;
  const std::optional<regions::Request> request = regions::ReceiveRequest(socket, &file);
  if (!request.has_value()) return false;  // gone, or no peer of ours
  if (!peer->invited) {
    std::optional<std::string> ticket;
    if (request->kind == regions::kHello) ticket = TakeTicket(request->half_ticket);
    if (!ticket.has_value()) return false;
    peer->invited = true;
    const regions::Answer answer = {.half_ticket = regions::SecondHalf(*ticket)};
    return regions::SendPacket(socket, answer, MSG_DONTWAIT);
  }
  if (request->kind == regions::kTake) return Give(socket, peer, request->bytes);
  if (request->kind == regions::kLend) return Borrow(socket, peer, *request, std::move(file));
  if (request->kind != regions::kDrop) return false;
  Drop(socket, peer, request->region);
  return true;
}

std::optional<std::string> RegionServer::TakeTicket(uint64_t half) {
  const absl::Time now = SteadyNow();
  while (!tickets_.empty() && tickets_.front().expiry < now) tickets_.pop_front();
  for (auto ticket = tickets_.begin(); ticket != tickets_.end(); ++ticket) {
    if (regions::FirstHalf(ticket->bytes) != half) continue;
    std::string found = std::move(ticket->bytes);
    tickets_.erase(ticket);
    return found;
  }
  return std::nullopt;
}

bool RegionServer::Give(int socket, Peer* peer, uint64_t bytes) {
  const uint64_t left = options_.max_bytes - std::min(options_.max_bytes, bytes_->load());
  regions::Answer answer{0, left};
  if (bytes == 0 || bytes > left || peer->regions == options_.max_regions_of_peer ||
      !MayHaveRegion()) {
    return regions::SendPacket(socket, answer, MSG_DONTWAIT);
  }
  auto region = SharedRegion::Create(options_.name.c_str(), bytes);
  if (!region.ok()) return regions::SendPacket(socket, answer, MSG_DONTWAIT);
  answer = {NewRegionName(), bytes};
  if (!regions::SendPacket(socket, answer, MSG_DONTWAIT, (*region)->descriptor())) return false;
  *bytes_ += static_cast<int64_t>(bytes);
  // It counts until the last reference goes, not until its owner does.
  SharedRegion* const raw = region->get();
  regions_[answer.region] = {
      std::shared_ptr<SharedRegion>(
          raw,
          [kept = *std::move(region), counted = bytes_, bytes](SharedRegion*) mutable {
            kept.reset();
            *counted -= static_cast<int64_t>(bytes);
          }),
      socket};
  ++peer->regions;
  return true;
}

bool RegionServer::Borrow(int socket, Peer* peer, const regions::Request& request,
                          FileDescriptor file) {
  const bool wanted = request.region != 0 && request.bytes != 0 && file.get() >= 0 &&
                      peer->lent < options_.max_lent_by_peer && MayHaveRegion() &&
                      !regions_.contains(request.region);
  absl::StatusOr<std::shared_ptr<SharedRegion>> region;
  if (wanted) region = SharedRegion::Map(std::move(file), request.bytes);
  if (!wanted || !region.ok()) return regions::SendPacket(socket, regions::Answer(), MSG_DONTWAIT);
  regions_[request.region] = {*std::move(region), socket, /*lent=*/true};
  ++peer->lent;
  return regions::SendPacket(socket, regions::Answer{request.region, request.bytes}, MSG_DONTWAIT);
}

void RegionServer::Drop(int socket, Peer* peer, uint64_t region) {
  const auto found = regions_.find(region);
  if (found == regions_.end() || found->second.owner != socket) return;
  Held& held = found->second;
  --(held.lent ? peer->lent : peer->regions);
  forgotten_.push_back(std::move(held.region));
  regions_.erase(found);
}

void RegionServer::Forget(int socket) {
  for (auto held = regions_.begin(); held != regions_.end();) {
    const auto here = held++;
    if (here->second.owner != socket) continue;
    forgotten_.push_back(std::move(here->second.region));
    regions_.erase(here);
  }
  peers_.erase(socket);
}

}  // namespace emberd
