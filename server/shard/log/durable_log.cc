#include "server/shard/log/durable_log.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/checkpoint/files.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

// A process that was killed may need a moment to be gone.
constexpr absl::Duration kLockPatience = absl::Seconds(10);
constexpr absl::Duration kRoomPause = absl::Milliseconds(200);

std::string FolderOf(const v1::StorageConfig& storage, int shard) {
  return absl::StrFormat("%s/shard-%04d", storage.directory(), shard);
}
std::string LogIn(const std::string& folder) { return folder + "/log"; }

}  // namespace

DurableLog::DurableLog(const v1::StorageConfig& storage, const ShardPlace& place,
                       const ShardRecovery::Parts& parts, Describe describe)
    : storage_(storage),
      place_(place),
      folder_(FolderOf(storage, place.index)),
      describe_(std::move(describe)),
      log_(parts.log),
      start_(SteadyNow()) {
  if (storage.durability() != v1::StorageConfig::LOG) return;
  recovery_ = std::make_unique<ShardRecovery>(
      place, LogIn(folder_), storage.checkpoints(), parts,
      [this](absl::FunctionRef<absl::Status()> work) { return AwaitRoom(work); });
  over_ = false;
  thread_ = std::thread([this, models = parts.models] {
    const absl::Status status = Recover();
    // Not before: every model had to be able to make room for the next one, and the log takes down
    // what is not pinned any more.
    if (status.ok()) models->PinAgain();
    MutexLock lock(&mutex_);
    if (!status.ok()) {
      ops::Log(ops::LogLevel::kError, "the shard cannot recover from its log; it serves nothing",
               {{"folder", folder_}, {"reason", std::string(status.message())}});
      // Nobody is to try again before somebody has done something.
      result_ = absl::FailedPreconditionError(
          absl::StrCat("it could not recover from its log, and serves nothing: ",
                       std::string(status.message())));
    }
    over_ = true;
    ended_.SignalAll();
  });
}

void DurableLog::Cancel() {
  if (recovery_ != nullptr) recovery_->Cancel();
}

DurableLog::~DurableLog() {
  Cancel();
  if (thread_.joinable()) thread_.join();
}

absl::Status DurableLog::LockFolder() {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  const std::string path = PathIn(folder_, "lock");
  lock_ = FileDescriptor(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (lock_.get() < 0) return FileError(errno, path, "cannot be created");
  const absl::Time until = SteadyNow() + kLockPatience;
  while (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return FileError(errno, path, "cannot be locked");
    if (SteadyNow() > until) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": another process has locked it: is shard ", place_.index,
          " running twice? Each shard needs its own index, and one storage.directory belongs to "
          "one cluster"));
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LogWriter>> DurableLog::OpenWriter(const LogEnd& end) {
  LogOptions options;
  options.folder = LogIn(folder_);
  options.shard = place_.index;
  options.shards = place_.shards;
  options.fsync = storage_.fsync();
  options.interval = absl::Milliseconds(storage_.fsync_interval_ms());
  options.older_blobs = end.older_blobs;
  options.spare_bytes = storage_.log_bytes() / 2;
  while (true) {
    internal::v1::LogRecord state;
    describe_(end.next_segment, state.mutable_state());
    auto writer = LogWriter::Open(options, end.next_segment, end.next_sequence, state);
    if (!absl::IsResourceExhausted(writer.status())) return writer;
    if (recovery_->progress().cancelled) return absl::CancelledError("the process is ending");
    // From here on nothing changes what the shard knows.
    log_->Refuse(writer.status());
    {
      MutexLock lock(&mutex_);
      over_ = true;
      ended_.SignalAll();
    }
    absl::SleepFor(kRoomPause);
  }
}

absl::Status DurableLog::AwaitRoom(absl::FunctionRef<absl::Status()> work) {
  while (true) {
    const absl::Status status = work();
    const bool waits = absl::IsResourceExhausted(status);
    {
      MutexLock lock(&mutex_);
      if (waits && waits_for_.empty()) {
        ops::Log(ops::LogLevel::kError, "the shard cannot go on with its recovery yet",
                 {{"folder", folder_}, {"reason", std::string(status.message())}});
      }
      waits_for_ = std::string(waits ? status.message() : "");
    }
    if (!waits) return status;
    if (recovery_->progress().cancelled) return absl::CancelledError("the process is ending");
    absl::SleepFor(kRoomPause);
  }
}

absl::Status DurableLog::Recover() {
  RETURN_IF_ERROR(LockFolder());
  ASSIGN_OR_RETURN(const LogEnd end, recovery_->Run());
  if (end.torn_bytes > 0) {
    ops::Log(ops::LogLevel::kWarning,
             "the log ends in the middle of a record; the bytes from there on are ignored",
             {{"folder", folder_}, {"bytes", end.torn_bytes}, {"what", end.torn}});
  }
  ASSIGN_OR_RETURN(auto writer, OpenWriter(end));
  log_->Start(std::move(writer), storage_.log_bytes());
  if (end.first_segment == 0) return absl::OkStatus();
  ops::Log(ops::LogLevel::kInfo, "back from the log",
           {{"folder", folder_},
            {"records", end.next_sequence - 1},
            {"bytes", recovery_->progress().bytes.load()},
            {"checkpoint_seconds", absl::ToDoubleSeconds(recovery_->loading())},
            {"seconds", absl::ToDoubleSeconds(SteadyNow() - start_)}});
  return absl::OkStatus();
}

absl::Status DurableLog::CheckReady() const {
  {
    MutexLock lock(&mutex_);
    if (over_) return result_;
    if (!waits_for_.empty()) {
      return absl::UnavailableError(absl::StrCat("recovering: ", waits_for_));
    }
  }
  constexpr double kGiB = 1 << 30;
  const int64_t total = recovery_->progress().total_bytes;
  const int64_t bytes = std::min<int64_t>(recovery_->progress().bytes, total);
  if (bytes == 0) return absl::UnavailableError("recovering: it reads its log; retry");
  const double share = static_cast<double>(bytes) / static_cast<double>(total);
  const absl::Duration left = (SteadyNow() - start_) * ((1 - share) / share);
  return absl::UnavailableError(
      absl::StrFormat("recovering, %.0f %% of %.1f GiB, about %d s left; retry", 100 * share,
                      static_cast<double>(total) / kGiB, absl::ToInt64Seconds(left) + 1));
}

void DurableLog::Wait() {
  MutexLock lock(&mutex_);
  while (!over_) ended_.Wait(&mutex_);
}

v1::LogStatus DurableLog::Status() const {
  v1::LogStatus status;
  if (!on()) return status;
  const absl::Status ready = CheckReady();
  status.set_recovering(absl::IsUnavailable(ready));
  status.set_recovered_bytes(recovery_->progress().bytes);
  status.set_recovery_bytes(recovery_->progress().total_bytes);
  if (status.recovering()) return status;
  const absl::Status failure = ready.ok() ? log_->failure() : ready;
  status.set_failure(std::string(failure.message()));
  status.set_bytes(log_->bytes());
  status.set_records(log_->records());
  return status;
}

}  // namespace emberd::server
