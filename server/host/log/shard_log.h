// The log of one shard as the rest of the shard writes to it: every change of what the shard knows
// becomes a record before anybody is told of it, and the part of an update bytes that a record
// names (log.proto).
//
// What the shard knows is changed by calls that come in some order; the log has them in that order,
// and ShardRecovery makes the same calls again. So whoever changes something appends first, under
// the lock that orders its changes, and changes nothing if that fails.
// See docs/log.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "emberd/internal/v1/log.pb.h"
#include "server/log/log_writer.h"
#include "shard/update/update.h"

namespace emberd::shard {
class Engine;
}  // namespace emberd::shard

namespace emberd::host {

// The order in which changes reach the rows of a shard: one lock for updates of trainers, steps of
// groups and assignments alike. Under it a change gets its number, is marked as made, and is handed
// to the engine: who looks under the lock sees all three or none of them.
struct Sequencer {
  absl::Mutex mutex;
  uint64_t changes ABSL_GUARDED_BY(mutex) = 0;  // handed to the engine so far
};

// Notes in the state that the blob is needed.
void KeepOldestBlob(const internal::v1::LogBlob& blob, internal::v1::LogState* state);

// Thread-safe. Without a log, as before Start, all that is appended goes nowhere, and everything is
// durable.
class ShardLog {
 public:
  // There will be a log. Until Start, what is to be appended or to be durable is refused for this
  // reason; all else works.
  void Refuse(const absl::Status& reason);
  // Goes on from here. `log_bytes`: over it the log is too long.
  void Start(std::unique_ptr<log::LogWriter> writer, int64_t log_bytes);
  bool on() const { return on_; }

  // While somebody stays, no segment begins. Held from a blob to the record that names it, and from
  // a record to the change that it tells, where the lock of the sequencer is not held all the time.
  // Not to be taken twice by one thread.
  class Stay {
   public:
    explicit Stay(ShardLog* log) : log_(log) { log_->Enter(); }
    ~Stay() { log_->Leave(); }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;

   private:
    ShardLog* const log_;
  };

  // The bulk of a change. A blob without a segment: there is no log. FAILED_PRECONDITION if the
  // part's gradients are not with it, but where the client may change them.
  absl::StatusOr<internal::v1::LogBlob> AppendPart(const shard::CheckedPart& part);
  absl::StatusOr<internal::v1::LogBlob> AppendBlob(absl::Span<const absl::Span<const char>> pieces);

  absl::Status Append(const internal::v1::LogRecord& record);
  // A record of the decision that changes rows of this model.
  absl::Status AppendChange(uint64_t model_id, const internal::v1::LogRecord& record);

  // Calls `done` when all that was appended so far would survive what storage.fsync promises.
  void WhenDurable(std::function<void(absl::Status)> done);
  // What an answer is given to, so that it is told only then.
  template <typename T>
  std::function<void(absl::StatusOr<T>)> AfterDurable(std::function<void(absl::StatusOr<T>)> done) {
    return [this, done = std::move(done)](absl::StatusOr<T> answer) {
      if (!answer.ok()) return done(std::move(answer));
      WhenDurable([done, answer = std::move(answer)](const absl::Status& durable) {
        durable.ok() ? done(answer) : done(durable);
      });
    };
  }
  // The same, waiting. Not on a thread of the writer.
  absl::Status WaitDurable();
  // Returns when the disk has all that was appended, whatever storage.fsync promises.
  absl::Status Sync();

  // Begins a segment with the state that `compose` gives, which it is asked for under the lock of
  // the sequencer; nobody stays then. Returns its number. Its error: no segment begins. 0: there is
  // no log.
  using Compose = std::function<absl::Status(uint64_t segment, internal::v1::LogState* state)>;
  absl::StatusOr<uint64_t> BeginSegment(Sequencer* order, const Compose& compose);
  bool SegmentFull() const { return started() && writer_.load()->SegmentFull(); }
  // Segments before this one are no longer needed for rows. The log says so first, so that a reader
  // can tell a segment that was dropped from one that somebody has lost.
  void DropBefore(uint64_t segment);
  // The log's first segment, for its states. A recovery says which it is.
  uint64_t begins() const { return begins_; }
  void SetBegins(uint64_t segment) { begins_ = segment; }

  // The newest segment; 0: there is none.
  uint64_t segment() const { return started() ? writer_.load()->segment() : 0; }
  // Of the newest record that changed rows of the model since the start; nothing: there was none.
  std::optional<uint64_t> LastChange(uint64_t model_id) const;
  // A recovery has found it.
  void NoteChange(uint64_t model_id, uint64_t segment);
  bool IsLong() const { return started() && writer_.load()->bytes() > log_bytes_; }
  int64_t bytes() const { return started() ? writer_.load()->bytes() : 0; }
  uint64_t records() const { return started() ? writer_.load()->records() : 0; }
  absl::Status failure() const;

 private:
  bool started() const { return writer_ != nullptr; }
  absl::StatusOr<log::LogWriter*> Writer() const ABSL_LOCKS_EXCLUDED(mutex_);
  void Enter() ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);
  // After something was appended, or could not be: tells operators when the disk begins to refuse,
  // and when that is over.
  void NoteDisk(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  std::unique_ptr<log::LogWriter> owned_;
  std::atomic<log::LogWriter*> writer_ = nullptr;
  std::atomic<bool> on_ = false;
  int64_t log_bytes_ = 0;
  std::atomic<uint64_t> begins_ = 0;
  mutable absl::Mutex mutex_;
  absl::Status reason_ ABSL_GUARDED_BY(mutex_);  // of Refuse
  absl::CondVar moved_;
  int staying_ ABSL_GUARDED_BY(mutex_) = 0;
  bool beginning_ ABSL_GUARDED_BY(mutex_) = false;                    // a segment: nobody may enter
  std::map<uint64_t, uint64_t> last_change_ ABSL_GUARDED_BY(mutex_);  // by model
  std::atomic<bool> refuses_ = false;  // as operators were told; changes under mutex_
  absl::Time refuses_since_ ABSL_GUARDED_BY(mutex_);
  absl::Time quiet_until_ ABSL_GUARDED_BY(mutex_);
};

// The part of an update as bytes: what the log keeps of it (LogPartHeader in log.proto). The
// entries are those that the engine has arranged, so that they need not be arranged again. Points
// into the part, which must outlive it.
class EncodedPart {
 public:
  explicit EncodedPart(const shard::CheckedPart& part);
  EncodedPart(const EncodedPart&) = delete;
  EncodedPart& operator=(const EncodedPart&) = delete;
  absl::Span<const absl::Span<const char>> pieces() const { return pieces_; }

 private:
  std::string head_;
  std::vector<absl::Span<const char>> pieces_;
};

// And back. Checks all that it reads, but not again that gradients are finite: sums of rows may not
// be. `owner` keeps `bytes`, which begin at a multiple of 4; gradients stay there, entries go to
// buffers of `pool`. INVALID_ARGUMENT: these are not the bytes of a part of this model. NOT_FOUND:
// the engine does not know the model.
absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> DecodePart(
    uint64_t model_id, absl::Span<const char> bytes, std::shared_ptr<const void> owner,
    shard::Engine* engine, BufferPool& pool);

}  // namespace emberd::host
