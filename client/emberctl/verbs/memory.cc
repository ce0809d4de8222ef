#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/stats_view.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

std::string PlaceText(const v1::MemoryTable& table) {
  switch (table.place()) {
    case v1::MemoryTable::SPARSECORE:
      return absl::StrCat(table.address());
    case v1::MemoryTable::HOST:
      return "evicted, in memory";
    case v1::MemoryTable::SPILLED:
      return "evicted, on disk";
    default:
      return "?";
  }
}

void PrintMemory(const v1::ShardStatus& shard, std::ostream& out) {
  const v1::MemoryStatus& memory = shard.memory();
  out << "shard " << shard.index() << ": on each SparseCore " << Bytes(memory.free_bytes())
      << " of " << Bytes(memory.bytes()) << " free, " << Bytes(memory.largest_gap_bytes())
      << " in one piece, " << Bytes(memory.pinned_bytes()) << " pinned, "
      << Bytes(memory.batch_bytes()) << " in batches; evicted: " << Bytes(memory.host_bytes())
      << " in memory, of " << Bytes(memory.host_budget_bytes()) << ", and in all "
      << Bytes(memory.spilled_bytes())
      << " on disk; since the start: " << Counted(memory.evictions(), "eviction", "evictions")
      << ", " << Counted(memory.returns(), "return", "returns") << ", "
      << Counted(memory.compactions(), "compaction", "compactions") << ", "
      << Counted(memory.failures(), "failure", "failures") << "\n";
  Table lines = {{"ADDRESS", "MODEL", "STACK", "SIZE", "USES", "PINNED"}};
  for (const v1::MemoryTable& table : memory.tables()) {
    lines.push_back({PlaceText(table), table.model(),
                     table.stack().empty() ? "(a batch)" : table.stack(), Bytes(table.bytes()),
                     table.uses(), table.pinned() ? "yes" : "no"});
  }
  PrintColumns(lines, out);
}

absl::Status ShowMemory(Session& session) {
  ASSIGN_OR_RETURN(const v1::GetStatusResponse response, session.GetStatus());
  Json shards = Json::array();  // what this is about, and nothing else
  for (const v1::ShardStatus& shard : response.shards()) {
    RETURN_IF_ERROR(CheckShard(shard));
    if (!shard.has_memory()) {
      return absl::FailedPreconditionError(
          "models are not evicted in this cluster: its description has no `eviction`; write "
          "`eviction { spill_folder: \"/var/tmp/emberd\" }` into it and start it again");
    }
    if (session.json) {
      shards.push_back({{"index", shard.index()}, {"memory", MessageJson(shard.memory())}});
    } else {
      PrintMemory(shard, session.out);
    }
  }
  return session.json ? PrintJson(Json{{"shards", shards}}, session.out) : absl::OkStatus();
}

// "brought in; evicted: ads, users (3.0 MiB)"
std::string DoneText(const v1::ChangeMemoryRequest& request, const v1::ShardMemoryChange& change) {
  std::vector<std::string> done;
  if (request.operation() == v1::ChangeMemoryRequest::PIN) {
    done.push_back(!change.changed() ? "was pinned already" : "pinned");
    if (change.returned()) done.push_back("brought in");
  }
  if (request.operation() == v1::ChangeMemoryRequest::UNPIN) {
    done.push_back(change.changed() ? "may be evicted again" : "was not pinned");
  }
  if (change.evicted_size() > 0) {
    done.push_back(absl::StrCat("evicted: ", absl::StrJoin(change.evicted(), ", "), " (",
                                Bytes(change.evicted_bytes()), ")"));
  } else if (request.operation() == v1::ChangeMemoryRequest::RELEASE) {
    done.push_back("nothing to evict");
  }
  if (change.moved_tables() > 0 || request.operation() == v1::ChangeMemoryRequest::COMPACT) {
    done.push_back(absl::StrCat(Counted(change.moved_tables(), "table"), " moved"));
  }
  return absl::StrJoin(done, "; ");
}

absl::Status ChangeMemory(Session& session, const v1::ChangeMemoryRequest& request) {
  // Rows have to move, and steps that run are waited for.
  ASSIGN_OR_RETURN(
      const auto response,
      session.Call<v1::ChangeMemoryResponse>(
          request, std::max(absl::Minutes(10), absl::Seconds(session.timeout_seconds))));
  if (session.json) return PrintJson(response, session.out);
  for (const v1::ShardMemoryChange& change : response.shards()) {
    const v1::MemoryStatus& memory = change.memory();
    session.out << "shard " << change.shard() << ": " << DoneText(request, change)
                << "; on each SparseCore " << Bytes(memory.free_bytes()) << " of "
                << Bytes(memory.bytes()) << " free, " << Bytes(memory.largest_gap_bytes())
                << " in one piece, " << Bytes(memory.pinned_bytes()) << " pinned\n";
  }
  return absl::OkStatus();
}

void AddChange(CLI::App* memory, Session& session, const std::string& name, const std::string& help,
               v1::ChangeMemoryRequest::Operation operation) {
  const bool pins =
      operation == v1::ChangeMemoryRequest::PIN || operation == v1::ChangeMemoryRequest::UNPIN;
  auto [change, request] =
      AddVerb(*memory, session, name, help,
              absl::StrCat("emberctl memory ", name, pins ? " my_model" : ""), ChangeMemory);
  request->set_operation(operation);
  if (pins) {
    change->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  }
}

}  // namespace

void AddMemory(CLI::App& app, Session& session) {
  CLI::App* memory =
      app.add_subcommand("memory",
                         "Show which models are in the memory of each shard's SparseCores, at "
                         "which address, and which "
                         "were evicted and wait on disk (`eviction` in the cluster's description); "
                         "with a command: pin, unpin, compact or release");
  memory->require_subcommand(0, 1);
  SetExample(memory, "emberctl memory");
  using Change = v1::ChangeMemoryRequest;
  AddChange(memory, session, "pin",
            "Bring a model in on all shards, and do not evict it from now on. With "
            "storage.durability LOG, this outlasts restarts of shards; otherwise it ends when all "
            "of them have started again",
            Change::PIN);
  AddChange(memory, session, "unpin", "Let a model be evicted again, when others need its memory",
            Change::UNPIN);
  AddChange(memory, session, "compact",
            "Move the tables together, so that the free bytes lie in one piece", Change::COMPACT);
  AddChange(memory, session, "release",
            "Evict every model that is neither pinned nor in use; they come back when they are "
            "used",
            Change::RELEASE);
  memory->callback([memory, &session] {
    if (!memory->get_subcommands().empty()) return;
    session.command = [&session] { return ShowMemory(session); };
  });
}

}  // namespace emberd::emberctl
