#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "client/cpp/client.h"
#include "client/emberctl/output.h"
#include "client/emberctl/tensor_file.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

struct ExportTarget {
  std::string model;
  std::string table;
  std::string slot;  // empty: the weights
  std::string file;
};

enum class Format { kNpy, kSafetensors };

absl::StatusOr<Format> FormatOf(const std::string& file) {
  if (absl::EndsWith(file, ".npy")) return Format::kNpy;
  if (absl::EndsWith(file, ".safetensors")) return Format::kSafetensors;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", file, "\" must end with .npy or .safetensors, which selects the format"));
}

absl::Status Written(const std::ofstream& file, const std::string& path) {
  if (file) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      path, ": cannot be written; check that the folder exists, permissions and free space"));
}

absl::Status Export(Session& session, const ExportTarget& target) {
  ASSIGN_OR_RETURN(const Format format, FormatOf(target.file));
  RETURN_IF_ERROR(session.CheckReachable());
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(session.client_options()));
  ASSIGN_OR_RETURN(const client::Model model, client->DescribeModel(target.model));
  const client::TableInfo* const table = model.FindTable(target.table);
  const int64_t rows =
      table == nullptr ? 0 : table->vocabulary_size;  // the export says what is wrong
  std::ofstream file;
  const auto write = [&](int64_t first_row, absl::Span<const float> values, int64_t columns) {
    if (first_row == 0) {
      file.open(target.file, std::ios::binary);
      const std::string name =
          target.slot.empty() ? target.table : absl::StrCat(target.table, ".", target.slot);
      file << (format == Format::kNpy
                   ? NpyHeader(rows, columns)
                   : SafetensorsStart(name, {{"format", "emberd"}, {"model", target.model}}, rows,
                                      columns));
    }
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(float)));
    return Written(file, target.file);
  };
  client::ExportOptions options;
  options.slot = target.slot;
  // A table takes as long as it takes.
  options.deadline = absl::Hours(24);
  RETURN_IF_ERROR(client->ExportTable(model, target.table, write, options));
  file.close();
  RETURN_IF_ERROR(Written(file, target.file));
  if (session.json) {
    session.out << Json{{"file", target.file}, {"rows", rows}}.dump(1) << "\n";
  } else {
    session.out << target.file << ": " << rows << (rows == 1 ? " row\n" : " rows\n");
  }
  return absl::OkStatus();
}

}  // namespace

void AddExport(CLI::App& app, Session& session, Command& command) {
  auto target = std::make_shared<ExportTarget>();
  CLI::App* verb = app.add_subcommand("export",
                                      "Write all rows of a table to a file for other programs, as "
                                      "float32 in the order of their ids");
  verb->add_option("MODEL", target->model, "Name of the model")->required();
  verb->add_option("TABLE", target->table, "Name of the table")->required();
  verb->add_option("FILE", target->file, "A NumPy file (.npy), or .safetensors")
      ->required()
      ->check(
          [](const std::string& file) { return std::string(FormatOf(file).status().message()); });
  verb->add_option("--slot", target->slot,
                   "An optimizer slot instead of the weights, for example accumulator");
  SetExample(verb, "emberctl export my_model users users.npy");
  verb->callback([target, &session, &command] {
    command = [target, &session] { return Export(session, *target); };
  });
}

}  // namespace emberd::emberctl
