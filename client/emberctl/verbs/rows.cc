#include <cmath>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/client.h"
#include "client/cpp/options.h"
#include "client/emberctl/output.h"
#include "client/emberctl/tensor_file.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

struct RowsTarget {
  std::string model;
  std::string table;
  std::string slot;                // empty: the weights
  std::vector<std::string> texts;  // ids to get, or rows to set
  std::string file;                // to export to
};

absl::Status PrintRows(Session& session, const RowsTarget& target, const std::vector<int64_t>& ids,
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
  if (!session.json) return absl::OkStatus();
  return PrintJson(Json{{"model", target.model},
                        {"table", target.table},
                        {"slot", target.slot},
                        {"rows", std::move(rows)}},
                   session.out);
}

// "7", or "7-12": the ids from 7 to 12.
absl::Status AppendIds(const std::string& text, std::vector<int64_t>* ids) {
  constexpr size_t kMaxIds = 1'000'000;
  const std::vector<std::string> ends = absl::StrSplit(text, '-');
  int64_t first = 0;
  int64_t last = 0;
  if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
      !absl::SimpleAtoi(ends.back(), &last) || last < first) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not an id; write an id, 7, or a range of ids, 7-12"));
  }
  if (last - first >= static_cast<int64_t>(kMaxIds - ids->size())) {
    return WrongUsage(
        absl::StrCat("\"", text, "\": more than ", kMaxIds,
                     " ids are not allowed; `emberctl export` writes a complete table to a file"));
  }
  for (int64_t n = 0; n <= last - first; ++n) ids->push_back(first + n);
  return absl::OkStatus();
}

absl::Status GetRows(Session& session, const RowsTarget& target) {
  std::vector<int64_t> ids;
  for (const std::string& text : target.texts) RETURN_IF_ERROR(AppendIds(text, &ids));
  ASSIGN_OR_RETURN(const v1::DescribeModelResponse model, session.DescribeModel(target.model));
  v1::ReadRowsRequest request;
  request.set_model_id(model.model_id());
  request.set_table(target.table);
  request.set_slot(target.slot);
  const int64_t n = static_cast<int64_t>(ids.size());
  client::EncodeInts(ids, {n}, request.mutable_ids());
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::ReadRowsResponse>(request));
  const v1::Tensor& tensor = response.values();
  const int64_t dim = tensor.shape_size() == 2 ? tensor.shape(1) : 0;
  ASSIGN_OR_RETURN(absl::Span<const float> values, client::DecodeFloats(tensor, n, dim));
  return PrintRows(session, target, ids, values, dim);
}

// New values of one row.
struct RowText {
  int64_t id = 0;
  std::vector<float> values;
};

// "7=0.5,1,-2": row 7 becomes (0.5, 1, -2).
absl::StatusOr<RowText> ParseRow(const std::string& text) {
  const auto wrong = [&text](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\": ", what, "; a row is written ID=VALUE,VALUE,..."));
  };
  const std::vector<std::string> sides = absl::StrSplit(text, absl::MaxSplits('=', 1));
  if (sides.size() != 2) return wrong("it has no =");
  RowText row;
  if (!absl::SimpleAtoi(sides[0], &row.id)) {
    return wrong(absl::StrCat("\"", sides[0], "\" is not an id"));
  }
  for (absl::string_view value : absl::StrSplit(sides[1], ',')) {
    if (!absl::SimpleAtof(value, &row.values.emplace_back()) || !std::isfinite(row.values.back())) {
      return wrong(absl::StrCat("\"", value,
                                "\" is not a number from -3.40282e+38 to 3.40282e+38 (float32)"));
    }
  }
  return row;
}

absl::Status SetRows(Session& session, const RowsTarget& target) {
  std::vector<RowText> rows;
  for (const std::string& text : target.texts) {
    ASSIGN_OR_RETURN(rows.emplace_back(), ParseRow(text));
  }
  std::vector<int64_t> ids;
  std::vector<float> values;
  const size_t dim = rows.front().values.size();
  for (const RowText& row : rows) {
    if (row.values.size() != dim) {
      return WrongUsage(absl::StrCat("row ", row.id, " has ", row.values.size(),
                                     " values, but the first row has ", dim));
    }
    ids.push_back(row.id);
    values.insert(values.end(), row.values.begin(), row.values.end());
  }
  ASSIGN_OR_RETURN(const v1::DescribeModelResponse model, session.DescribeModel(target.model));
  v1::AssignRowsRequest request;
  request.set_model_id(model.model_id());
  request.set_table(target.table);
  request.set_slot(target.slot);
  request.mutable_mutation()->set_client_id(client::RandomUuid());
  request.mutable_mutation()->set_sequence(1);
  const int64_t n = static_cast<int64_t>(ids.size());
  client::EncodeInts(ids, {n}, request.mutable_ids());
  client::EncodeFloats(values, {n, static_cast<int64_t>(dim)}, client::WireType::kFloat32,
                       request.mutable_values());
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::AssignRowsResponse>(request));
  return session.Answer(Json{{"rows_written", n}}, absl::StrCat(Counted(n, "row"), " written"));
}

void AddTarget(CLI::App* verb, RowsTarget* target) {
  verb->add_option("MODEL", target->model, "Name of the model")->required();
  verb->add_option("TABLE", target->table, "Name of the table")->required();
  verb->add_option("--slot", target->slot,
                   "An optimizer slot instead of the weights, for example accumulator");
}

// What is wrong with the name of a file; empty: nothing.
std::string CheckFormat(const std::string& file) {
  if (absl::EndsWith(file, ".npy") || absl::EndsWith(file, ".safetensors")) return "";
  return absl::StrCat("\"", file,
                      "\" must end with .npy or .safetensors, which selects the format");
}

absl::Status ExportTable(Session& session, const RowsTarget& target) {
  RETURN_IF_ERROR(session.DescribeModel(target.model).status());  // its errors have advice
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(session.client_options()));
  ASSIGN_OR_RETURN(const client::Model model, client->DescribeModel(target.model));
  const client::TableInfo* const table = model.FindTable(target.table);
  const int64_t rows =
      table == nullptr ? 0 : table->vocabulary_size;  // the export says what is wrong
  std::optional<PartialFile> file;
  const auto write = [&](int64_t first_row, absl::Span<const float> values, int64_t columns) {
    if (first_row == 0) {
      file.emplace(target.file);
      const std::string name =
          target.slot.empty() ? target.table : absl::StrCat(target.table, ".", target.slot);
      RETURN_IF_ERROR(file->Write(absl::EndsWith(target.file, ".npy")
                                      ? NpyHeader(rows, columns)
                                      : SafetensorsStart(name,
                                                         {{"format", "emberd"},
                                                          {"model", target.model},
                                                          {"table", target.table},
                                                          {"slot", target.slot}},
                                                         rows, columns)));
    }
    return file->Write(
        {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
  };
  // A table takes as long as it takes.
  const client::ExportOptions options = {.slot = target.slot, .deadline = absl::Hours(24)};
  const absl::Status exported = client->ExportTable(model, target.table, write, options);
  if (file.has_value()) RETURN_IF_ERROR(file->Close());  // it says why it cannot be written
  RETURN_IF_ERROR(session.Advised(exported));
  RETURN_IF_ERROR(file->Keep());
  return session.Answer(Json{{"file", target.file}, {"rows", rows}},
                        absl::StrCat(target.file, ": ", Counted(rows, "row")));
}

}  // namespace

void AddRows(CLI::App& app, Session& session) {
  CLI::App& rows = AddGroupOfVerbs(app, "rows", "Read and write rows of a table by id",
                                   "emberctl rows get my_model users 7 8");
  auto [get, ids] =
      AddVerb(rows, session, "get", "Print rows, one per line: ID=VALUE,VALUE,...",
              "emberctl rows get my_model users 7 100-109 --slot accumulator", GetRows);
  AddTarget(get, ids);
  get->add_option("ID", ids->texts, "Ids of the rows, and ranges of them: 7 100-109")
      ->required()
      ->check([](const std::string& text) {
        std::vector<int64_t> parsed;
        return std::string(AppendIds(text, &parsed).message());
      });
  auto [set, values] =
      AddVerb(rows, session, "set", "Overwrite rows, written as `rows get` prints them",
              "emberctl rows set my_model users 7=0.5,1,-2,0.25", SetRows);
  AddTarget(set, values);
  set->add_option("ROW", values->texts, "ID=VALUE,VALUE,...")
      ->required()
      ->check(
          [](const std::string& text) { return std::string(ParseRow(text).status().message()); });
}

void AddExport(CLI::App& app, Session& session) {
  auto [verb, target] = AddVerb(app, session, "export",
                                "Write all rows of a table to a file for other programs, as "
                                "float32 in the order of their ids",
                                "emberctl export my_model users users.npy", ExportTable);
  AddTarget(verb, target);
  verb->add_option("FILE", target->file, "A NumPy file (.npy), or .safetensors")
      ->required()
      ->check(CheckFormat);
}

}  // namespace emberd::emberctl
