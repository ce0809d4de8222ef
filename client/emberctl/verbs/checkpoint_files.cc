// emberctl checkpoint export and import: tables and slots as files that others read and write.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/command_line.h"
#include "base/floats.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/suggest.h"
#include "client/cpp/client.h"
#include "client/cpp/coordinator.h"
#include "client/emberctl/output.h"
#include "client/emberctl/tensor_file.h"
#include "client/emberctl/terminal.h"
#include "client/emberctl/verbs/checkpoint.h"

namespace emberd::emberctl {
namespace {

namespace fs = std::filesystem;
using client::Coordinator;

constexpr char kEnd[] = ".safetensors";

struct ExportJob {
  std::string model;
  std::string name;  // of the checkpoint
  std::string folder;
  int64_t file_bytes = int64_t{4} << 30;
};

// A table, or a slot of one.
struct Array {
  std::string table;
  std::string slot;  // empty: the weights
  int64_t rows = 0;
  int64_t columns = 0;  // of a slot, maybe 1 instead

  std::string name() const { return slot.empty() ? table : absl::StrCat(table, ".", slot); }
  int64_t row_bytes() const { return columns * static_cast<int64_t>(sizeof(float)); }
  int64_t bytes() const { return rows * row_bytes(); }
};

std::vector<Array> ArraysOf(const v1::CheckpointManifest& manifest) {
  std::vector<Array> arrays;
  for (const v1::StackPlan& stack : manifest.plan().stacks()) {
    for (const v1::TablePlan& table : stack.tables()) {
      arrays.push_back({table.name(), "", table.vocabulary_size(), table.embedding_dim()});
      for (const std::string& slot : stack.slots()) {
        arrays.push_back({table.name(), slot, table.vocabulary_size(), table.embedding_dim()});
      }
    }
  }
  return arrays;
}

// Writes one array, to one file or several with an index. Files get their names when all are
// complete; what is not finished is removed.
class ArrayWriter {
 public:
  ArrayWriter(const ExportJob& job, const Array& array, std::map<std::string, std::string> metadata)
      : job_(job), array_(array), metadata_(std::move(metadata)) {}

  absl::Status Append(const v1::ExportCheckpointResponse& part) {
    const int64_t row_bytes = part.columns() * static_cast<int64_t>(sizeof(float));
    if (next_ == 0 &&
        (part.columns() == array_.columns || (part.columns() == 1 && !array_.slot.empty()))) {
      array_.columns = part.columns();
      rows_per_file_ = std::max<int64_t>(1, job_.file_bytes / row_bytes);
    }
    absl::string_view values = part.values();
    const auto bytes = static_cast<int64_t>(values.size());
    if (part.columns() != array_.columns || part.first_row() != next_ || bytes % row_bytes != 0 ||
        bytes / row_bytes > array_.rows - next_) {
      return absl::InternalError(absl::StrCat(
          "the server sent ", bytes, " bytes from row ", part.first_row(), " on; rows in [", next_,
          ", ", array_.rows, ") of ", array_.columns, " columns were expected"));
    }
    while (!values.empty()) {
      if (next_ % rows_per_file_ == 0) RETURN_IF_ERROR(BeginFile());
      const int64_t rows = std::min(static_cast<int64_t>(values.size()) / row_bytes,
                                    rows_per_file_ - next_ % rows_per_file_);
      RETURN_IF_ERROR(
          files_.back()->Write(values.substr(0, static_cast<size_t>(rows * row_bytes))));
      values.remove_prefix(static_cast<size_t>(rows * row_bytes));
      next_ += rows;
    }
    return absl::OkStatus();
  }

  absl::Status Finish() {
    if (next_ != array_.rows) {
      return absl::InternalError(
          absl::StrCat("the server ended the export at row ", next_, " of ", array_.rows));
    }
    RETURN_IF_ERROR(EndFile());
    for (const auto& file : files_) RETURN_IF_ERROR(file->Keep());
    return names_.size() > 1 ? WriteIndex() : absl::OkStatus();
  }

  int64_t bytes() const { return next_ * array_.row_bytes(); }
  int64_t total_bytes() const { return array_.bytes(); }
  std::vector<std::string> paths() const {
    std::vector<std::string> paths;
    for (const std::string& name : names_) paths.push_back(Path(name));
    return paths;
  }

 private:
  // `name` is that of the tensor in the file.
  std::string Path(const std::string& name) const {
    return absl::StrCat(job_.folder, "/", name, kEnd);
  }

  absl::Status BeginFile() {
    RETURN_IF_ERROR(EndFile());
    const int64_t files = (array_.rows + rows_per_file_ - 1) / rows_per_file_;
    std::map<std::string, std::string> metadata = metadata_;
    if (files == 1) {
      names_ = {array_.name()};
    } else {
      names_.push_back(absl::StrFormat("%s-%05d-of-%05d", array_.name(),
                                       static_cast<int>(names_.size()) + 1, files));
      metadata["first_row"] = absl::StrCat(next_);
    }
    files_.push_back(std::make_unique<PartialFile>(Path(names_.back())));
    return files_.back()->Write(SafetensorsStart(
        names_.back(), metadata, std::min(rows_per_file_, array_.rows - next_), array_.columns));
  }

  absl::Status EndFile() { return files_.empty() ? absl::OkStatus() : files_.back()->Close(); }

  // Which tensor is in which file, as the tools around safetensors have it.
  absl::Status WriteIndex() const {
    nlohmann::ordered_json index;
    index["metadata"] = {{"total_size", total_bytes()}};
    for (const std::string& name : names_) index["weight_map"][name] = name + kEnd;
    PartialFile file(Path(array_.name()) + ".index.json");
    RETURN_IF_ERROR(file.Write(Dump(index, 2) + "\n"));
    RETURN_IF_ERROR(file.Close());
    return file.Keep();
  }

  const ExportJob& job_;
  Array array_;
  const std::map<std::string, std::string> metadata_;
  int64_t rows_per_file_ = 1;
  int64_t next_ = 0;  // row
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<PartialFile>> files_;
};

class Exporter {
 public:
  Exporter(Session& session, const ExportJob& job, v1::CheckpointManifest manifest)
      : session_(session), job_(job), manifest_(std::move(manifest)), progress_(session) {}

  absl::StatusOr<std::vector<std::string>> Run() {
    const std::vector<Array> arrays = ArraysOf(manifest_);
    std::set<std::string> names;
    for (const Array& array : arrays) {
      if (!names.insert(array.name()).second) {
        return absl::FailedPreconditionError(
            absl::StrCat("two tables or slots would be written to ", array.name(), kEnd,
                         ": a table has the name of another one's slot"));
      }
      total_ += array.bytes();
    }
    for (const Array& array : arrays) RETURN_IF_ERROR(Export(array));
    return std::move(paths_);
  }

 private:
  // One try of the call; a failure of our own ends the tries.
  grpc::Status Try(const Coordinator& coordinator, grpc::ClientContext* context, const Array& array,
                   absl::Status* failure) {
    v1::ExportCheckpointRequest request;
    request.set_model(manifest_.model());
    request.set_name(manifest_.name());
    request.set_table(array.table);
    request.set_slot(array.slot);
    ArrayWriter writer(job_, array,
                       {{"format", "emberd"},
                        {"model", manifest_.model()},
                        {"checkpoint", manifest_.name()},
                        {"table", array.table},
                        {"slot", array.slot}});
    const auto reader = coordinator.Read<v1::ExportCheckpointResponse>(request, context);
    v1::ExportCheckpointResponse part;
    while (failure->ok() && reader->Read(&part)) {
      *failure = writer.Append(part);
      progress_.Show(array.name(), done_ + writer.bytes(), total_, SteadyNow() - begin_);
    }
    if (!failure->ok()) context->TryCancel();
    const grpc::Status status = reader->Finish();
    if (failure->ok() && !status.ok()) return status;
    if (failure->ok()) *failure = writer.Finish();
    const std::vector<std::string> paths = writer.paths();
    paths_.insert(paths_.end(), paths.begin(), paths.end());
    done_ += writer.bytes();
    // A slot may have fewer columns than was thought.
    total_ += writer.total_bytes() - array.bytes();
    return grpc::Status::OK;
  }

  absl::Status Export(const Array& array) {
    absl::Status failure;
    const absl::Status status = session_.Call(
        [&](const Coordinator& coordinator, grpc::ClientContext* context) {
          return Try(coordinator, context, array, &failure);
        },
        kLong);
    return failure.ok() ? status : failure;
  }

  Session& session_;
  const ExportJob& job_;
  const v1::CheckpointManifest manifest_;
  Progress progress_;
  const absl::Time begin_ = SteadyNow();
  int64_t done_ = 0;
  int64_t total_ = 0;
  std::vector<std::string> paths_;
};

absl::Status MakeFolder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return absl::ErrnoToStatus(error.value(), folder);
  if (fs::is_empty(folder, error)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(folder, ": is not empty; name a new or empty folder"));
}

absl::Status ExportCheckpoint(Session& session, const ExportJob& job) {
  v1::GetCheckpointRequest request;
  request.set_model(job.model);
  if (job.name != "newest") request.set_name(job.name);
  ASSIGN_OR_RETURN(auto manifest, session.Call<v1::CheckpointManifest>(request));
  RETURN_IF_ERROR(MakeFolder(job.folder));
  const std::string name = manifest.name();
  const uint64_t id = manifest.checkpoint_id();
  ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                   Exporter(session, job, std::move(manifest)).Run());
  // Arrays are asked for by its name, one after the other.
  request.set_name(name);
  if (const auto now = session.Call<v1::CheckpointManifest>(request);
      now.ok() && now->checkpoint_id() != id) {
    return absl::AbortedError(
        absl::StrCat("checkpoint \"", name, "\" of model \"", job.model,
                     "\" was deleted and saved anew while it was exported: the files in ",
                     job.folder, " may be of both; remove them, and export it again"));
  }
  if (session.json) return PrintJson(Json{{"checkpoint", name}, {"files", paths}}, session.out);
  for (const std::string& path : paths) session.out << path << "\n";
  return absl::OkStatus();
}

constexpr char kIndexEnd[] = ".safetensors.index.json";
constexpr int64_t kBatchBytes = int64_t{4} << 20;

struct ImportJob {
  std::string model;
  std::string path;
  std::string table;  // empty: as the tensors say
  std::string slot;
};

std::string ArrayName(const std::string& table, const std::string& slot) {
  return slot.empty() ? absl::StrCat("table \"", table, "\"")
                      : absl::StrCat("slot \"", slot, "\" of table \"", table, "\"");
}

// Rows of a table, or of a slot of it, in a file.
struct Piece {
  TensorInFile tensor;
  std::string table;
  std::string slot;
  int64_t first_row = 0;

  int64_t end_row() const { return first_row + tensor.rows; }
  int64_t row_bytes() const { return tensor.columns * static_cast<int64_t>(sizeof(float)); }
  int64_t bytes() const { return tensor.rows * row_bytes(); }
  std::string array() const { return ArrayName(table, slot); }
};

bool SameArray(const Piece& a, const Piece& b) { return a.table == b.table && a.slot == b.slot; }

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
  if (error) return absl::ErrnoToStatus(error.value(), path);
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(path, ": contains no .safetensors and no .npy file"));
  }
  absl::c_sort(files);
  return files;
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

// A model that is there, and the shapes of its slots.
struct Target {
  client::Model model;
  v1::DescribeModelResponse described;

  int64_t ColumnsOf(const client::TableInfo& table, const std::string& slot) const {
    for (const v1::SlotShape& one : described.slots()) {
      const bool same = one.table() == table.name && one.slot() == slot;
      if (same && one.shape_size() == 2) return one.shape(1);
    }
    return table.embedding_dim;
  }
};

// What the file says of itself, or "TABLE" or "TABLE.SLOT" as the name of the tensor.
absl::StatusOr<Piece> MakePiece(const Target& target, const ImportJob& job, TensorInFile tensor) {
  const client::Model& model = target.model;
  Piece piece;
  const auto of_metadata = [&tensor](const char* key) {
    const auto found = tensor.metadata.find(key);
    return found == tensor.metadata.end() ? std::string() : found->second;
  };
  piece.table = of_metadata("table");
  piece.slot = of_metadata("slot");
  if (const std::string first = of_metadata("first_row");
      !first.empty() && !absl::SimpleAtoi(first, &piece.first_row)) {
    return absl::InvalidArgumentError(
        absl::StrCat(tensor.path, ": first_row: \"", first, "\" is not a number"));
  }
  if (!job.table.empty()) {
    if (job.slot.empty() && !piece.slot.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          tensor.path, ": holds ", piece.array(), ", but --table without --slot names the weights ",
          "of \"", job.table, "\"; give --slot ", piece.slot));
    }
    piece.table = job.table;
    piece.slot = job.slot;
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
    return absl::NotFoundError(absl::StrCat(tensor.path, ": ", piece.array(), " does not exist; ",
                                            KnownNames("slots", piece.slot, table->slots)));
  }
  const int64_t columns = target.ColumnsOf(*table, piece.slot);
  if (tensor.columns != columns) {
    return absl::InvalidArgumentError(absl::StrCat(tensor.path, ": \"", tensor.name, "\" has ",
                                                   Counted(tensor.columns, "column"), ", but ",
                                                   piece.array(), " has rows of ", columns));
  }
  piece.tensor = std::move(tensor);
  return piece;
}

// Each table that any piece is of must be there from its first row to its last, once.
absl::Status CheckComplete(const client::Model& model, const std::vector<Piece>& pieces) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool first = i == 0 || !SameArray(pieces[i - 1], piece);
    const bool last = i + 1 == pieces.size() || !SameArray(pieces[i + 1], piece);
    const int64_t expected = first ? 0 : pieces[i - 1].end_row();
    if (piece.first_row < expected) {
      return absl::InvalidArgumentError(
          absl::StrCat(piece.array(), ": row ", piece.first_row, " is in ",
                       first ? "no table" : pieces[i - 1].tensor.path, " and in ",
                       piece.tensor.path, "; import only one of them"));
    }
    const int64_t rows = model.FindTable(piece.table)->vocabulary_size;
    if (piece.first_row > expected || (last && piece.end_row() != rows)) {
      const int64_t missing = piece.first_row > expected ? expected : piece.end_row();
      return absl::InvalidArgumentError(absl::StrCat(
          piece.tensor.path, ": ", piece.array(), " has ", Counted(rows, "row"), ", but the files ",
          missing > rows ? "have more" : absl::StrCat("do not have row ", missing)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Piece>> PiecesOf(const Target& target, const ImportJob& job) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(job.path));
  std::vector<Piece> pieces;
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const std::vector<TensorInFile> tensors, ReadTensorHeaders(file));
    for (const TensorInFile& tensor : tensors) {
      ASSIGN_OR_RETURN(pieces.emplace_back(), MakePiece(target, job, tensor));
    }
  }
  absl::c_sort(pieces, [](const Piece& a, const Piece& b) {
    return std::tie(a.table, a.slot, a.first_row) < std::tie(b.table, b.slot, b.first_row);
  });
  RETURN_IF_ERROR(CheckComplete(target.model, pieces));
  return pieces;
}

// Called with the first row of a batch, as the file counts them, and the values.
using BatchOfRows = std::function<absl::Status(int64_t row, const std::vector<float>& values)>;

absl::Status ForEachBatch(const Piece& piece, const BatchOfRows& use,
                          const std::function<void(int64_t rows)>& show) {
  const int64_t batch = std::max<int64_t>(1, kBatchBytes / std::max<int64_t>(1, piece.row_bytes()));
  for (int64_t row = 0; row < piece.tensor.rows; row += batch) {
    const int64_t rows = std::min(batch, piece.tensor.rows - row);
    ASSIGN_OR_RETURN(const std::vector<float> values, ReadRowsOf(piece.tensor, row, rows));
    RETURN_IF_ERROR(use(row, values));
    show(row + rows);
  }
  return absl::OkStatus();
}

BatchOfRows CheckFinite(const Piece& piece) {
  return [&piece](int64_t row, const std::vector<float>& values) {
    const int64_t bad = FindNonFinite(values);
    if (bad < 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(piece.tensor.path, ": ", piece.array(), ": row ",
                     piece.first_row + row + bad / piece.tensor.columns, ", column ",
                     bad % piece.tensor.columns, " is ", values[static_cast<size_t>(bad)],
                     "; all values must be finite. Nothing was written"));
  };
}

BatchOfRows Assign(client::Client& client, const client::Model& model, const Piece& piece) {
  return [&](int64_t row, const std::vector<float>& values) {
    std::vector<int64_t> ids(values.size() / static_cast<size_t>(piece.tensor.columns));
    std::iota(ids.begin(), ids.end(), piece.first_row + row);
    client::AssignOptions options;
    options.slot = piece.slot;
    return Annotate(client.AssignRows(model, piece.table, ids, values, options).status(),
                    absl::StrCat(piece.array(), ", imported up to row ", ids.front()));
  };
}

// Of all pieces in turn, with a line that says how far it is.
absl::Status ForEachPiece(Session& session, const std::vector<Piece>& pieces,
                          absl::string_view verb,
                          const std::function<BatchOfRows(const Piece&)>& use) {
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes();
  const absl::Time begin = SteadyNow();
  Progress progress(session);
  int64_t done = 0;
  for (const Piece& piece : pieces) {
    const std::string name =
        absl::StrCat(verb, piece.table, piece.slot.empty() ? "" : ".", piece.slot);
    RETURN_IF_ERROR(ForEachBatch(piece, use(piece), [&](int64_t rows) {
      progress.Show(name, done + rows * piece.row_bytes(), total, SteadyNow() - begin);
    }));
    done += piece.bytes();
  }
  return absl::OkStatus();
}

absl::Status PrintImported(Session& session, const ImportJob& job,
                           const std::vector<Piece>& pieces) {
  std::map<std::pair<std::string, std::string>, int64_t> rows;
  for (const Piece& piece : pieces) rows[{piece.table, piece.slot}] += piece.tensor.rows;
  Json imported = Json::array();
  for (const auto& [array, count] : rows) {
    imported.push_back({{"table", array.first}, {"slot", array.second}, {"rows", count}});
    if (session.json) continue;
    session.out << ArrayName(array.first, array.second) << ": " << Counted(count, "row") << "\n";
  }
  if (!session.json) return absl::OkStatus();
  return PrintJson(Json{{"model", job.model}, {"imported", imported}}, session.out);
}

absl::Status ImportCheckpoint(Session& session, const ImportJob& job) {
  Target target;
  ASSIGN_OR_RETURN(target.described, session.DescribeModel(job.model));  // its errors have advice
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(session.client_options()));
  ASSIGN_OR_RETURN(target.model, client->DescribeModel(job.model));
  ASSIGN_OR_RETURN(const std::vector<Piece> pieces, PiecesOf(target, job));
  RETURN_IF_ERROR(ForEachPiece(session, pieces, "check ", CheckFinite));
  RETURN_IF_ERROR(session.Advised(ForEachPiece(session, pieces, "", [&](const Piece& piece) {
    return Assign(*client, target.model, piece);
  })));
  return PrintImported(session, job, pieces);
}

}  // namespace

void AddCheckpointExport(CLI::App& checkpoint, Session& session) {
  auto [verb, job] =
      AddVerb(checkpoint, session, "export",
              "Write all tables and slots of a checkpoint to a folder, as TABLE.safetensors and "
              "TABLE.SLOT.safetensors: float32, in the order of ids",
              "emberctl checkpoint export my_model newest tables/", ExportCheckpoint);
  verb->add_option("MODEL", job->model, "Name of the model")->required();
  verb->add_option("NAME", job->name, "Name of the checkpoint, or: newest")->required();
  verb->add_option("DIR", job->folder, "A new or empty folder")->required();
  verb->add_option("--file-bytes", job->file_bytes,
                   "Split larger tables into files with at most this many bytes of rows, and write "
                   "TABLE.safetensors.index.json")
      ->check(Within(int64_t{1}, int64_t{1} << 50))
      ->capture_default_str();
}

void AddCheckpointImport(CLI::App& checkpoint, Session& session) {
  auto [verb, job] = AddVerb(
      checkpoint, session, "import",
      "Overwrite complete tables, or slots, of a declared model with the rows of files. Nothing is "
      "written until all files are known to fit and to hold only finite numbers; if it is "
      "interrupted, run it again",
      "emberctl checkpoint import my_model users.npy", ImportCheckpoint);
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
}

}  // namespace emberd::emberctl
