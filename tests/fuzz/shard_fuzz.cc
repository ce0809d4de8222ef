// What a shard reads from its connections. An input is
//   one byte: what it is, see Kind; bit 7: raw parts
//   a message: two bytes with the length of its header, the header, the payload
//   raw parts: two bytes with the length of a part, the part, and so on
// Catches: bytes that crash the assembler, the codec or the engine, a batch or update that is
// accepted and then fails, and a payload that is not encoded as it was decoded.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "config/config.h"
#include "preprocess/batch/preprocessor.h"
#include "server/host/hosted_models.h"
#include "server/host/shard_codec.h"
#include "server/rpc/message.h"
#include "shard/engine.h"
#include "shard/gather/pooling.h"
#include "tests/fuzz/canonical.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace shard_fuzz {

using fuzz::Require;

// The protobuf library writes what it refuses to standard error.
const google::protobuf::LogSilencer kSilence;

enum Kind { kGather = 0, kApply = 1, kGatherResult = 2, kKinds = 3 };
constexpr uint8_t kRawParts = 0x80;

constexpr uint64_t kModelId = 1;
constexpr int kSparseCores = 2;
constexpr int64_t kMaxMessageBytes = 1 << 16;
constexpr char kModel[] = R"(
  name: "fuzzed"
  tables { name: "a" vocabulary_size: 64 embedding_dim: 4 combiner: SUM }
  tables { name: "b" vocabulary_size: 100 embedding_dim: 12 storage_dtype: BFLOAT16 result_mode: UNIQUE_ROWS
           optimizer { adam { bias_correction: true } } }
  features { name: "x" table: "a" }
  features { name: "y" table: "b" }
  optimizer { adagrad {} }
)";

// Whether what was decoded from `message`, encoded again, is the same message; its payload has to
// be in any case. Payloads are never dropped: the decoders refuse what is left of them.
template <typename Header>
bool ReadWhole(const rpc::IncomingMessage& message, const rpc::OutgoingMessage& again) {
  absl::string_view rest(message.payload().data(), message.payload().size());
  for (const rpc::SharedBytes& piece : again.payload) {
    Require(absl::ConsumePrefix(&rest, piece.bytes), "a payload is encoded as it was decoded");
  }
  Require(rest.empty(), "a payload is decoded whole");
  return fuzz::Canonical<Header>(again.header) == message.header();
}

// One engine with a model and a batch of four samples.
class Shard {
 public:
  Shard() {
    auto model = config::ParseModel(kModel);
    Require(model.ok(), "the model is valid");
    model_ = *std::move(model);
    auto plan = preprocess::MakePlan(model_, {2, kSparseCores});
    Require(plan.ok(), "the model can be planned");
    plan_ = *std::move(plan);
    spec_ = host::ModelSpecFromPlan(kModelId, model_, plan_, 0);
    auto engine = shard::Engine::Create({.cpu = &cpu_});
    Require(engine.ok(), "there is an engine");
    engine_ = *std::move(engine);
    Require(engine_->CreateModel(spec_).ok(), "the model can be created");
    preprocessor_ = std::make_unique<preprocess::Preprocessor>(&model_, &plan_, nullptr);
    const std::vector<int32_t> ids = {0, 4, 8, 3};
    const preprocess::FeatureInput input = {
        preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 4}, false, {}};
    const auto preprocessed = preprocessor_->Run({input, input});
    Require(preprocessed.ok(), "the batch is valid");
    preprocessed_ = *preprocessed;
    auto batch = engine_->PrepareBatch(kModelId, preprocessed_->ShardView(0), nullptr);
    Require(batch.ok(), "the batch is valid on the shard");
    batch_ = *std::move(batch);
    // The batch is arranged for good by its first use.
    Gather(batch_);
  }

  void TryGather(const rpc::IncomingMessage& message) {
    auto command = host::DecodeGather(message, kSparseCores);
    if (!command.ok()) return;
    const bool whole = ReadWhole<internal::v1::GatherHeader>(message, host::EncodeGather(*command));
    const bool empty = command->stacks.empty();
    auto batch = engine_->PrepareBatch(kModelId, std::move(command->stacks), command->owner,
                                       command->places);
    if (!batch.ok()) return;
    fuzz::accepted |= whole && !empty;
    Require((*batch)->bytes() >= 0, "a batch has a size");
    // Places of no sample are all that can be named without a region.
    Gather(*std::move(batch));
  }

  void TryApply(const rpc::IncomingMessage& message) {
    auto command = host::DecodeApply(message, nullptr);
    if (!command.ok()) return;
    const bool whole = ReadWhole<internal::v1::ApplyHeader>(message, host::EncodeApply(*command));
    const bool empty = command->input.stacks.empty();
    auto part = shard::CheckedPart::Make(batch_, std::move(command->input));
    if (!part.ok()) return;
    fuzz::accepted |= whole && !empty;
    absl::Notification done;
    engine_->Apply(shard::StagedUpdate(*std::move(part)),
                   [&done](absl::StatusOr<shard::ApplyResult> rows) {
                     Require(rows.ok(), "an update that was checked can be made");
                     done.Notify();
                   });
    done.WaitForNotification();
  }

  void TryGatherResult(const rpc::IncomingMessage& message) {
    auto result = host::DecodeGatherResult(message);
    if (!result.ok()) return;
    const bool whole =
        ReadWhole<internal::v1::GatherReply>(message, host::EncodeGatherResult(*result));
    bool all_fit = !result->stacks.empty() || !result->rows.empty();
    for (const shard::StackSums& sums : result->stacks) all_fit &= SumsFit(sums);
    for (const shard::StackRows& rows : result->rows) all_fit &= PoolRows(rows);
    fuzz::accepted |= whole && all_fit;
  }

 private:
  // Whether these can be sums of the batch.
  bool SumsFit(const shard::StackSums& sums) const {
    if (sums.stack < 0 || sums.stack >= static_cast<int>(spec_.stacks.size())) return false;
    const size_t width = spec_.stacks[sums.stack].embedding_dim;
    return !sums.samples.empty() && sums.sums.size() == sums.samples.size() * width;
  }

  // Whether these can be the rows of the batch.
  bool PoolRows(const shard::StackRows& rows) {
    const auto views = preprocessed_->ShardView(0);
    if (rows.stack < 0 || rows.stack >= static_cast<int>(views.size())) return false;
    const shard::StackSpec& stack = spec_.stacks[rows.stack];
    const auto sums = shard::LaterSums::Make(views[rows.stack], stack, kSparseCores,
                                             {rows.rows, rows.rounded}, pool_, cpu_);
    Require(sums.ok() || absl::IsInvalidArgument(sums.status()), "other rows are refused");
    if (sums.ok()) {
      const auto samples = static_cast<int64_t>((*sums)->samples().size());
      PooledArray<float> memory(pool_, samples * stack.embedding_dim);
      (*sums)->Sum(0, samples, memory.data());
    }
    return sums.ok() && !rows.rows.empty();
  }

  void Gather(std::shared_ptr<const shard::Batch> batch) {
    absl::Notification done;
    engine_->Gather(std::move(batch), {}, [&done](auto output) {
      Require(output.ok(), "a batch that was checked can be gathered");
      for (const shard::StackSums& stack : output->sums) {
        Require(stack.rows == static_cast<int64_t>(stack.samples.size()),
                "there is a sum for every sample");
      }
      for (const shard::StackRows& stack : output->rows) {
        Require(stack.bytes() % stack.row_bytes == 0, "there are whole rows");
      }
      done.Notify();
    });
    done.WaitForNotification();
  }

  v1::ModelConfig model_;
  preprocess::Plan plan_;
  shard::ModelSpec spec_;
  std::unique_ptr<preprocess::Preprocessor> preprocessor_;
  std::shared_ptr<const preprocess::PreprocessedBatch> preprocessed_;
  CpuPool cpu_{1};
  std::unique_ptr<shard::Engine> engine_;
  std::shared_ptr<const shard::Batch> batch_;
  BufferPool pool_;
};

void Try(int kind, const rpc::IncomingMessage& message) {
  static auto* const shard = new Shard;
  if (kind == kGather) shard->TryGather(message);
  if (kind == kApply) shard->TryApply(message);
  if (kind == kGatherResult) shard->TryGatherResult(message);
}

// The next two bytes as a length, and as many bytes, or what is left.
absl::string_view TakePiece(absl::string_view* input) {
  uint16_t length = 0;
  if (input->size() < sizeof(length)) return std::exchange(*input, "");
  std::memcpy(&length, input->data(), sizeof(length));
  input->remove_prefix(sizeof(length));
  const absl::string_view piece = input->substr(0, length);
  input->remove_prefix(piece.size());
  return piece;
}

void TryRawParts(int kind, absl::string_view input) {
  rpc::MessageAssembler assembler({kMaxMessageBytes});
  while (!input.empty()) {
    const absl::string_view part = TakePiece(&input);
    grpc::Slice slice(part.data(), part.size());
    const auto message = assembler.Add(grpc::ByteBuffer(&slice, 1));
    if (!message.ok()) return;
    if (message->has_value()) Try(kind, **message);
  }
}

void TryMessage(int kind, absl::string_view input) {
  rpc::OutgoingMessage outgoing;
  outgoing.header = std::string(TakePiece(&input));
  outgoing.Append(absl::MakeConstSpan(input.data(), input.size()), nullptr);
  rpc::MessageAssembler assembler({kMaxMessageBytes});
  std::optional<rpc::IncomingMessage> whole;
  for (const grpc::ByteBuffer& part : rpc::SplitMessage(std::move(outgoing), 1000)) {
    auto message = assembler.Add(part);
    if (!message.ok()) return;
    Require(!whole.has_value(), "the last part ends the message");
    whole = *std::move(message);
  }
  Require(whole.has_value() && whole->payload().size() == input.size(), "a message arrives whole");
  Try(kind, *whole);
}

EMBERD_FUZZ_TARGET(shard, data, size) {
  if (size == 0) return 0;
  const absl::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const int kind = (data[0] & ~kRawParts) % kKinds;
  if (data[0] & kRawParts) {
    TryRawParts(kind, rest);
  } else {
    TryMessage(kind, rest);
  }
  return 0;
}

}  // namespace shard_fuzz
}  // namespace emberd
