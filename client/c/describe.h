// What the client knows of models, statistics and the cluster, as JSON. Internal to the C
// interface.
#pragma once

#include <string>

#include "client/cpp/batch.h"
#include "client/cpp/model.h"
#include "client/cpp/status.h"
#include "client/cpp/train_stream.h"

namespace emberd::c {

std::string Describe(const client::Model& model);
std::string Describe(const client::ClusterStatus& status);
// `times` null: there are none.
std::string Describe(const client::BatchStatistics& statistics, const client::StepTimes* times);

}  // namespace emberd::c
