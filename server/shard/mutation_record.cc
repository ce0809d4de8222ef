#include "server/shard/mutation_record.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace emberd::server {

absl::Status CheckMutation(const Mutation& mutation) {
  if (mutation.client_id.empty() || mutation.client_id.size() > 64) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mutation.client_id has ", mutation.client_id.size(), " bytes; it must have 1 to 64"));
  }
  if (mutation.sequence == 0) {
    return absl::InvalidArgumentError("mutation.sequence is 0; it must be >= 1");
  }
  return absl::OkStatus();
}

MutationRecord::Client& MutationRecord::Touch(const std::string& client_id) {
  auto [it, is_new] = clients_.try_emplace(client_id);
  if (is_new) {
    recency_.push_front(client_id);
  } else {
    recency_.splice(recency_.begin(), recency_, it->second.recency);
  }
  it->second.recency = recency_.begin();
  if (static_cast<int>(clients_.size()) > options_.clients) {
    // The least recent client with nothing in progress makes room; the one just touched is never
    // it.
    for (auto old = std::prev(recency_.end()); old != recency_.begin(); --old) {
      if (clients_.at(*old).in_progress > 0) continue;
      clients_.erase(*old);
      recency_.erase(old);
      break;
    }
  }
  return clients_.at(client_id);
}

absl::StatusOr<std::optional<RowCounts>> MutationRecord::Begin(const Mutation& mutation) {
  absl::MutexLock lock(&mutex_);
  Client& client = Touch(mutation.client_id);
  const auto found = client.entries.find(mutation.sequence);
  if (found != client.entries.end()) {
    const Entry& entry = found->second;
    if (entry.tag != mutation.tag) {
      return absl::InvalidArgumentError(
          absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                       "' was used for another request; each request needs a number of its own"));
    }
    if (!entry.done) {
      return absl::UnavailableError(absl::StrCat("mutation ", mutation.sequence, " of client '",
                                                 mutation.client_id,
                                                 "' is in progress; retry later"));
    }
    return entry.result;
  }
  if (mutation.sequence <= client.forgotten_up_to) {
    return absl::FailedPreconditionError(
        absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                     "' is older than the record reaches: the newest forgotten number is ",
                     client.forgotten_up_to));
  }
  client.entries[mutation.sequence] = Entry{mutation.tag, false, {}};
  ++client.in_progress;
  return std::optional<RowCounts>();
}

void MutationRecord::Finish(const Mutation& mutation, const RowCounts& result) {
  absl::MutexLock lock(&mutex_);
  Client& client = clients_.at(mutation.client_id);
  Entry& entry = client.entries.at(mutation.sequence);
  entry.done = true;
  entry.result = result;
  --client.in_progress;
  client.finished.push_back(mutation.sequence);
  if (static_cast<int>(client.finished.size()) > options_.per_client) {
    client.forgotten_up_to = std::max(client.forgotten_up_to, client.finished.front());
    client.entries.erase(client.finished.front());
    client.finished.pop_front();
  }
}

void MutationRecord::Abort(const Mutation& mutation) {
  absl::MutexLock lock(&mutex_);
  Client& client = clients_.at(mutation.client_id);
  client.entries.erase(mutation.sequence);
  --client.in_progress;
}

}  // namespace emberd::server
