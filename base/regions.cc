#include "base/regions.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

absl::Status NoMemory(absl::string_view what, size_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot ", what, " ", bytes, " bytes of shared memory: ", strerror(errno)));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Create(const char* name, size_t bytes) {
  FileDescriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return NoMemory("create", bytes);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return NoMemory("make", bytes);
  if (fcntl(file.get(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) return NoMemory("seal", bytes);
  return MapFile(std::move(file), bytes);
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Map(FileDescriptor file, size_t bytes) {
  // First: until it is sealed, the size could be another one in a moment.
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return absl::InvalidArgumentError("shared memory is not sealed: its size could change");
  }
  struct stat found = {};
  if (fstat(file.get(), &found) != 0 || found.st_size != static_cast<off_t>(bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared memory has ", found.st_size, " bytes; it must have ", bytes));
  }
  return MapFile(std::move(file), bytes);
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::MapFile(FileDescriptor file,
                                                                    size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return NoMemory("map", bytes);
  // Advice only: most kernels give huge pages to such memory only where they are told to.
  madvise(data, bytes, MADV_HUGEPAGE);
  return std::shared_ptr<SharedRegion>(
      new SharedRegion(std::move(file), static_cast<char*>(data), bytes));
}

bool SharedRegion::KeepFromOthers(uint64_t offset, uint64_t bytes) {
  return mmap(data_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file_.get(),
              static_cast<off_t>(offset)) != MAP_FAILED;
}

SharedRegion::~SharedRegion() { munmap(data_, size_); }

namespace regions {

template <typename Packet>
bool SendPacket(int socket, const Packet& packet, int flags, int file) {
  iovec bytes = {const_cast<Packet*>(&packet), sizeof(packet)};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof(file));
  }
  return sendmsg(socket, &message, flags | MSG_NOSIGNAL) == sizeof(packet);
}
template bool SendPacket(int socket, const Request& packet, int flags, int file);
template bool SendPacket(int socket, const Answer& packet, int flags, int file);

namespace {

// A packet of exactly this type, and the file that came with it.
template <typename Packet>
std::optional<Packet> ReceivePacket(int socket, int flags, FileDescriptor* file) {
  Packet packet;
  iovec bytes = {&packet, sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  // Not the padding behind it, where a second file would find room. The kernel closes those that
  // have none, and says so.
  message.msg_controllen = CMSG_LEN(sizeof(int));
  const ssize_t size = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (size > 0 && header != nullptr && header->cmsg_level == SOL_SOCKET &&
      header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    *file = FileDescriptor(received);
  }
  const bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if (size != sizeof(packet) || cut) return std::nullopt;
  return packet;
}

}  // namespace

std::optional<Request> ReceiveRequest(int socket, FileDescriptor* file) {
  return ReceivePacket<Request>(socket, MSG_DONTWAIT, file);
}

std::optional<Answer> ReceiveAnswer(int socket, FileDescriptor* file) {
  return ReceivePacket<Answer>(socket, 0, file);
}

}  // namespace regions

// ---- The end that owns regions

class RegionServer::Peer final : public LocalGuest {
 public:
  Peer(RegionServer* server, FileDescriptor socket) : server_(server), socket_(std::move(socket)) {
    server_->peers_.fetch_add(1);
  }
  ~Peer() override {
    server_->Forget(this);
    server_->peers_.fetch_sub(1);
  }
  int socket() const override { return socket_.get(); }
  short events() const override { return POLLIN; }
  void OnEvent() override { over_ = !server_->Answer(this); }
  bool over() const override { return over_; }

  int regions = 0;
  int lent = 0;

 private:
  RegionServer* const server_;
  const FileDescriptor socket_;
  bool over_ = false;
};

std::unique_ptr<LocalGuest> RegionServer::Enter(FileDescriptor socket, LocalPeer, LocalServer*) {
  if (peers_.load() >= options_.max_peers) return nullptr;
  return std::make_unique<Peer>(this, std::move(socket));
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
  absl::MutexLock lock(&mutex_);
  const auto held = regions_.find(region);
  return held == regions_.end() ? nullptr : held->second.region;
}

int RegionServer::regions() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(regions_.size());
}

bool RegionServer::Answer(Peer* peer) {
  FileDescriptor file;
  const std::optional<regions::Request> request = regions::ReceiveRequest(peer->socket(), &file);
  if (!request.has_value()) return false;  // gone, or no peer of ours
  std::shared_ptr<SharedRegion> given;
  regions::Answer answer;
  switch (request->kind) {
    case regions::kTake:
      answer = Give(peer, request->bytes, &given);
      break;
    case regions::kLend:
      answer = Borrow(peer, *request, std::move(file));
      break;
    case regions::kDrop:
      Drop(peer, request->region);
      return true;
    default:
      return false;
  }
  return regions::SendPacket(peer->socket(), answer, MSG_DONTWAIT,
                             given == nullptr ? -1 : given->descriptor());
}

regions::Answer RegionServer::Give(Peer* peer, uint64_t bytes,
                                   std::shared_ptr<SharedRegion>* given) {
  const uint64_t left = options_.max_bytes - std::min(options_.max_bytes, bytes_->load());
  absl::MutexLock lock(&mutex_);
  if (bytes == 0 || bytes > left || peer->regions == options_.max_regions_of_peer ||
      !MayHaveRegion()) {
    return {0, left};
  }
  auto region = SharedRegion::Create(options_.name.c_str(), bytes);
  // Nobody can guess it, so to know it is to have been given the region.
  uint64_t name = 0;
  RandomBytes(sizeof(name)).value_or("").copy(reinterpret_cast<char*>(&name), sizeof(name));
  if (!region.ok() || name == 0) return {0, left};
  *bytes_ += static_cast<int64_t>(bytes);
  // It counts until the last reference goes, not until its owner does.
  SharedRegion* const raw = region->get();
  given->reset(raw, [kept = *std::move(region), counted = bytes_, bytes](SharedRegion*) mutable {
    kept.reset();
    *counted -= static_cast<int64_t>(bytes);
  });
  regions_[name] = {*given, peer};
  ++peer->regions;
  return {name, bytes};
}

regions::Answer RegionServer::Borrow(Peer* peer, const regions::Request& request,
                                     FileDescriptor file) {
  absl::MutexLock lock(&mutex_);
  if (request.region == 0 || request.bytes == 0 || file.get() < 0 ||
      peer->lent >= options_.max_lent_by_peer || !MayHaveRegion() ||
      regions_.contains(request.region)) {
    return {};
  }
  auto region = SharedRegion::Map(std::move(file), request.bytes);
  if (!region.ok()) return {};
  regions_[request.region] = {*std::move(region), peer, /*lent=*/true};
  ++peer->lent;
  return {request.region, request.bytes};
}

void RegionServer::Drop(Peer* peer, uint64_t region) {
  std::shared_ptr<SharedRegion> dropped;  // unmapped while nobody waits for the mutex
  absl::MutexLock lock(&mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end() || found->second.owner != peer) return;
  --(found->second.lent ? peer->lent : peer->regions);
  dropped = std::move(found->second.region);
  regions_.erase(found);
}

void RegionServer::Forget(Peer* peer) {
  std::vector<std::shared_ptr<SharedRegion>> forgotten;  // as in Drop
  absl::MutexLock lock(&mutex_);
  absl::erase_if(regions_, [&](auto& held) {
    if (held.second.owner != peer) return false;
    forgotten.push_back(std::move(held.second.region));
    return true;
  });
}

// ---- The end that divides them

namespace {

constexpr size_t kPage = 4096;
// Room for a few blocks of a large batch, so that there are few regions.
constexpr size_t kRegionBytes = size_t{64} << 20;

// A server on another machine stays there, so that it is asked less and less often. But one that is
// being restarted may fail in any way, and share in the next moment.
constexpr absl::Duration kFirstPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestPause = absl::Seconds(30);

}  // namespace

absl::StatusOr<std::shared_ptr<SharedArena>> SharedArena::Connect(const std::string& socket,
                                                                  const std::string& ticket,
                                                                  absl::Time deadline,
                                                                  absl::Duration patience) {
  ASSIGN_OR_RETURN(FileDescriptor connection,
                   ConnectLocal({socket, ticket}, LocalKind::kMemory,
                                std::min(deadline, SteadyNow() + patience)));
  return std::shared_ptr<SharedArena>(new SharedArena(std::move(connection), patience));
}

bool SharedArena::alive() const {
  // That there is something to read means no more than that another thread is being answered.
  pollfd watched = {socket_.get(), POLLRDHUP, 0};
  return !silent_ && poll(&watched, 1, 0) == 0;
}

int SharedArena::regions() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(regions_.size());
}

std::shared_ptr<SharedBlock> SharedArena::Take(size_t bytes, absl::Time deadline) {
  bytes = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<SharedBlock> block;
  while ((block = TakeFree(bytes)) == nullptr && asking_) {  // the answer may be enough for both
    if (!WaitSteadily(&asked_, &mutex_, deadline)) return nullptr;
  }
  if (block != nullptr) return block;
  if (AddRegion(std::max(bytes, kRegionBytes), deadline) || AddRegion(bytes, deadline)) {
    return TakeFree(bytes);
  }
  // Batches may have grown: what was enough for earlier ones is in the way of larger regions.
  for (size_t i = regions_.size(); i-- > 0;) {
    if (regions_[i]->blocks == 0) Remove(regions_[i].get());
  }
  return AddRegion(bytes, deadline) ? TakeFree(bytes) : nullptr;
}

std::shared_ptr<SharedBlock> SharedArena::TakeFree(size_t bytes) {
  // The first that fits: memory that was used before is mapped, and maybe still in a cache.
  for (const auto& region : regions_) {
    if (region->retired) continue;
    for (auto hole = region->free.begin(); hole != region->free.end(); ++hole) {
      const auto [offset, size] = *hole;
      if (size < bytes) continue;
      region->free.erase(hole);
      if (size > bytes) region->free[offset + bytes] = size - bytes;
      ++region->blocks;
      return std::make_shared<SharedBlock>(shared_from_this(), region.get(), offset, bytes);
    }
  }
  return nullptr;
}

std::optional<regions::Answer> SharedArena::Ask(const regions::Request& request, int lent,
                                                absl::Time deadline, FileDescriptor* given) {
  while (asking_ && WaitSteadily(&asked_, &mutex_, deadline)) {
  }
  // A late answer must not be taken for that to another request.
  if (asking_ || silent_ || SteadyNow() >= deadline ||
      !regions::SendPacket(socket_.get(), request, MSG_DONTWAIT, lent)) {
    return std::nullopt;
  }
  asking_ = true;
  mutex_.Unlock();
  std::optional<regions::Answer> answer;
  if (AwaitReadable(socket_.get(), std::min(deadline, SteadyNow() + patience_))) {
    answer = regions::ReceiveAnswer(socket_.get(), given);
  }
  silent_ = !answer.has_value();
  mutex_.Lock();
  asking_ = false;
  asked_.SignalAll();
  return answer;
}

bool SharedArena::LendRegion(uint64_t name, const SharedRegion& region, absl::Time deadline) {
  regions::Request request;
  request.kind = regions::kLend;
  request.region = name;
  request.bytes = region.size();
  FileDescriptor none;
  absl::MutexLock lock(&mutex_);
  const std::optional<regions::Answer> answer = Ask(request, region.descriptor(), deadline, &none);
  return answer.has_value() && answer->region != 0 && answer->region == name;
}

void SharedArena::TakeBack(uint64_t name) {
  absl::MutexLock lock(&mutex_);
  SendDrop(name);
}

// If it cannot be sent, the server is gone, and the region with it; or it is stopped, and keeps the
// region as long as the connection lasts.
void SharedArena::SendDrop(uint64_t name) {
  regions::Request request;
  request.kind = regions::kDrop;
  request.region = name;
  (void)regions::SendPacket(socket_.get(), request, MSG_DONTWAIT);
}

bool SharedArena::AddRegion(size_t bytes, absl::Time deadline) {
  regions::Request request;
  request.kind = regions::kTake;
  request.bytes = bytes;
  FileDescriptor file;
  const std::optional<regions::Answer> answer = Ask(request, /*lent=*/-1, deadline, &file);
  if (!answer.has_value() || answer->region == 0 || answer->bytes != bytes) return false;
  auto memory = SharedRegion::Map(std::move(file), bytes);
  if (!memory.ok()) {
    SendDrop(answer->region);  // or the server would keep it for us, and count it
    return false;
  }
  auto region = std::make_unique<Region>();
  region->name = answer->region;
  region->memory = *std::move(memory);
  region->free[0] = bytes;
  regions_.push_back(std::move(region));
  return true;
}

void SharedArena::Return(Region* region, size_t offset, size_t bytes, bool reusable) {
  absl::MutexLock lock(&mutex_);
  --region->blocks;
  region->retired |= !reusable;
  if (region->retired) {
    if (region->blocks == 0) Remove(region);
    return;
  }
  if (asking_) asked_.SignalAll();  // whoever waits for the answer may have enough now
  auto next = region->free.upper_bound(offset);
  if (next != region->free.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = region->free.erase(next);
  }
  if (next != region->free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  region->free[offset] = bytes;
}

void SharedArena::Remove(Region* region) {
  SendDrop(region->name);
  regions_.erase(std::find_if(regions_.begin(), regions_.end(),
                              [&](const auto& held) { return held.get() == region; }));
}

void SharedBlock::Part() {
  if (parted_.exchange(true)) return;
  // What is lent for ever is never used again.
  ++lent_;
  region_->memory->KeepFromOthers(offset_, taken_);
}

std::shared_ptr<SharedArena> ArenaLink::Get(absl::Time deadline) {
  {
    absl::MutexLock lock(&mutex_);
    while (asking_) {
      if (!WaitSteadily(&asked_, &mutex_, deadline)) return nullptr;
    }
    if (arena_ != nullptr && arena_->alive()) return arena_;
    if (std::exchange(arena_, nullptr) != nullptr) next_try_ = absl::InfinitePast();
    if (SteadyNow() < next_try_) return nullptr;
    asking_ = true;
  }
  const bool hurries = deadline < SteadyNow() + patience_;
  deadline = std::min(deadline, SteadyNow() + patience_);
  const absl::StatusOr<LocalInvitation> invitation = ask_(deadline);
  std::shared_ptr<SharedArena> arena;
  if (invitation.ok()) {
    arena = SharedArena::Connect(invitation->socket, invitation->ticket, deadline, patience_)
                .value_or(nullptr);
  }
  absl::MutexLock lock(&mutex_);
  asking_ = false;
  asked_.SignalAll();
  arena_ = std::move(arena);
  // One that does not answer may be about to start, or had too little time.
  const bool anew = arena_ != nullptr || absl::IsUnavailable(invitation.status()) ||
                    (hurries && absl::IsDeadlineExceeded(invitation.status()));
  pause_ = anew ? kFirstPause : std::clamp(2 * pause_, kFirstPause, kLongestPause);
  next_try_ = SteadyNow() + pause_;
  return arena_;
}

}  // namespace emberd
