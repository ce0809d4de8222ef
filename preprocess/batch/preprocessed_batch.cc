#include "preprocess/batch/preprocessed_batch.h"

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

}  // namespace emberd::preprocess
