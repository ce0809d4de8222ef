#include "client/cpp/model_codec.h"

#include <initializer_list>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/fields.h"
#include "config/shared_tables.h"

namespace emberd::client {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// A number or a flag: what a double can say.
bool IsParameter(const FieldDescriptor* field) {
  return field != nullptr && (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT ||
                              field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE ||
                              field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL);
}

// Names of the fields that are parameters, or of those that are not: the optimizers.
std::string Names(std::initializer_list<const Descriptor*> messages, bool parameters) {
  std::string names;
  for (const Descriptor* const message : messages) {
    for (int i = 0; i < message->field_count(); ++i) {
      if (IsParameter(message->field(i)) != parameters) continue;
      absl::StrAppend(&names, names.empty() ? "" : ", ", message->field(i)->name());
    }
  }
  return names;
}

absl::Status SetParameter(const std::string& path, const FieldDescriptor* field, double value,
                          Message* message) {
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
    const std::optional<float> rounded = config::ToFloat(value);
    if (!rounded) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", config::NumberText(value),
                                                     " is not allowed; it must be a float32"));
    }
    message->GetReflection()->SetFloat(message, field, *rounded);
    return absl::OkStatus();
  }
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
    message->GetReflection()->SetDouble(message, field, value);
    return absl::OkStatus();
  }
  if (value != 0 && value != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", value, " is not allowed; a flag is 0 or 1"));
  }
  message->GetReflection()->SetBool(message, field, value == 1);
  return absl::OkStatus();
}

v1::Combiner EncodeCombiner(Combiner combiner) {
  switch (combiner) {
    case Combiner::kMean:
      return v1::MEAN;
    case Combiner::kSum:
      return v1::SUM;
    case Combiner::kSqrtn:
      return v1::SQRTN;
  }
  return v1::COMBINER_UNSPECIFIED;
}

void EncodeInitializer(const Initializer& initializer, v1::InitializerConfig* config) {
  const auto normal = [&](v1::NormalInitializer* normal) {
    normal->set_mean(initializer.a);
    normal->set_stddev(initializer.b);
  };
  switch (initializer.kind) {
    case Initializer::Kind::kDefault:
      return;
    case Initializer::Kind::kZeros:
      config->mutable_zeros();
      return;
    case Initializer::Kind::kConstant:
      return config->mutable_constant()->set_value(initializer.a);
    case Initializer::Kind::kUniform:
      config->mutable_uniform()->set_lower(initializer.a);
      return config->mutable_uniform()->set_upper(initializer.b);
    case Initializer::Kind::kNormal:
      return normal(config->mutable_normal());
    case Initializer::Kind::kTruncatedNormal:
      return normal(config->mutable_truncated_normal());
    case Initializer::Kind::kRowId:
      config->mutable_row_id();
      return;
  }
}

absl::Status EncodeTable(const TableDescription& table, const std::string& path,
                         v1::TableConfig* config) {
  config->set_name(table.name);
  config->set_vocabulary_size(table.vocabulary_size);
  config->set_embedding_dim(table.embedding_dim);
  config->set_combiner(EncodeCombiner(table.combiner));
  config->set_max_ids_per_partition(table.max_ids_per_partition);
  config->set_max_unique_ids_per_partition(table.max_unique_ids_per_partition);
  if (table.initializer.kind != Initializer::Kind::kDefault) {
    EncodeInitializer(table.initializer, config->mutable_initializer());
  }
  if (!table.optimizer.has_value()) return absl::OkStatus();
  return EncodeOptimizer(*table.optimizer, absl::StrCat(path, ".optimizer"),
                         config->mutable_optimizer());
}

void DecodeTables(const v1::ModelConfig& config, const v1::ModelPlan& plan, Model* model) {
  absl::flat_hash_map<std::string, std::pair<const v1::StackPlan*, const v1::TablePlan*>> place_of;
  for (const v1::StackPlan& stack : plan.stacks()) {
    StackInfo& info = model->stacks.emplace_back(StackInfo{stack.name(),
                                                           stack.embedding_dim(),
                                                           stack.rows_per_partition(),
                                                           stack.bytes_per_partition(),
                                                           {}});
    for (const v1::TablePlan& table : stack.tables()) {
      info.tables.push_back(table.name());
      place_of[table.name()] = {&stack, &table};
    }
  }
  for (const v1::TableConfig& table : config.tables()) {
    TableInfo& info = model->tables.emplace_back();
    info.name = table.name();
    info.vocabulary_size = table.vocabulary_size();
    info.embedding_dim = table.embedding_dim();
    info.combiner = absl::AsciiStrToLower(v1::Combiner_Name(table.combiner()));
    if (const v1::QuantizationConfig& given = table.quantization(); table.has_quantization()) {
      info.quantization = {given.lower(), given.upper(), static_cast<double>(given.num_buckets())};
    }
    if (const auto place = place_of.find(config::StoredTable(config, table).name());
        place != place_of.end()) {
      const auto& [stack, placed] = place->second;
      info.stack = stack->name();
      info.optimizer = stack->optimizer();
      info.slots.assign(stack->slots().begin(), stack->slots().end());
      info.row_offset = placed->row_offset();
      info.shard_rotation = placed->shard_rotation();
    }
  }
}

}  // namespace

absl::Status EncodeOptimizer(const Optimizer& optimizer, const std::string& path,
                             v1::OptimizerConfig* config) {
  const Descriptor& common = *v1::OptimizerConfig::descriptor();
  const FieldDescriptor* kind = common.FindFieldByName(optimizer.name);
  if (kind == nullptr || IsParameter(kind)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": there is no optimizer \"",
                                                   optimizer.name,
                                                   "\"; there are: ", Names({&common}, false)));
  }
  Message* details = config->GetReflection()->MutableMessage(config, kind);
  for (const auto& [name, value] : optimizer.parameters) {
    const FieldDescriptor* shared = common.FindFieldByName(name);
    const FieldDescriptor* own = kind->message_type()->FindFieldByName(name);
    const bool is_shared = IsParameter(shared);
    if (!is_shared && !IsParameter(own)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ".", name, ": ", optimizer.name,
          " has no such parameter; it has: ", Names({&common, kind->message_type()}, true)));
    }
    RETURN_IF_ERROR(SetParameter(absl::StrCat(path, ".", name), is_shared ? shared : own, value,
                                 is_shared ? config : details));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ModelConfig> EncodeModel(const ModelDescription& description) {
  v1::ModelConfig config;
  config.set_name(description.name);
  config.set_seed(description.seed);
  for (size_t i = 0; i < description.tables.size(); ++i) {
    RETURN_IF_ERROR(
        EncodeTable(description.tables[i], absl::StrCat("tables[", i, "]"), config.add_tables()));
  }
  for (const FeatureDescription& feature : description.features) {
    v1::FeatureConfig* added = config.add_features();
    added->set_name(feature.name);
    added->set_table(feature.table);
    added->set_batch_size(feature.batch_size);
  }
  RETURN_IF_ERROR(EncodeOptimizer(description.optimizer, "optimizer", config.mutable_optimizer()));
  return config;
}

absl::StatusOr<Model> DecodeModel(uint64_t id, bool created, const v1::ModelConfig& config,
                                  const v1::ModelPlan& plan) {
  if (id == 0) return absl::InternalError("model_id: the server sent 0");
  Model model;
  model.id = id;
  model.name = config.name();
  model.created = created;
  model.shards = plan.shards();
  model.sparsecores_per_shard = plan.sparsecores_per_shard();
  model.table_bytes = plan.table_bytes();
  model.warnings.assign(plan.warnings().begin(), plan.warnings().end());
  DecodeTables(config, plan, &model);
  for (const TableInfo& table : model.tables) {
    if (table.embedding_dim < 1) {
      return absl::InternalError(absl::StrCat("config: the server sent embedding_dim ",
                                              table.embedding_dim, " of table \"", table.name,
                                              "\""));
    }
    if (table.stack.empty()) {
      return absl::InternalError(
          absl::StrCat("plan: the server placed table \"", table.name, "\" in no stack"));
    }
  }
  for (const v1::FeatureConfig& feature : config.features()) {
    const TableInfo* table = model.FindTable(feature.table());
    if (table == nullptr) {
      return absl::InternalError(absl::StrCat("config: feature \"", feature.name(),
                                              "\" looks up no table of the model: \"",
                                              feature.table(), "\""));
    }
    model.features.push_back({feature.name(),
                              feature.table(),
                              table->embedding_dim,
                              {feature.output_shape().begin(), feature.output_shape().end()}});
  }
  return model;
}

ClusterStatus DecodeStatus(const v1::GetStatusResponse& response) {
  ClusterStatus status;
  status.version = response.version();
  status.uptime_ms = response.uptime_ms();
  status.batches = response.batches();
  status.batch_bytes = response.batch_bytes();
  for (const v1::ModelStatus& model : response.models()) {
    status.models.push_back({model.model_id(), model.name(), model.tables(), model.stacks(),
                             model.table_bytes(), model.lost()});
  }
  for (const v1::ShardStatus& shard : response.shards()) {
    status.shards.push_back({shard.index(), shard.address(), shard.reachable(), shard.error(),
                             shard.incarnation(), shard.uptime_ms(), shard.models(),
                             shard.table_bytes(), shard.batches(), shard.batch_bytes(),
                             shard.rows_gathered(), shard.rows_updated()});
  }
  return status;
}

const TableInfo* Model::FindTable(const std::string& table) const {
  for (const TableInfo& info : tables) {
    if (info.name == table) return &info;
  }
  return nullptr;
}

const FeatureInfo* Model::FindFeature(const std::string& feature) const {
  for (const FeatureInfo& info : features) {
    if (info.name == feature) return &info;
  }
  return nullptr;
}

CheckpointInfo DecodeCheckpoint(const v1::CheckpointInfo& message) {
  CheckpointInfo info;
  info.model = message.model();
  info.name = message.name();
  info.saved_at = absl::FromUnixMillis(message.saved_at_ms());
  info.bytes = message.bytes();
  info.rows = message.rows();
  info.parent = message.parent();
  info.chain = message.chain();
  for (const v1::GroupStep& group : message.groups()) {
    info.groups.push_back({group.group(), group.next_step()});
  }
  info.automatic = message.automatic();
  info.changes = message.changes();
  return info;
}

CheckpointList DecodeCheckpoints(const v1::ListCheckpointsResponse& message) {
  CheckpointList list;
  for (const v1::CheckpointInfo& info : message.checkpoints()) {
    list.checkpoints.push_back(DecodeCheckpoint(info));
  }
  list.damaged.assign(message.damaged().begin(), message.damaged().end());
  return list;
}

CheckpointProgress DecodeProgress(const v1::CheckpointProgress& message) {
  return {message.phase(), message.bytes(), message.total_bytes(),
          absl::Milliseconds(message.elapsed_ms())};
}

}  // namespace emberd::client
