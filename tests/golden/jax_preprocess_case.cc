#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/sort_and_merge.h"
#include "tests/golden/jax_case_kinds.h"
#include "tests/golden/jax_device_buffer.h"

namespace emberd::preprocess {
namespace {

using nlohmann::json;

struct Options {
  explicit Options(const json& options)
      : local_devices(options.at("local_device_count")),
        devices(options.at("global_device_count")),
        slots(options.at("num_sc_per_device")),
        allow_dropping(options.at("allow_id_dropping")),
        minibatching(options.at("enable_minibatching")),
        stack_then_split(options.value("stacking_strategy", "") == "STACK_THEN_SPLIT") {}

  absl::Status Check() const {
    if (local_devices <= 0 || devices < local_devices || slots <= 0) {
      return absl::InvalidArgumentError("device and SparseCore counts must be positive");
    }
    if (devices > kMaxPartitions || slots > kMaxPartitions || partitions() > kMaxPartitions) {
      return absl::InvalidArgumentError(
          absl::StrCat(devices, " devices of ", slots,
                       " SparseCores are too many; allowed: ", kMaxPartitions, " SparseCores"));
    }
    if (!IsPowerOfTwo(partitions())) {
      return absl::InvalidArgumentError(
          absl::StrCat(partitions(), " SparseCores are not a power of two"));
    }
    return absl::OkStatus();
  }
  int64_t partitions() const { return devices * slots; }

  int64_t local_devices, devices, slots;
  bool allow_dropping, minibatching, stack_then_split;
};

// One feature on one host, as FeatureInput points to it.
struct HostFeature {
  std::vector<int64_t> splits = {0}, ids;
  std::vector<float> weights;
  FeatureInput input;

  explicit HostFeature(const json& feature) {
    for (const json& sample : feature.at("ids")) {
      for (const json& id : sample) ids.push_back(id.get<int64_t>());
      splits.push_back(static_cast<int64_t>(ids.size()));
    }
    if (feature.contains("weights") && !feature.at("weights").is_null()) {
      for (const json& sample : feature.at("weights")) {
        for (const json& weight : sample) weights.push_back(weight.get<float>());
      }
      input.has_weights = true;
    }
    input.ids = RaggedInput{absl::MakeConstSpan(splits), absl::MakeConstSpan(ids)};
    input.weights = weights;
  }
  HostFeature(const HostFeature&) = delete;
  int64_t samples() const { return static_cast<int64_t>(splits.size()) - 1; }
};
using HostFeatures = std::vector<std::unique_ptr<HostFeature>>;

// A stack of the case, the same on all hosts.
struct Stack {
  std::string name;
  std::vector<json> features;  // ascending in row_offset
  StackShape shape;
  PartitionLimits limits;
  int64_t coo_buffer_size = 0;
};

// One stack on one device.
struct DeviceStack {
  std::vector<SlotCsr> slots;
  std::vector<SlotBuckets> buckets;
  // Observed in the first pass: [slots][partitions].
  std::vector<std::vector<int64_t>> ids, unique;
};

class Runner {
 public:
  Runner(const json& input, const JaxCaseOptions& rules)
      : input_(input), rules_(rules), options_(input.at("options")) {}

  absl::StatusOr<json> Run() {
    absl::Status status = options_.Check();
    if (status.ok()) status = ReadHosts();
    if (status.ok()) status = ReadStacks();
    if (status.ok()) status = SortAll();
    if (status.ok()) status = options_.minibatching ? Cut() : Drop();
    if (!status.ok()) {
      return json{{"fatal", std::string(status.message())},
                  {"code", absl::StatusCodeToString(status.code())}};
    }
    json hosts = json::array();
    for (size_t h = 0; h < hosts_.size(); ++h) hosts.push_back(HostResult(h));
    return json{{"hosts", std::move(hosts)}};
  }

 private:
  absl::Status ReadHosts() {
    for (const json& host : input_.at("hosts")) {
      HostFeatures features;
      for (const json& feature : host.at("features")) {
        features.push_back(std::make_unique<HostFeature>(feature));
        const HostFeature& read = *features.back();
        if (read.input.has_weights && read.weights.size() != read.ids.size()) {
          return absl::InvalidArgumentError(absl::StrCat("there are ", read.weights.size(),
                                                         " weights for ", read.ids.size(), " ids"));
        }
      }
      hosts_.push_back(std::move(features));
    }
    return absl::OkStatus();
  }

  absl::Status ReadStacks() {
    for (const auto& [name, features] : input_.at("stacks").items()) {
      Stack stack;
      stack.name = name;
      stack.features.assign(features.begin(), features.end());
      std::stable_sort(
          stack.features.begin(), stack.features.end(), [](const json& a, const json& b) {
            return a.at("row_offset").get<int64_t>() < b.at("row_offset").get<int64_t>();
          });
      if (stack.features.empty()) return absl::InvalidArgumentError("a stack has no features");
      const json& first = stack.features.front();
      stack.limits = {first.at("max_ids_per_partition"), first.at("max_unique_ids_per_partition")};
      if (absl::Status status = SetBufferSize(&stack); !status.ok()) return status;
      if (absl::Status status = SetShape(&stack); !status.ok()) return status;
      stacks_.push_back(std::move(stack));
    }
    return absl::OkStatus();
  }

  absl::Status SetBufferSize(Stack* stack) const {
    const int64_t theoretical = RoundUp(stack->limits.ids, kCsrAlignment) * options_.slots *
                                options_.partitions() * (options_.minibatching ? kBuckets : 1);
    stack->coo_buffer_size = theoretical;
    const json& suggested = stack->features.front().at("suggested_coo_buffer_size_per_device");
    if (!suggested.is_null()) {
      stack->coo_buffer_size = RoundUp(suggested.get<int64_t>(), kCsrAlignment * options_.slots);
      if (stack->coo_buffer_size > theoretical) {
        return absl::InvalidArgumentError(
            absl::StrCat("suggested_coo_buffer_size_per_device of stack '", stack->name, "' is ",
                         stack->coo_buffer_size, "; allowed: at most ", theoretical));
      }
    }
    if (stack->coo_buffer_size <= 0 ||
        stack->coo_buffer_size >= std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat("the buffer of stack '", stack->name,
                                                     "' would have ", stack->coo_buffer_size,
                                                     " entries; allowed: [1, 2^31 - 1)"));
    }
    return absl::OkStatus();
  }

  absl::Status SetShape(Stack* stack) const {
    StackShape& shape = stack->shape;
    shape.partitions = options_.partitions();
    shape.divide_by_zero = rules_.divide_by_zero;
    for (const json& feature : stack->features) {
      for (const char* field : {"row_offset", "col_offset", "col_shift"}) {
        const int64_t value = feature.at(field);
        if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
          return absl::InvalidArgumentError(absl::StrCat("stack '", stack->name, "': ", field,
                                                         " is ", value, "; allowed: [0, 2^31)"));
        }
      }
    }
    for (const json& feature : stack->features) {
      const int64_t row_offset = feature.at("col_offset").get<int64_t>() / shape.partitions;
      shape.features.push_back({row_offset,
                                feature.at("col_shift").get<int64_t>() % shape.partitions,
                                CombinerOf(feature.at("combiner").get<std::string>())});
      const size_t index = feature.at("feature_index");
      for (const HostFeatures& host : hosts_) {
        if (index >= host.size()) return absl::InvalidArgumentError("feature_index out of range");
        for (int64_t id : host[index]->ids) {
          if (id < 0) return absl::InvalidArgumentError(absl::StrCat("id ", id, " is negative"));
          shape.rows_per_partition =
              std::max(shape.rows_per_partition, id / shape.partitions + row_offset + 1);
        }
      }
    }
    if (shape.partition_bits() + shape.row_bits() > 32) {
      return absl::InvalidArgumentError("a stacked id needs more than 32 bits");
    }
    return absl::OkStatus();
  }

  const HostFeature& FeatureOn(size_t host, const json& feature) const {
    return *hosts_[host][feature.at("feature_index").get<size_t>()];
  }

  // Where the samples of device `d` lie in its slots.
  absl::StatusOr<std::vector<SlotLayout>> LayOut(size_t host, const Stack& stack, int64_t d) const {
    int64_t device_batch = 0;
    for (const json& feature : stack.features) {
      device_batch += FeatureOn(host, feature).samples() / options_.local_devices;
    }
    const auto features = static_cast<int64_t>(stack.features.size());
    if (device_batch % options_.slots != 0 || device_batch < options_.slots * features) {
      return absl::InvalidArgumentError(absl::StrCat("the batch of stack '", stack.name,
                                                     "' on a device is ", device_batch,
                                                     "; it must be a multiple of ", options_.slots,
                                                     " and at least ", options_.slots * features));
    }
    const int64_t slot_batch = device_batch / options_.slots;
    std::vector<SlotLayout> layout(options_.slots);
    for (int64_t f = 0; f < features; ++f) {
      const int64_t samples = FeatureOn(host, stack.features[f]).samples();
      const int64_t row_offset = stack.features[f].at("row_offset");
      if (options_.stack_then_split) {
        const int64_t part = samples / options_.local_devices;
        AddSplitSlices(static_cast<int>(f), d * part, part, row_offset / options_.devices,
                       slot_batch, &layout);
        continue;
      }
      const int64_t part = samples / (options_.local_devices * options_.slots);
      for (int64_t s = 0; s < options_.slots && part > 0; ++s) {
        const int64_t slot_begin = row_offset / options_.partitions();
        layout[s].slices.push_back({static_cast<int>(f), (d * options_.slots + s) * part, part,
                                    static_cast<int32_t>(slot_begin)});
      }
    }
    for (SlotLayout& slot : layout) {
      slot.samples = static_cast<int32_t>(slot_batch);
      for (const SlotSlice& slice : slot.slices) {
        if (slice.slot_begin + slice.count > kMaxStackSamples) {
          return absl::InvalidArgumentError(absl::StrCat(
              "stack '", stack.name, "' has samples beyond the ", kMaxStackSamples, "th"));
        }
        slot.samples = std::max<int32_t>(slot.samples, slice.slot_begin + slice.count);
      }
    }
    return layout;
  }

  // Cuts rows [row, row + count) of a device, which hold samples from `begin` on, at slot borders.
  void AddSplitSlices(int feature, int64_t begin, int64_t count, int64_t row, int64_t slot_batch,
                      std::vector<SlotLayout>* layout) const {
    while (count > 0 && row / slot_batch < options_.slots) {
      const int64_t slot = row / slot_batch;
      const int64_t here = std::min(count, (slot + 1) * slot_batch - row);
      (*layout)[slot].slices.push_back(
          {feature, begin, here, static_cast<int32_t>(row % slot_batch)});
      begin += here;
      row += here;
      count -= here;
    }
  }

  absl::Status SortAll() {
    SlotScratch scratch;
    devices_.resize(hosts_.size());
    for (size_t h = 0; h < hosts_.size(); ++h) {
      for (const Stack& stack : stacks_) {
        std::vector<const FeatureInput*> inputs;
        for (const json& feature : stack.features) inputs.push_back(&FeatureOn(h, feature).input);
        const GainKind kind = GainKindOf(stack.shape, inputs);
        std::vector<DeviceStack>& devices = devices_[h].emplace_back(options_.local_devices);
        for (int64_t d = 0; d < options_.local_devices; ++d) {
          const auto layout = LayOut(h, stack, d);
          if (!layout.ok()) return layout.status();
          DeviceStack& device = devices[d];
          device.slots.resize(options_.slots);
          device.buckets.resize(options_.slots);
          for (int64_t s = 0; s < options_.slots; ++s) {
            SortSlot(stack.shape, inputs, (*layout)[s], kind, &scratch,
                     &device.buckets[s].multiplicity, &device.slots[s]);
            Observe(device.slots[s], &device);
          }
        }
      }
    }
    return absl::OkStatus();
  }

  void Observe(const SlotCsr& slot, DeviceStack* device) const {
    const int32_t* ids = slot.partition_ids.data();
    const int32_t* unique = slot.partition_unique.data();
    device->ids.emplace_back(ids, ids + slot.partitions);
    device->unique.emplace_back(unique, unique + slot.partitions);
  }

  // Calls visit(stack, device) for every stack of every device of every host.
  template <typename Visit>
  void ForEachDevice(Visit visit) {
    for (auto& host : devices_) {
      for (size_t k = 0; k < stacks_.size(); ++k) {
        for (DeviceStack& device : host[k]) visit(stacks_[k], &device);
      }
    }
  }

  // The first stack and pair over the limits, as an error.
  absl::Status CheckLimits() {
    absl::Status status;
    ForEachDevice([&](const Stack& stack, DeviceStack* device) {
      for (size_t s = 0; s < device->ids.size(); ++s) {
        for (size_t p = 0; p < device->ids[s].size() && status.ok(); ++p) {
          if (!stack.limits.Exceeded(device->ids[s][p], device->unique[s][p])) continue;
          status = absl::ResourceExhaustedError(absl::StrCat(
              "stack '", stack.name, "': partition ", p, " gets ", device->ids[s][p], " ids and ",
              device->unique[s][p], " unique ids from source slot ", s,
              "; allowed: ", stack.limits.ids, " (max_ids_per_partition) and ", stack.limits.unique,
              " (max_unique_ids_per_partition); raise the limits, reduce the batch or allow id "
              "dropping"));
        }
      }
    });
    return status;
  }

  // Without mini-batching: entries over the limits are dropped or refused.
  absl::Status Drop() {
    if (absl::Status status = CheckLimits(); status.ok() || !options_.allow_dropping) return status;
    BucketRule rule;  // one bucket holds every row
    rule.hash = v1::ID_RANGE;
    rule.rows_per_bucket = std::numeric_limits<int64_t>::max();
    const BucketMemo memo(rule, {}, /*memory=*/nullptr);
    SlotCsr kept;
    Buffer<int32_t> positions;
    ForEachDevice([&](const Stack& stack, DeviceStack* device) {
      for (size_t s = 0; s < device->slots.size(); ++s) {
        SlotBuckets& buckets = device->buckets[s];
        FillBuckets(memo, stack.limits, DropRule::kJax, device->slots[s], &buckets);
        CutSlot(device->slots[s], buckets, 0, &positions, &kept);
        std::swap(device->slots[s], kept);
      }
    });
    return absl::OkStatus();
  }

  // With mini-batching: cuts are found over all stacks, devices and hosts.
  absl::Status Cut() {
    if (CheckLimits().ok()) return absl::OkStatus();
    const DropRule drop = options_.allow_dropping ? DropRule::kJax : DropRule::kKeep;
    const auto partitions = static_cast<int>(options_.partitions());
    absl::Status status;
    ForEachDevice([&](const Stack& stack, DeviceStack* device) {
      const BucketMemo memo(MakeBucketRule(v1::HIGHWAY_HASH, stack.shape), stack.shape,
                            /*memory=*/nullptr);
      for (size_t s = 0; s < device->slots.size(); ++s) {
        FillBuckets(memo, stack.limits, drop, device->slots[s], &device->buckets[s]);
        const Overflow overflow = WorstOverflow(device->buckets[s], partitions, stack.limits);
        if (options_.allow_dropping || !overflow.found() || !status.ok()) continue;
        status = absl::ResourceExhaustedError(
            absl::StrCat("stack '", stack.name, "': bucket ", overflow.bucket, " of partition ",
                         overflow.partition, " gets ", overflow.ids, " ids and ", overflow.unique,
                         " unique ids from source slot ", s, "; allowed: ", stack.limits.ids,
                         " and ", stack.limits.unique));
      }
      cuts_ |= CutsOfStack(v1::JAX, stack.limits, device->buckets, partitions);
    });
    if (!status.ok()) return status;
    SlotCsr cut;
    Buffer<int32_t> positions;
    ForEachDevice([&](const Stack&, DeviceStack* device) {
      for (size_t s = 0; s < device->slots.size(); ++s) {
        CutSlot(device->slots[s], device->buckets[s], cuts_, &positions, &cut);
        std::swap(device->slots[s], cut);
      }
    });
    return absl::OkStatus();
  }

  json HostResult(size_t host) const {
    json stacks = json::object();
    for (size_t k = 0; k < stacks_.size(); ++k) {
      stacks[stacks_[k].name] = StackResult(stacks_[k], devices_[host][k]);
    }
    return {{"num_minibatches", MinibatchCount(cuts_)}, {"stacks", std::move(stacks)}};
  }

  json StackResult(const Stack& stack, const std::vector<DeviceStack>& devices) const {
    std::vector<int64_t> max_ids, max_unique, required;
    int64_t dropped = 0;
    json buffers = json::array();
    for (const DeviceStack& device : devices) {
      for (int64_t p = 0; p < options_.partitions(); ++p) {
        int64_t ids = 0, unique = 0;
        for (int64_t s = 0; s < options_.slots; ++s) {
          ids = std::max(ids, device.ids[s][p]);
          unique = std::max(unique, device.unique[s][p]);
        }
        max_ids.push_back(ids);
        max_unique.push_back(unique);
      }
      for (int64_t s = 0; s < options_.slots; ++s) {
        int64_t cells = 0;
        for (int64_t ids : device.ids[s]) cells += AlignCsr(ids);
        required.push_back(cells);
        dropped += device.slots[s].dropped;
      }
      const JaxDeviceBuffer buffer =
          FillJaxDeviceBuffer(device.slots, stack.coo_buffer_size, options_.minibatching);
      dropped += buffer.dropped;
      buffers.push_back(BufferResult(buffer));
    }
    const int64_t segments = options_.slots * (options_.minibatching ? kBuckets : 1);
    return {{"row_pointers_size_per_device",
             std::max<int64_t>(options_.partitions(), kCsrAlignment) * segments},
            {"coo_buffer_size_per_device", stack.coo_buffer_size},
            {"stats",
             {{"max_ids_per_partition", max_ids},
              {"max_unique_ids_per_partition", max_unique},
              {"required_buffer_sizes", required},
              {"dropped_id_count", dropped}}},
            {"devices", std::move(buffers)}};
  }

  static json GainResult(float gain) {
    if (std::isnan(gain)) return "NaN";
    if (std::isinf(gain)) return gain > 0 ? "Infinity" : "-Infinity";
    return gain;
  }

  static json BufferResult(const JaxDeviceBuffer& buffer) {
    json ids = json::array(), samples = json::array(), gains = json::array();
    for (size_t i = 0; i < buffer.written.size(); ++i) {
      ids.push_back(buffer.written[i] ? json(buffer.embedding_ids[i]) : json());
      samples.push_back(buffer.written[i] ? json(buffer.sample_ids[i]) : json());
      gains.push_back(buffer.written[i] ? GainResult(buffer.gains[i]) : json());
    }
    return {{"row_pointers", buffer.row_pointers},
            {"embedding_ids", std::move(ids)},
            {"sample_ids", std::move(samples)},
            {"gains", std::move(gains)}};
  }

  const json& input_;
  const JaxCaseOptions rules_;
  const Options options_;
  std::vector<HostFeatures> hosts_;
  std::vector<Stack> stacks_;
  std::vector<std::vector<std::vector<DeviceStack>>> devices_;  // [host][stack][device]
  CutSet cuts_ = 0;
};

}  // namespace

absl::StatusOr<json> JaxPreprocessCase(const json& input, const JaxCaseOptions& options) {
  return Runner(input, options).Run();
}

}  // namespace emberd::preprocess
