#include "preprocess/batch/preprocessor.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/optimizers.h"

namespace emberd::preprocess {
namespace {

void FillSpans(const std::vector<int64_t>& feature_samples, StackBatch* batch) {
  batch->spans.resize(batch->layout.size());
  for (size_t s = 0; s < batch->layout.size(); ++s) {
    batch->spans[s].clear();
    int64_t canonical = 0;
    int feature = 0;
    for (const SlotSlice& slice : batch->layout[s].slices) {
      for (; feature < slice.feature; ++feature) canonical += feature_samples[feature];
      batch->spans[s].push_back({slice.slot_begin,
                                 static_cast<int32_t>(canonical + slice.sample_begin),
                                 static_cast<int32_t>(slice.count)});
    }
  }
}

CsrSegmentView SegmentView(const SlotCsr& csr, int minibatch, int first_partition, int partitions) {
  CsrSegmentView view;
  view.base = csr.Begin(minibatch, first_partition);
  const int64_t first = int64_t{minibatch} * csr.partitions + first_partition;
  view.row_ends = absl::MakeConstSpan(csr.row_ends.data() + first, partitions);
  const size_t cells = view.row_ends.back() - view.base;
  view.embedding_ids = absl::MakeConstSpan(csr.embedding_ids.data() + view.base, cells);
  view.sample_ids = absl::MakeConstSpan(csr.sample_ids.data() + view.base, cells);
  view.gains = absl::MakeConstSpan(csr.gains.data() + view.base, cells);
  return view;
}

}  // namespace

void PreprocessedBatch::LayOut(const Plan& plan, v1::SampleLayout layout,
                               absl::Span<const FeatureInput> inputs) {
  plan_ = &plan;
  bucketed_ = false;
  stacks_.resize(plan.stacks.size());
  feature_samples_.resize(inputs.size());
  feature_sample_begin_.resize(inputs.size());
  const int slots = plan.topology.sparsecores_per_shard;
  for (size_t k = 0; k < stacks_.size(); ++k) {
    StackBatch& batch = stacks_[k];
    batch.inputs.clear();
    batch.feature_samples.clear();
    batch.samples = 0;
    batch.single_rows = true;
    for (const FeaturePlan& feature : plan.stacks[k].features) {
      const FeatureInput& input = inputs[feature.feature];
      const int64_t samples = SampleCount(input);
      batch.inputs.push_back(&input);
      batch.feature_samples.push_back(samples);
      feature_samples_[feature.feature] = samples;
      feature_sample_begin_[feature.feature] = batch.samples;
      batch.samples += samples;
      batch.single_rows = batch.single_rows && HasSingleIds(input);
    }
    LayOutSamples(layout, batch.feature_samples, slots, &batch.layout);
    FillSpans(batch.feature_samples, &batch);
    batch.slots.resize(slots);
    batch.buckets.resize(slots);
  }
}

std::vector<StackBatchView> PreprocessedBatch::ShardView(int shard) const {
  const int slots = plan_->topology.sparsecores_per_shard;
  std::vector<StackBatchView> views(stacks_.size());
  for (size_t k = 0; k < stacks_.size(); ++k) {
    const StackBatch& batch = stacks_[k];
    StackBatchView& view = views[k];
    view.stack = static_cast<int>(k);
    view.sample_count = static_cast<int32_t>(batch.samples);
    view.feature_samples = batch.feature_samples;
    view.single_rows = batch.single_rows;
    view.slots = slots;
    view.minibatches = batch.slots.front().minibatches;
    view.segments.reserve(int64_t{slots} * view.minibatches);
    for (int s = 0; s < slots; ++s) {
      for (int m = 0; m < view.minibatches; ++m) {
        view.segments.push_back(SegmentView(batch.slots[s], m, shard * slots, slots));
      }
      view.spans.emplace_back(batch.spans[s]);
    }
  }
  return views;
}

int64_t PreprocessedBatch::bytes() const {
  int64_t bytes = sizeof(*this);
  for (const StackBatch& batch : stacks_) {
    for (const SlotCsr& csr : batch.slots) bytes += csr.bytes();
    for (const SlotBuckets& buckets : batch.buckets) bytes += buckets.bytes();
    for (const auto& spans : batch.spans)
      bytes += static_cast<int64_t>(spans.capacity() * sizeof(SampleSpan));
  }
  return bytes;
}

namespace {

// Idle batches and scratch kept; more batches or tasks at a time cost allocations only.
constexpr size_t kIdleBatches = 16;
constexpr size_t kIdleScratch = 64;
// Memory for the buckets of rows, one byte each; rows of the stacks beyond are hashed each time.
constexpr int64_t kBucketBytes = int64_t{256} << 20;

StackShape ShapeOf(const Plan& plan, const StackPlan& stack) {
  StackShape shape;
  shape.partitions = plan.topology.partitions();
  shape.rows_per_partition = stack.rows_per_partition;
  for (const FeaturePlan& feature : stack.features) {
    const TablePlan& table = stack.tables[feature.table_in_stack];
    shape.features.push_back({table.row_offset, table.shard_rotation, feature.combiner});
  }
  return shape;
}

DropRule DropRuleOf(const v1::PlanConfig& plan) {
  if (!plan.allow_id_dropping()) return DropRule::kKeep;
  return plan.rules() == v1::TENSORFLOW ? DropRule::kTensorFlow : DropRule::kJax;
}

// ---- What is done to a finished batch

// Cuts a slot off at `capacity` cells, a multiple of 8; later mini-batches become empty.
void CutOff(int64_t capacity, SlotCsr* csr) {
  int64_t begin = 0;  // before anything was cut off
  for (int64_t at = 0; at < int64_t{csr->minibatches} * csr->partitions; ++at) {
    int32_t& row_end = csr->row_ends.data()[at];
    const int64_t end = row_end;
    csr->dropped += std::max<int64_t>(0, end - std::max(begin, capacity));
    row_end = static_cast<int32_t>(std::min(end, capacity));
    begin = AlignCsr(end);
  }
  csr->cells = std::min(csr->cells, capacity);
}

int64_t EntriesBehind(int64_t capacity, const SlotCsr& csr) {
  int64_t behind = 0;
  for (int m = 0; m < csr.minibatches; ++m) {
    for (int p = 0; p < csr.partitions; ++p) {
      const int64_t begin = std::max<int64_t>(csr.Begin(m, p), capacity);
      behind += std::max<int64_t>(0, csr.End(m, p) - begin);
    }
  }
  return behind;
}

absl::Status FitStack(const PartitionLimits& limits, bool drop, const StackPlan& plan,
                      StackBatch* stack) {
  int64_t needed = 0;
  for (const SlotCsr& slot : stack->slots) needed += slot.cells;
  const int64_t samples = std::max({stack->samples, plan.samples, int64_t{1}});
  stack->ids_per_sample = (needed + samples - 1) / samples;
  const int minibatches = stack->slots.front().minibatches;
  if (limits.minibatches > 0 && minibatches > limits.minibatches) {
    return absl::ResourceExhaustedError(
        absl::StrCat("stack '", plan.name, "': the batch makes ", minibatches,
                     " mini-batches; max_minibatches_per_sparsecore is ", limits.minibatches,
                     ". Raise it or the limits of ids per partition, or send fewer ids"));
  }
  const int64_t capacity = AlignCsr(limits.ids_per_sample * samples);
  if (limits.ids_per_sample == 0 || needed <= capacity) return absl::OkStatus();
  int64_t used = 0, remaining = 0;
  for (SlotCsr& slot : stack->slots) {
    const int64_t room = std::max<int64_t>(0, capacity - used);
    used += slot.cells;
    if (drop) {
      CutOff(room, &slot);
    } else {
      remaining += EntriesBehind(room, slot);
    }
  }
  if (drop || remaining == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "stack '", plan.name, "' needs ", needed, " cells of its buffer of ids, whose capacity is ",
      capacity, " (max_ids_per_chip_per_sample ", limits.ids_per_sample, " x ", samples,
      " samples); ids that do not fit: ", remaining, ". Raise max_ids_per_chip_per_sample to ",
      stack->ids_per_sample, ", set allow_id_dropping, or send fewer ids"));
}

// Entries of a slot that were not dropped.
int64_t KeptEntries(const SlotCsr& slot) {
  if (slot.dropped == 0) return slot.entries;
  int64_t kept = 0;
  for (int m = 0; m < slot.minibatches; ++m) {
    for (int p = 0; p < slot.partitions; ++p) kept += slot.End(m, p) - slot.Begin(m, p);
  }
  return kept;
}

int64_t SamplesOfFullestSlot(const std::vector<std::vector<SampleSpan>>& slots) {
  int64_t samples = 0;
  for (const std::vector<SampleSpan>& spans : slots) {
    for (const SampleSpan& span : spans) {
      samples = std::max(samples, int64_t{span.slot_begin} + span.count);
    }
  }
  return samples;
}

void WriteCounts(const StackBatch& batch, v1::StackStatistics* out) {
  int64_t ids = 0, unique = 0, duplicates = 0, max_ids = 0, max_unique = 0, fullest = 0, cells = 0,
          dropped = 0;
  for (const SlotCsr& slot : batch.slots) {
    ids += slot.entries;
    duplicates += slot.duplicates;
    cells += slot.cells;
    dropped += slot.dropped;
  }
  const int partitions = batch.slots.front().partitions;
  for (int p = 0; p < partitions; ++p) {
    int64_t ids_here = 0, unique_here = 0;
    for (const SlotCsr& slot : batch.slots) {
      ids_here += slot.partition_ids.data()[p];
      max_ids = std::max<int64_t>(max_ids, slot.partition_ids.data()[p]);
      unique_here = std::max<int64_t>(unique_here, slot.partition_unique.data()[p]);
    }
    fullest = std::max(fullest, ids_here);
    max_unique = std::max(max_unique, unique_here);
    unique += unique_here;
  }
  out->set_ids(ids);
  out->set_unique_ids(unique);
  out->set_duplicate_ids(duplicates);
  out->set_max_ids_per_partition(max_ids);
  out->set_max_unique_ids_per_partition(max_unique);
  out->set_required_buffer_size(cells);
  out->set_dropped_ids(dropped);
  out->set_ids_per_chip_per_sample(batch.ids_per_sample);
  if (ids > 0) out->set_imbalance(static_cast<double>(fullest) * partitions / ids);
}

void WriteCost(const StackPlan& plan, const PartitionLimits& limits, v1::DataType storage_dtype,
               const StackBatch& batch, v1::StackStatistics* out) {
  int64_t entries = 0;
  for (const SlotCsr& slot : batch.slots) entries += KeptEntries(slot);
  out->set_pad_cells(out->required_buffer_size() - entries);
  out->set_bytes_gathered(entries * plan.embedding_dim * config::WeightBytes(storage_dtype));
  out->set_activation_bytes_per_sparsecore(SamplesOfFullestSlot(batch.spans) * plan.embedding_dim *
                                           static_cast<int64_t>(sizeof(float)));
  out->set_limit_ids_per_partition(limits.ids);
  out->set_limit_unique_ids_per_partition(limits.unique);
}

// From the counters of a finished batch, without reading its entries; reuses the memory of
// `statistics`. `model` and `plan` belong together; `limits`: by stack.
void WriteStatistics(const v1::ModelConfig& model, const Plan& plan,
                     const std::vector<PartitionLimits>& limits,
                     const std::vector<StackBatch>& stacks, v1::BatchStatistics* statistics) {
  statistics->Clear();
  int minibatches = 1;
  for (size_t k = 0; k < stacks.size(); ++k) {
    const StackPlan& stack = plan.stacks[k];
    v1::StackStatistics* out = statistics->add_stacks();
    out->set_stack(stack.name);
    WriteCounts(stacks[k], out);
    // Tables of a stack agree on their storage type.
    WriteCost(stack, limits[k], model.tables(stack.tables.front().table).storage_dtype(), stacks[k],
              out);
    minibatches = std::max(minibatches, stacks[k].slots.front().minibatches);
  }
  statistics->set_num_minibatches(minibatches);
}

}  // namespace

absl::Status FitBuffers(const std::vector<PartitionLimits>& limits, bool drop, const Plan& plan,
                        std::vector<StackBatch>* stacks) {
  absl::Status status;
  for (size_t k = 0; k < stacks->size(); ++k) {
    status.Update(FitStack(limits[k], drop, plan.stacks[k], &(*stacks)[k]));
  }
  return status;
}

absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Preprocessor::Run(
    absl::Span<const FeatureInput> inputs) {
  SortedBatch sorted(&batches_);
  RETURN_IF_ERROR(Sort(inputs, &sorted));
  CutSet cuts = 0;
  if (sorted.needs_minibatches()) {
    ASSIGN_OR_RETURN(cuts, FindCuts(&sorted));
  }
  return Finish(&sorted, cuts);
}

absl::StatusOr<std::unique_ptr<SortedBatch>> Preprocessor::Sort(
    absl::Span<const FeatureInput> inputs) {
  auto sorted = std::make_unique<SortedBatch>(&batches_);
  RETURN_IF_ERROR(Sort(inputs, sorted.get()));
  return sorted;
}

Preprocessor::Preprocessor(const v1::ModelConfig* model, const Plan* plan, CpuPool* cpu,
                           const Preprocessor* alike)
    : model_(*model),
      plan_(*plan),
      drop_rule_(DropRuleOf(model->plan())),
      cpu_(cpu),
      scratch_(kIdleScratch),
      batches_(kIdleBatches) {
  std::vector<PartitionLimits> limits;
  for (const StackPlan& stack : plan_.stacks) {
    StackInfo info;
    info.shape = ShapeOf(plan_, stack);
    stacks_.push_back(std::move(info));
    limits.push_back(stack.limits);
  }
  SetLimits(std::move(limits));
  if (alike == nullptr) {
    RememberBuckets();
  } else {
    stacks_ = alike->stacks_;
    bucket_memory_ = alike->bucket_memory_;
  }
}

void Preprocessor::SetLimits(std::vector<PartitionLimits> limits) {
  Limits shared = std::make_shared<const std::vector<PartitionLimits>>(std::move(limits));
  absl::MutexLock lock(&limits_mutex_);
  limits_.swap(shared);
}

Preprocessor::Limits Preprocessor::CurrentLimits() const {
  absl::MutexLock lock(&limits_mutex_);
  return limits_;
}

// Gives memory for buckets to the stacks, in order, as long as there is some.
void Preprocessor::RememberBuckets() {
  int64_t bytes = 0;
  std::vector<int64_t> begins;  // -1: the stack gets nothing
  for (const StackInfo& info : stacks_) {
    const BucketRule rule = MakeBucketRule(model_.plan().bucket_hash(), info.shape);
    const int64_t needed = BucketMemo::BytesFor(rule, info.shape);
    const bool fits = needed > 0 && bytes + needed <= kBucketBytes;
    begins.push_back(fits ? bytes : -1);
    if (fits) bytes += needed;
  }
  // Without memory for it, every row is hashed each time.
  uint8_t* known = nullptr;
  if (auto memory = MappedMemory::Map(bytes, /*huge_pages=*/true); memory.ok()) {
    known = reinterpret_cast<uint8_t*>(memory->data());
    bucket_memory_ = std::make_shared<const MappedMemory>(*std::move(memory));
  }
  for (size_t k = 0; k < stacks_.size(); ++k) {
    const StackShape& shape = stacks_[k].shape;
    const bool remembers = begins[k] >= 0 && known != nullptr;
    stacks_[k].buckets = BucketMemo(MakeBucketRule(model_.plan().bucket_hash(), shape), shape,
                                    remembers ? known + begins[k] : nullptr);
  }
}

absl::Status Preprocessor::Sort(absl::Span<const FeatureInput> inputs, SortedBatch* sorted) {
  PreprocessedBatch* batch = sorted->batch_.get();
  RETURN_IF_ERROR(Validate(inputs, &batch->feature_status_));
  batch->LayOut(plan_, model_.plan().sample_layout(), inputs);
  for (size_t k = 0; k < stacks_.size(); ++k) {
    StackBatch& stack = batch->stacks_[k];
    RETURN_IF_ERROR(CheckSize(k, stack));
    stack.gain_kind = GainKindOf(stacks_[k].shape, stack.inputs);
  }
  // TensorFlow may drop from what needs no cuts, too.
  batch->bucketed_ =
      drop_rule_ == DropRule::kTensorFlow || expect_cuts_.load(std::memory_order_relaxed);
  sorted->limits_ = CurrentLimits();
  ForEachSlot(batch, [&](size_t k, StackBatch* stack, int slot, SlotScratch* scratch) {
    Buffer<int32_t>* multiplicity =
        drop_rule_ != DropRule::kKeep ? &stack->buckets[slot].multiplicity : nullptr;
    SortSlot(stacks_[k].shape, stack->inputs, stack->layout[slot], stack->gain_kind, scratch,
             multiplicity, &stack->slots[slot]);
    if (batch->bucketed_) FillSlotBuckets(k, sorted->limits_, slot, stack);
  });
  RETURN_IF_ERROR(CheckWeightSums(*batch));
  sorted->needs_minibatches_ = NeedsMinibatches(*sorted);
  return absl::OkStatus();
}

void Preprocessor::FillSlotBuckets(size_t stack_index, const Limits& limits, int slot,
                                   StackBatch* stack) const {
  FillBuckets(stacks_[stack_index].buckets, (*limits)[stack_index], drop_rule_, stack->slots[slot],
              &stack->buckets[slot]);
}

absl::Status Preprocessor::Validate(absl::Span<const FeatureInput> inputs,
                                    std::vector<absl::Status>* found) {
  if (static_cast<int>(inputs.size()) != model_.features_size()) {
    return absl::InvalidArgumentError(absl::StrCat("features: there are ", inputs.size(),
                                                   "; the model has ", model_.features_size()));
  }
  found->assign(inputs.size(), absl::OkStatus());
  ParallelFor(cpu_, static_cast<int64_t>(inputs.size()), [&](int64_t f) {
    const auto [stack, position] = plan_.feature_at[f];
    const StackPlan& in = plan_.stacks[stack];
    const TablePlan& table = in.tables[in.features[position].table_in_stack];
    (*found)[f] = ValidateFeature(model_.features(static_cast<int>(f)).name(),
                                  table.vocabulary_size, inputs[f]);
  });
  for (const absl::Status& status : *found) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Refuses what 32-bit indices cannot hold.
absl::Status Preprocessor::CheckSize(size_t stack_index, const StackBatch& stack) const {
  const StackPlan& plan = plan_.stacks[stack_index];
  if (stack.samples > kMaxStackSamples) {
    return absl::InvalidArgumentError(
        absl::StrCat("the features of stack '", plan.name, "' have ", stack.samples,
                     " samples together; allowed: [0, ", kMaxStackSamples, "]"));
  }
  const int64_t max_pads = kCsrAlignment * kBuckets * int64_t{plan_.topology.partitions()};
  // Of a large stack, a key has fewer bits for the number of a sample or of an id.
  const int64_t max_numbers = int64_t{1} << stacks_[stack_index].shape.low_bits();
  const int64_t max_ids =
      std::min<int64_t>(std::numeric_limits<int32_t>::max() - max_pads, max_numbers);
  const auto too_many = [&](int64_t count, const char* what, int64_t allowed) {
    return absl::ResourceExhaustedError(absl::StrCat("stack '", plan.name, "' has ", count, what,
                                                     " in one source slot; allowed: [0, ", allowed,
                                                     "]; send smaller batches"));
  };
  for (const SlotLayout& slot : stack.layout) {
    const int64_t ids = CountIds(slot, stack.inputs);
    if (ids > max_ids) return too_many(ids, " ids", max_ids);
    if (slot.samples > max_numbers) return too_many(slot.samples, " samples", max_numbers);
  }
  return absl::OkStatus();
}

absl::Status Preprocessor::CheckWeightSums(const PreprocessedBatch& batch) const {
  for (size_t k = 0; k < stacks_.size(); ++k) {
    for (const SlotCsr& slot : batch.stacks_[k].slots) {
      const WeightOverflow& overflow = slot.overflow;
      if (overflow.feature < 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "feature '", plan_.stacks[k].features[overflow.feature].name, "': the weights of sample ",
          overflow.sample,
          overflow.of_gain ? " give one of its ids, by its combiner or its repeats, a gain beyond "
                             "the largest float32, 3.4e+38; use weights of like sizes"
                           : " (their squares, with SQRTN) sum to more than the largest float32, "
                             "3.4e+38; scale them down"));
    }
  }
  return absl::OkStatus();
}

bool Preprocessor::NeedsMinibatches(const SortedBatch& sorted) const {
  for (size_t k = 0; k < stacks_.size(); ++k) {
    const PartitionLimits& limits = (*sorted.limits_)[k];
    for (const SlotCsr& slot : sorted.batch_->stacks_[k].slots) {
      for (int p = 0; p < slot.partitions; ++p) {
        const int32_t ids = slot.partition_ids.data()[p];
        if (limits.Exceeded(ids, slot.partition_unique.data()[p])) return true;
      }
    }
  }
  return false;
}

void Preprocessor::FillAllBuckets(SortedBatch* sorted) {
  PreprocessedBatch* batch = sorted->batch_.get();
  if (batch->bucketed_) return;
  ForEachSlot(batch, [&](size_t k, StackBatch* stack, int slot, SlotScratch*) {
    FillSlotBuckets(k, sorted->limits_, slot, stack);
  });
  batch->bucketed_ = true;
}

absl::StatusOr<CutSet> Preprocessor::FindCuts(SortedBatch* sorted) {
  FillAllBuckets(sorted);
  CutSet cuts = 0;
  for (size_t k = 0; k < stacks_.size(); ++k) {
    if (drop_rule_ == DropRule::kKeep) RETURN_IF_ERROR(CheckBuckets(k, *sorted));
    cuts |= CutsOfStack(model_.plan().rules(), (*sorted->limits_)[k],
                        sorted->batch_->stacks_[k].buckets, plan_.topology.partitions());
  }
  return cuts;
}

// The error of the worst of the stack's buckets, if one is over its limits.
absl::Status Preprocessor::CheckBuckets(size_t stack_index, const SortedBatch& sorted) const {
  const StackBatch& stack = sorted.batch_->stacks_[stack_index];
  const PartitionLimits& limits = (*sorted.limits_)[stack_index];
  Overflow worst;
  int worst_slot = 0;
  for (int s = 0; s < slots(); ++s) {
    const Overflow overflow = WorstOverflow(stack.buckets[s], plan_.topology.partitions(), limits);
    if (overflow.excess <= worst.excess) continue;
    worst = overflow;
    worst_slot = s;
  }
  if (!worst.found()) return absl::OkStatus();
  return OverflowError(plan_.stacks[stack_index], limits, worst_slot, stack.slots[worst_slot],
                       stack.buckets[worst_slot], worst);
}

absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Preprocessor::Finish(SortedBatch* sorted,
                                                                              CutSet cuts) {
  if ((cuts & 1) != 0) {
    return absl::InternalError("another rank sent cuts with bit 0 set, where no batch can be cut");
  }
  // A batch that needs no cuts of its own has no buckets yet.
  if (cuts != 0) FillAllBuckets(sorted);
  PreprocessedBatch* batch = sorted->batch_.get();
  batch->cuts_ = cuts;
  expect_cuts_.store(cuts != 0, std::memory_order_relaxed);
  if (cuts != 0 || drop_rule_ == DropRule::kTensorFlow) {
    ForEachSlot(batch, [cuts](size_t, StackBatch* stack, int slot, SlotScratch* scratch) {
      if (cuts == 0 && stack->buckets[slot].dropped == 0) return;
      CutSlot(stack->slots[slot], stack->buckets[slot], cuts, &scratch->positions, &scratch->csr);
      std::swap(stack->slots[slot], scratch->csr);
    });
  }
  const absl::Status fits =
      FitBuffers(*sorted->limits_, drop_rule_ != DropRule::kKeep, plan_, &batch->stacks_);
  WriteStatistics(model_, plan_, *sorted->limits_, batch->stacks_, &batch->statistics_);
  if (!fits.ok()) return fits;
  // It gives its buffers back after its last use.
  return std::shared_ptr<PreprocessedBatch>(
      sorted->batch_.release(), [batches = sorted->batches_](PreprocessedBatch* used) {
        batches->Give(std::unique_ptr<PreprocessedBatch>(used));
      });
}

void Preprocessor::ForEachSlot(PreprocessedBatch* batch, SlotWork work) {
  const int64_t tasks = static_cast<int64_t>(stacks_.size()) * slots();
  ParallelFor(cpu_, tasks, [&](int64_t task) {
    const int64_t stack = task / slots();
    std::unique_ptr<SlotScratch> scratch = scratch_.Take();
    work(stack, &batch->stacks_[stack], static_cast<int>(task % slots()), scratch.get());
    scratch_.Give(std::move(scratch));
  });
}

}  // namespace emberd::preprocess
