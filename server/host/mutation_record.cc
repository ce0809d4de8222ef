#include "server/host/mutation_record.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::host {
namespace {

// Of changes that shards compare. What a shard has lost is the newest of its log, so that of each
// client the newest would do, but for those that were in progress at once.
constexpr int kNewestOfClient = 8;
constexpr int kMostNewest = 8192;

}  // namespace

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

internal::v1::MutationName NameToProto(const Mutation& mutation) {
  internal::v1::MutationName name;
  name.set_client_id(mutation.client_id);
  name.set_sequence(mutation.sequence);
  name.set_tag(mutation.tag);
  return name;
}

Mutation NameFromProto(const internal::v1::MutationName& name) {
  return {name.client_id(), name.sequence(), name.tag()};
}

absl::StatusOr<Mutation> MutationOf(const internal::v1::MutationName& name) {
  Mutation mutation = NameFromProto(name);
  RETURN_IF_ERROR(CheckMutation(mutation));
  return mutation;
}

MutationRecord::Client& MutationRecord::Touch(const std::string& client_id) {
  auto [it, is_new] = clients_.try_emplace(client_id);
  Client& client = it->second;
  if (!is_new) {
    recency_.splice(recency_.begin(), recency_, client.recency);
    return client;
  }
  recency_.push_front(client_id);
  client.recency = recency_.begin();
  const auto before = forgotten_.find(std::hash<std::string>()(client_id));
  if (before != forgotten_.end()) client.forgotten_up_to = before->second;
  MakeRoom();
  return clients_.at(client_id);
}

bool MutationRecord::IsYoung(const Client& client, uint64_t sequence) const {
  return client.entries.at(sequence).finished + options_.young > SteadyNow();
}

void MutationRecord::MakeRoom() {
  while (recency_.size() > 1) {
    const bool full =
        static_cast<int>(clients_.size()) > options_.clients || entries_ > options_.entries;
    if (!full && entries_ <= options_.entries / 2) return;
    const std::string client_id = recency_.back();
    const Client& quiet = clients_.at(client_id);
    if (!full && !quiet.finished.empty() && IsYoung(quiet, quiet.finished.back())) return;
    recency_.pop_back();
    Forget(client_id);
  }
}

void MutationRecord::Forget(const std::string& client_id) {
  const Client& client = clients_.at(client_id);
  uint64_t highest = client.forgotten_up_to;
  for (const auto& [sequence, entry] : client.entries) highest = std::max(highest, sequence);
  entries_ -= static_cast<int>(client.entries.size());
  clients_.erase(client_id);
  NoteForgotten(client_id, highest);
}

void MutationRecord::NoteForgotten(const std::string& client_id, uint64_t highest) {
  const size_t hash = std::hash<std::string>()(client_id);
  const auto [found, is_new] = forgotten_.try_emplace(hash, highest);
  found->second = std::max(found->second, highest);
  if (!is_new) return;
  forgotten_order_.push_back(hash);
  if (static_cast<int>(forgotten_order_.size()) <= options_.forgotten_clients) return;
  forgotten_.erase(forgotten_order_.front());
  forgotten_order_.pop_front();
}

absl::StatusOr<std::optional<RowCounts>> MutationRecord::FindIn(const Client& client,
                                                                const Mutation& mutation) const {
  const auto found = client.entries.find(mutation.sequence);
  if (found != client.entries.end()) {
    const Entry& entry = found->second;
    if (entry.tag != mutation.tag) {
      return absl::InvalidArgumentError(
          absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                       "' was used for another request; each request needs a number of its own"));
    }
    return entry.result;
  }
  if (mutation.sequence > client.forgotten_up_to) return std::optional<RowCounts>();
  return absl::FailedPreconditionError(
      absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                   "' is older than the record reaches: the newest forgotten number is ",
                   client.forgotten_up_to));
}

absl::StatusOr<std::optional<RowCounts>> MutationRecord::Find(const Mutation& mutation) {
  MutexLock lock(&mutex_);
  const auto client = clients_.find(mutation.client_id);
  if (client != clients_.end()) return FindIn(Touch(mutation.client_id), mutation);
  Client unknown;
  const auto before = forgotten_.find(std::hash<std::string>()(mutation.client_id));
  if (before != forgotten_.end()) unknown.forgotten_up_to = before->second;
  return FindIn(unknown, mutation);
}

void MutationRecord::Keep(Client* client, uint64_t sequence, const Entry& entry) {
  if (client->entries.insert_or_assign(sequence, entry).second) ++entries_;
  client->finished.push_back(sequence);
  while (static_cast<int>(client->finished.size()) > options_.per_client) {
    const uint64_t oldest = client->finished.front();
    if (IsYoung(*client, oldest) && entries_ <= options_.entries / 4 * 3) return;
    client->forgotten_up_to = std::max(client->forgotten_up_to, oldest);
    client->entries.erase(oldest);
    client->finished.pop_front();
    --entries_;
  }
}

void MutationRecord::Finish(const Mutation& mutation, const RowCounts& result, uint64_t model_id,
                            uint64_t history) {
  MutexLock lock(&mutex_);
  Keep(&Touch(mutation.client_id), mutation.sequence, {mutation.tag, model_id, result, history});
  MakeRoom();
}

void MutationRecord::ListNewest(uint64_t model_id, uint64_t history, Names* names) const {
  MutexLock lock(&mutex_);
  for (const std::string& client_id : recency_) {
    const Client& client = clients_.at(client_id);
    int listed = 0;
    for (auto made = client.finished.rbegin(); made != client.finished.rend(); ++made) {
      const Entry& entry = client.entries.at(*made);
      if (entry.model_id != model_id || entry.history != history) continue;
      if (names->size() == kMostNewest || ++listed > kNewestOfClient) break;
      *names->Add() = NameToProto({client_id, *made, entry.tag});
    }
  }
}

void MutationRecord::Save(uint64_t model_id, Clients* clients) {
  MutexLock lock(&mutex_);
  for (auto quiet = recency_.rbegin(); quiet != recency_.rend(); ++quiet) {
    const Client& client = clients_.at(*quiet);
    internal::v1::ClientState to;
    to.set_client_id(*quiet);
    to.set_forgotten_up_to(client.forgotten_up_to);
    for (const uint64_t sequence : client.finished) {
      const Entry& entry = client.entries.at(sequence);
      if (entry.model_id != model_id) continue;
      internal::v1::MutationState* mutation = to.add_mutations();
      mutation->set_sequence(sequence);
      mutation->set_tag(entry.tag);
      SetRowCounts(entry.result, mutation);
    }
    // What is forgotten may have been of this model.
    if (to.mutations_size() > 0 || to.forgotten_up_to() > 0) *clients->Add() = std::move(to);
  }
}

void MutationRecord::Restore(uint64_t model_id, const Clients& clients) {
  MutexLock lock(&mutex_);
  for (auto& entry : clients_) {
    Client& client = entry.second;
    std::erase_if(client.finished, [&](uint64_t sequence) {
      return client.entries.at(sequence).model_id == model_id;
    });
    entries_ -= static_cast<int>(absl::erase_if(client.entries, [&](const auto& mutation) {
      return mutation.second.model_id == model_id;
    }));
  }
  for (const internal::v1::ClientState& from : clients) {
    if (from.mutations().empty() && !clients_.contains(from.client_id())) {
      NoteForgotten(from.client_id(), from.forgotten_up_to());  // takes nobody's place
      continue;
    }
    Client& client = Touch(from.client_id());
    client.forgotten_up_to = std::max(client.forgotten_up_to, from.forgotten_up_to());
    for (const internal::v1::MutationState& mutation : from.mutations()) {
      // The number may be in use for another model by now.
      if (client.entries.contains(mutation.sequence())) continue;
      Keep(&client, mutation.sequence(), {mutation.tag(), model_id, RowCountsOf(mutation)});
    }
    MakeRoom();
  }
}

void MutationRecord::Describe(internal::v1::LogState* state) const {
  MutexLock lock(&mutex_);
  for (auto quiet = recency_.rbegin(); quiet != recency_.rend(); ++quiet) {
    const Client& client = clients_.at(*quiet);
    internal::v1::LogClient* to = state->add_clients();
    to->set_client_id(*quiet);
    to->set_forgotten_up_to(client.forgotten_up_to);
    for (const uint64_t sequence : client.finished) {
      const Entry& entry = client.entries.at(sequence);
      internal::v1::LogMadeChange* made = to->add_made();
      made->set_model_id(entry.model_id);
      made->set_history(entry.history);
      made->mutable_change()->set_sequence(sequence);
      made->mutable_change()->set_tag(entry.tag);
      SetRowCounts(entry.result, made->mutable_change());
    }
  }
  for (const size_t hash : forgotten_order_) {
    internal::v1::LogForgottenClient* to = state->add_forgotten_clients();
    to->set_name_hash(hash);
    to->set_highest(forgotten_.at(hash));
  }
}

void MutationRecord::Remember(const internal::v1::LogState& state) {
  MutexLock lock(&mutex_);
  for (const internal::v1::LogForgottenClient& from : state.forgotten_clients()) {
    forgotten_[from.name_hash()] = from.highest();
    forgotten_order_.push_back(from.name_hash());
  }
  for (const internal::v1::LogClient& from : state.clients()) {
    Client& client = Touch(from.client_id());
    client.forgotten_up_to = std::max(client.forgotten_up_to, from.forgotten_up_to());
    for (const internal::v1::LogMadeChange& made : from.made()) {
      Keep(&client, made.change().sequence(),
           {made.change().tag(), made.model_id(), RowCountsOf(made.change()), made.history()});
    }
  }
}

void MutationRecord::Refuse(const Mutation& mutation) {
  MutexLock lock(&mutex_);
  Client& client = Touch(mutation.client_id);
  client.forgotten_up_to = std::max(client.forgotten_up_to, mutation.sequence);
}

void NameModel(uint64_t before, uint64_t now, MutationRecord::Clients* clients) {
  for (internal::v1::ClientState& client : *clients) {
    for (internal::v1::MutationState& mutation : *client.mutable_mutations()) {
      mutation.set_tag(mutation.tag() ^ before ^ now);
    }
  }
}

}  // namespace emberd::host
