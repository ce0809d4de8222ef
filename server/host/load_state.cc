#include "server/host/load_state.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/files/files.h"
#include "server/host/mutation_record.h"

namespace emberd::host {
namespace {

using internal::v1::ShardState;

absl::StatusOr<ShardState> ReadState(const std::string& folder, const v1::CheckpointFile& file) {
  ASSIGN_OR_RETURN(const std::string bytes, files::ReadListedFile(folder, file));
  ShardState state;
  if (state.ParseFromString(bytes)) return state;
  return files::DamagedFile(files::PathIn(folder, file.path()),
                            "cannot be read as the state of a shard");
}

// Makes one state of those of all shards.
class StateMerger {
 public:
  // `count_rows`: the rows of all shards are added up; else there are none.
  explicit StateMerger(bool count_rows) : count_rows_(count_rows) {}

  void Add(const ShardState& state) {
    for (const internal::v1::ClientState& client : state.clients()) AddClient(client);
    for (const internal::v1::GroupState& group : state.groups()) AddGroup(group);
    merged_.set_changes(std::max(merged_.changes(), state.changes()));
    merged_.set_forgotten_generation(
        std::max(merged_.forgotten_generation(), state.forgotten_generation()));
    for (int stack = 0; stack < state.unnumbered_updates_size(); ++stack) {
      if (stack >= merged_.unnumbered_updates_size()) merged_.add_unnumbered_updates(0);
      merged_.set_unnumbered_updates(
          stack, std::max(merged_.unnumbered_updates(stack), state.unnumbered_updates(stack)));
    }
  }
  const ShardState& merged() const { return merged_; }

 private:
  template <typename State>
  void AddRows(const State& from, State* to) const {
    RowCounts rows = RowCountsOf(*to);
    if (count_rows_) rows += RowCountsOf(from);
    SetRowCounts(rows, to);
  }

  void AddClient(const internal::v1::ClientState& from) {
    internal::v1::ClientState*& client = clients_[from.client_id()];
    if (client == nullptr) client = merged_.add_clients();
    client->set_client_id(from.client_id());
    client->set_forgotten_up_to(std::max(client->forgotten_up_to(), from.forgotten_up_to()));
    for (const internal::v1::MutationState& made : from.mutations()) {
      internal::v1::MutationState*& mutation = mutations_[{from.client_id(), made.sequence()}];
      if (mutation == nullptr) mutation = client->add_mutations();
      mutation->set_sequence(made.sequence());
      mutation->set_tag(made.tag());
      AddRows(made, mutation);
    }
  }

  void AddGroup(const internal::v1::GroupState& from) {
    internal::v1::GroupState*& group = groups_[from.group()];
    if (group == nullptr) {
      group = merged_.add_groups();
      *group = from;
      SetRowCounts(RowCounts(), group);
    }
    group->set_generation(std::max(group->generation(), from.generation()));
    group->set_finished(group->finished() || from.finished());
    AddRows(from, group);
  }

  const bool count_rows_;
  ShardState merged_;
  // Where they stand in merged_.
  std::map<std::string, internal::v1::ClientState*> clients_;
  std::map<std::pair<std::string, uint64_t>, internal::v1::MutationState*> mutations_;
  std::map<std::string, internal::v1::GroupState*> groups_;
};

}  // namespace

absl::StatusOr<ShardState> LoadState(const internal::v1::CheckpointSource& newest, int shard,
                                     int shards) {
  const auto& files = newest.manifest().states();
  if (files.size() == shards) return ReadState(newest.folder(), files[shard]);
  StateMerger merger(/*count_rows=*/shard == 0);
  for (const v1::CheckpointFile& file : files) {
    ASSIGN_OR_RETURN(const ShardState state, ReadState(newest.folder(), file));
    merger.Add(state);
  }
  return merger.merged();
}

}  // namespace emberd::host
