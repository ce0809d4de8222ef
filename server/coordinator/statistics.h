// A coordinator's metrics as GetStats tells them.
#pragma once

#include "emberd/v1/admin_service.pb.h"
#include "server/ops/metric_registry.h"

namespace emberd::server {

// Each adds to its field of `stats`: every RPC that has been called, every
// stage, every group that has had ranks here.
void AddMethodStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats);
void AddStageStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats);
void AddGroupStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats);

}  // namespace emberd::server
