#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cpp/tensor_codec.h"
#include "client/cpp/uuid.h"
#include "client/emberctl/commands.h"
#include "client/emberctl/output.h"

namespace emberd::emberctl {
namespace {

absl::StatusOr<uint64_t> ModelId(Session& session, const std::string& name) {
  v1::DescribeModelRequest request;
  request.set_name(name);
  v1::DescribeModelResponse response;
  absl::Status status = session.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.embedding->DescribeModel(context, request, &response);
  });
  if (!status.ok()) return status;
  return response.model_id();
}

void PrintRows(Session& session, const RowsTarget& target, const std::vector<int64_t>& ids,
               absl::Span<const float> values, int64_t dim) {
  Json rows = Json::array();
  for (size_t i = 0; i < ids.size(); ++i) {
    const absl::Span<const float> row = values.subspan(i * dim, dim);
    if (session.json) {
      rows.push_back({{"id", ids[i]}, {"values", std::vector<float>(row.begin(), row.end())}});
    } else {
      session.out << ids[i] << "=" << absl::StrJoin(row, ",", [](std::string* out, float value) {
        out->append(Float(value));
      }) << "\n";
    }
  }
  if (!session.json) return;
  const Json all = {{"model", target.model},
                    {"table", target.table},
                    {"slot", target.slot},
                    {"rows", std::move(rows)}};
  session.out << all.dump(1) << "\n";
}

}  // namespace

absl::Status GetRows(Session& session, const RowsTarget& target, const std::vector<int64_t>& ids) {
  absl::StatusOr<uint64_t> model_id = ModelId(session, target.model);
  if (!model_id.ok()) return model_id.status();
  v1::ReadRowsRequest request;
  request.set_model_id(*model_id);
  request.set_table(target.table);
  request.set_slot(target.slot);
  const int64_t n = static_cast<int64_t>(ids.size());
  client::EncodeInts(ids, {n}, request.mutable_ids());
  v1::ReadRowsResponse response;
  absl::Status status = session.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.embedding->ReadRows(context, request, &response);
  });
  if (!status.ok()) return status;
  const v1::Tensor& tensor = response.values();
  const int64_t dim = tensor.shape_size() == 2 ? tensor.shape(1) : 0;
  absl::StatusOr<absl::Span<const float>> values =
      client::DecodeFloats(tensor, n, dim, client::WireType::kFloat32, nullptr);
  if (!values.ok()) return values.status();
  PrintRows(session, target, ids, *values, dim);
  return absl::OkStatus();
}

absl::StatusOr<RowText> ParseRow(const std::string& text) {
  const auto wrong = [&text](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\": ", what, "; a row is written ID=VALUE,VALUE,..."));
  };
  const std::vector<std::string> sides = absl::StrSplit(text, absl::MaxSplits('=', 1));
  if (sides.size() != 2) return wrong("there is no =");
  RowText row;
  if (!absl::SimpleAtoi(sides[0], &row.id)) {
    return wrong(absl::StrCat("\"", sides[0], "\" is no id"));
  }
  for (absl::string_view value : absl::StrSplit(sides[1], ',')) {
    if (!absl::SimpleAtof(value, &row.values.emplace_back())) {
      return wrong(absl::StrCat("\"", value, "\" is no number"));
    }
  }
  return row;
}

absl::Status SetRows(Session& session, const RowsTarget& target, const std::vector<RowText>& rows) {
  std::vector<int64_t> ids;
  std::vector<float> values;
  const size_t dim = rows.front().values.size();
  for (const RowText& row : rows) {
    if (row.values.size() != dim) {
      return absl::InvalidArgumentError(absl::StrCat("row ", row.id, " has ", row.values.size(),
                                                     " values; the first row has ", dim));
    }
    ids.push_back(row.id);
    values.insert(values.end(), row.values.begin(), row.values.end());
  }
  absl::StatusOr<uint64_t> model_id = ModelId(session, target.model);
  if (!model_id.ok()) return model_id.status();
  v1::AssignRowsRequest request;
  request.set_model_id(*model_id);
  request.set_table(target.table);
  request.set_slot(target.slot);
  request.mutable_mutation()->set_client_id(client::RandomUuid());
  request.mutable_mutation()->set_sequence(1);
  const int64_t n = static_cast<int64_t>(ids.size());
  client::EncodeInts(ids, {n}, request.mutable_ids());
  client::EncodeFloats(values, {n, static_cast<int64_t>(dim)}, client::WireType::kFloat32,
                       request.mutable_values());
  v1::AssignRowsResponse response;
  absl::Status status = session.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.embedding->AssignRows(context, request, &response);
  });
  if (!status.ok()) return status;
  if (session.json) {
    session.out << Json{{"rows_written", n}}.dump(1) << "\n";
  } else {
    session.out << n << " rows written\n";
  }
  return absl::OkStatus();
}

}  // namespace emberd::emberctl
