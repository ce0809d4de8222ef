#include "server/log/testing/sample.h"

#include "server/log/testing/records.h"

namespace emberd::log {

using internal::v1::LogRecord;

void WriteSampleLog(const std::string& folder, int shard, int shards) {
  LogOptions options;
  options.folder = folder;
  options.shard = shard;
  options.shards = shards;
  // The value of an error ends the process.
  const auto writer = LogWriter::Open(options, 1, 1, StateRecord(1)).value();
  LogRecord made;
  made.mutable_model_made()->mutable_create()->set_model_id(7);
  made.mutable_model_made()->mutable_create()->mutable_config()->set_name("ads");
  writer->Append(made).value();
  const auto blob = AppendBytes(*writer, BlobBytes(1, 5000)).value();
  LogRecord vote = VoteRecord(0x12ab, blob);
  vote.mutable_vote()->set_model_id(7);
  vote.mutable_vote()->mutable_mutation()->set_client_id("trainer");
  vote.mutable_vote()->mutable_mutation()->set_sequence(17);
  writer->Append(vote).value();
  LogRecord decision;
  *decision.mutable_decision()->mutable_mutation() = vote.vote().mutation();
  decision.mutable_decision()->set_attempt(0x12ab);
  decision.mutable_decision()->set_commit(true);
  writer->Append(decision).value();
  LogRecord part;
  part.mutable_part()->set_model_id(8);
  part.mutable_part()->mutable_part()->set_group("run");
  part.mutable_part()->mutable_part()->set_step(3);
  part.mutable_part()->mutable_part()->set_size(2);
  writer->Append(part).value();
}

}  // namespace emberd::log
