// emberctl checkpoint import: rows from files to the tables of a model that is declared.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/suggest.h"
#include "client/cpp/client.h"
#include "client/emberctl/output.h"
#include "client/emberctl/progress.h"
#include "client/emberctl/tensor_file.h"
#include "client/emberctl/verbs/checkpoint.h"

namespace emberd::emberctl {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexEnd[] = ".safetensors.index.json";
constexpr int64_t kBatchBytes = int64_t{4} << 20;

struct ImportJob {
  std::string model;
  std::string path;
  std::string table;  // empty: as the tensors say
  std::string slot;
};

// Rows of a table, or of a slot of it, in a file.
struct Piece {
  TensorInFile tensor;
  std::string table;
  std::string slot;
  int64_t first_row = 0;

  int64_t end_row() const { return first_row + tensor.rows; }
  int64_t bytes() const {
    return tensor.rows * tensor.columns * static_cast<int64_t>(sizeof(float));
  }
};

// The files that an index names.
absl::StatusOr<std::vector<std::string>> FilesOfIndex(const std::string& path) {
  std::ifstream file(path);
  const nlohmann::json index = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": is not an index: it has no weight_map"));
  }
  std::set<std::string> files;
  for (const auto& [tensor, name] : map->items()) {
    if (!name.is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": weight_map: \"", tensor, "\" has no file"));
    }
    files.insert((fs::path(path).parent_path() / name.get<std::string>()).string());
  }
  return std::vector<std::string>(files.begin(), files.end());
}

// `path` itself, or what it names: a folder, or an index.
absl::StatusOr<std::vector<std::string>> FilesOf(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    if (absl::EndsWith(path, kIndexEnd)) return FilesOfIndex(path);
    return std::vector<std::string>{path};
  }
  std::vector<std::string> files;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string ending = entry->path().extension();
    if (ending == ".npy" || ending == ".safetensors") files.push_back(entry->path().string());
  }
  if (error) return absl::PermissionDeniedError(absl::StrCat(path, ": ", error.message()));
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(path, ": contains no .safetensors and no .npy file"));
  }
  absl::c_sort(files);
  return files;
}

std::string ArrayName(const std::string& table, const std::string& slot) {
  return slot.empty() ? absl::StrCat("table \"", table, "\"")
                      : absl::StrCat("slot \"", slot, "\" of table \"", table, "\"");
}

bool HasSlot(const client::TableInfo& table, const std::string& slot) {
  return slot.empty() || absl::c_linear_search(table.slots, slot);
}

// The table, or the slot of one, that a tensor of this name must be meant for; none: nothing is
// set. A slot need not be there.
void FindArray(const client::Model& model, const std::string& name, Piece* piece) {
  for (const client::TableInfo& table : model.tables) {
    const bool longer = table.name.size() > piece->table.size();
    if (name == table.name || (longer && absl::StartsWith(name, absl::StrCat(table.name, ".")))) {
      piece->table = table.name;
      piece->slot = name == table.name ? "" : name.substr(table.name.size() + 1);
    }
  }
}

// What the file says of itself, or "TABLE" or "TABLE.SLOT" as the name of the tensor.
absl::StatusOr<Piece> MakePiece(const client::Model& model, const ImportJob& job,
                                TensorInFile tensor) {
  Piece piece;
  const auto of_metadata = [&tensor](const char* key) {
    const auto found = tensor.metadata.find(key);
    return found == tensor.metadata.end() ? std::string() : found->second;
  };
  piece.table = job.table.empty() ? of_metadata("table") : job.table;
  piece.slot = job.table.empty() ? of_metadata("slot") : job.slot;
  if (const std::string first = of_metadata("first_row");
      !first.empty() && !absl::SimpleAtoi(first, &piece.first_row)) {
    return absl::InvalidArgumentError(
        absl::StrCat(tensor.path, ": first_row: \"", first, "\" is not a number"));
  }
  if (piece.table.empty()) FindArray(model, tensor.name, &piece);
  const client::TableInfo* const table = model.FindTable(piece.table);
  if (table == nullptr) {
    const std::string& name = piece.table.empty() ? tensor.name : piece.table;
    std::vector<std::string> names;
    for (const client::TableInfo& known : model.tables) names.push_back(known.name);
    return absl::NotFoundError(absl::StrCat(tensor.path, ": the model has no table \"", name,
                                            "\"; ", KnownNames("tables", name, names),
                                            "; or name one by --table"));
  }
  if (!HasSlot(*table, piece.slot)) {
    return absl::NotFoundError(absl::StrCat(tensor.path, ": ", ArrayName(piece.table, piece.slot),
                                            " does not exist; ",
                                            KnownNames("slots", piece.slot, table->slots)));
  }
  const bool narrow = !piece.slot.empty() && tensor.columns == 1;
  if (tensor.columns != table->embedding_dim && !narrow) {
    return absl::InvalidArgumentError(absl::StrCat(
        tensor.path, ": \"", tensor.name, "\" has ", Counted(tensor.columns, "column"), ", but ",
        ArrayName(piece.table, piece.slot), " has rows of ", table->embedding_dim));
  }
  piece.tensor = std::move(tensor);
  return piece;
}

// Each table that any piece is of must be there from its first row to its last, once.
absl::Status CheckComplete(const client::Model& model, const std::vector<Piece>& pieces) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool first = i == 0 || std::tie(pieces[i - 1].table, pieces[i - 1].slot) !=
                                     std::tie(piece.table, piece.slot);
    const bool last = i + 1 == pieces.size() || std::tie(pieces[i + 1].table, pieces[i + 1].slot) !=
                                                    std::tie(piece.table, piece.slot);
    const int64_t expected = first ? 0 : pieces[i - 1].end_row();
    if (piece.first_row < expected) {
      return absl::InvalidArgumentError(
          absl::StrCat(ArrayName(piece.table, piece.slot), ": row ", piece.first_row, " is in ",
                       first ? "no table" : pieces[i - 1].tensor.path, " and in ",
                       piece.tensor.path, "; import only one of them"));
    }
    const int64_t rows = model.FindTable(piece.table)->vocabulary_size;
    if (piece.first_row > expected || (last && piece.end_row() != rows)) {
      const int64_t missing = piece.first_row > expected ? expected : piece.end_row();
      return absl::InvalidArgumentError(
          absl::StrCat(piece.tensor.path, ": ", ArrayName(piece.table, piece.slot), " has ",
                       Counted(rows, "row"), ", but the files ",
                       missing > rows ? "have more" : absl::StrCat("do not have row ", missing)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Piece>> PiecesOf(const client::Model& model, const ImportJob& job) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(job.path));
  std::vector<Piece> pieces;
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const std::vector<TensorInFile> tensors, ReadTensorHeaders(file));
    for (const TensorInFile& tensor : tensors) {
      ASSIGN_OR_RETURN(pieces.emplace_back(), MakePiece(model, job, tensor));
    }
  }
  absl::c_sort(pieces, [](const Piece& a, const Piece& b) {
    return std::tie(a.table, a.slot, a.first_row) < std::tie(b.table, b.slot, b.first_row);
  });
  RETURN_IF_ERROR(CheckComplete(model, pieces));
  return pieces;
}

absl::Status Assign(client::Client& client, const client::Model& model, const Piece& piece,
                    const std::function<void(int64_t rows)>& show) {
  const int64_t row_bytes =
      std::max<int64_t>(1, piece.tensor.columns) * static_cast<int64_t>(sizeof(float));
  const int64_t batch = std::max<int64_t>(1, kBatchBytes / row_bytes);
  for (int64_t row = 0; row < piece.tensor.rows; row += batch) {
    const int64_t rows = std::min(batch, piece.tensor.rows - row);
    ASSIGN_OR_RETURN(const std::vector<float> values, ReadRowsOf(piece.tensor, row, rows));
    std::vector<int64_t> ids(static_cast<size_t>(rows));
    std::iota(ids.begin(), ids.end(), piece.first_row + row);
    client::AssignOptions options;
    options.slot = piece.slot;
    const absl::Status status =
        client.AssignRows(model, piece.table, ids, values, options).status();
    if (!status.ok()) {
      return Annotate(status, absl::StrCat(ArrayName(piece.table, piece.slot),
                                           ", imported up to row ", ids.front()));
    }
    show(row + rows);
  }
  return absl::OkStatus();
}

void PrintImported(Session& session, const ImportJob& job, const std::vector<Piece>& pieces) {
  std::map<std::pair<std::string, std::string>, int64_t> rows;
  for (const Piece& piece : pieces) rows[{piece.table, piece.slot}] += piece.tensor.rows;
  Json imported = Json::array();
  for (const auto& [array, count] : rows) {
    imported.push_back({{"table", array.first}, {"slot", array.second}, {"rows", count}});
    if (session.json) continue;
    session.out << ArrayName(array.first, array.second) << ": " << Counted(count, "row") << "\n";
  }
  if (session.json) {
    session.out << Json{{"model", job.model}, {"imported", imported}}.dump(1) << "\n";
  }
}

absl::Status Import(Session& session, const ImportJob& job) {
  RETURN_IF_ERROR(session.CheckReachable());
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(session.client_options()));
  ASSIGN_OR_RETURN(const client::Model model, client->DescribeModel(job.model));
  ASSIGN_OR_RETURN(const std::vector<Piece> pieces, PiecesOf(model, job));
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes();
  const absl::Time begin = absl::Now();
  {
    Progress progress(session);
    int64_t done = 0;
    for (const Piece& piece : pieces) {
      const std::string name =
          piece.slot.empty() ? piece.table : absl::StrCat(piece.table, ".", piece.slot);
      const int64_t row_bytes = piece.tensor.columns * static_cast<int64_t>(sizeof(float));
      RETURN_IF_ERROR(Assign(*client, model, piece, [&](int64_t rows) {
        progress.Show(name, done + rows * row_bytes, total, absl::Now() - begin);
      }));
      done += piece.bytes();
    }
  }
  PrintImported(session, job, pieces);
  return absl::OkStatus();
}

}  // namespace

void AddCheckpointImport(CLI::App& checkpoint, Session& session, Command& command) {
  const auto job = std::make_shared<ImportJob>();
  CLI::App* verb = checkpoint.add_subcommand(
      "import",
      "Overwrite complete tables, or slots, of a declared model with the rows of files. Nothing is "
      "written until all files have been checked; if it is interrupted, run it again");
  verb->add_option("MODEL", job->model, "Name of the model")->required();
  verb->add_option("PATH", job->path,
                   "A folder as `checkpoint export` writes it, TABLE.safetensors, "
                   "TABLE.SLOT.safetensors, TABLE.safetensors.index.json or TABLE.npy; row i is "
                   "that of id i")
      ->required();
  CLI::Option* table = verb->add_option("--table", job->table,
                                        "The table to overwrite, if the file has another name");
  verb->add_option("--slot", job->slot, "The optimizer slot to overwrite, instead of the weights")
      ->needs(table);
  SetExample(verb, "emberctl checkpoint import my_model users.npy");
  verb->callback(
      [job, &session, &command] { command = [job, &session] { return Import(session, *job); }; });
}

}  // namespace emberd::emberctl
