// One FeatureActivation as a field of an answer: its size first, then its bytes.
#pragma once

#include <cstddef>
#include <string>

#include "server/coordinator/coordinator.h"
#include "server/rpc/wire.h"

namespace emberd::server {

// `output` must outlive it.
class ActivationWire {
 public:
  // `feature`: index in the config. `field`: the number of `activations` in the message around it.
  ActivationWire(const LookupOutput& output, int feature, int field);

  // Bytes of the whole field, tag included.
  size_t size() const;
  // References the activation's memory.
  void AppendTo(rpc::WireEncoder* encoder) const;

 private:
  const std::string& name_;
  const Activations& activations_;
  const FeatureActivationView& view_;
  const int field_;
  const std::string tensor_head_;  // the tensor without its data, serialized
  const size_t tensor_size_;
  const size_t activation_size_;
};

}  // namespace emberd::server
