#include "config/rule_program.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "absl/base/casts.h"
#include "absl/strings/ascii.h"
#include "absl/strings/charconv.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

using enum RuleOp;

constexpr size_t kMaxRuleText = size_t{64} << 10;
constexpr int kMaxNodes = 512, kMaxHyperParameters = 16, kMaxNesting = 100, kMaxCalls = 256;
constexpr absl::string_view kArguments =
    ": gradient, weight, slots, learning rate, hyper-parameters";

// Part of the text: "\n" or ";" between statements; empty at the end; strings unquoted.
using Token = absl::string_view;
using Tokens = absl::Span<const Token>;

bool Ends(Token token) { return token.empty() || token == "\n" || token == ";"; }

bool IsWord(absl::string_view text) {
  return !text.empty() && (absl::ascii_isalpha(text[0]) || text[0] == '_');
}

size_t TokenLength(absl::string_view text) {
  size_t length = 1;
  if (absl::ascii_isdigit(text[0])) {
    double number;
    return absl::from_chars(text.data(), text.data() + text.size(), number).ptr - text.data();
  }
  if (absl::ascii_isalpha(text[0]) || absl::StrContains("_%@", text[0])) {
    const auto belongs = [](char c) {
      return absl::ascii_isalnum(c) || absl::StrContains("_.$#", c);
    };
    while (length < text.size() && belongs(text[length])) ++length;
  } else if (text[0] == '"') {
    length = std::min(text.find('"', 1), text.size() - 1) + 1;
  } else if (absl::StartsWith(text, "//")) {
    length = std::min(text.find('\n'), text.size());
  } else if (text.size() > 1 && (text[1] == '=' || absl::StartsWith(text, "->"))) {
    length = absl::StrContains("<>=!-", text[0]) ? 2 : 1;
  }
  return length;
}

std::vector<Token> Tokenize(absl::string_view text) {
  std::vector<Token> tokens;
  for (size_t length; !text.empty(); text.remove_prefix(length)) {
    length = TokenLength(text);
    const Token token = text.substr(0, length);
    if (token[0] == '"' && length > 2) {
      tokens.push_back(token.substr(1, length - 2));
    } else if (token == "\n" || !(absl::ascii_isspace(token[0]) || absl::StartsWith(token, "//"))) {
      tokens.push_back(token);
    }
  }
  tokens.push_back(text);
  return tokens;
}

// Operations, as expressions have them and as StableHLO does.
struct NamedOp {
  absl::string_view text, hlo;
  RuleOp op;

  // How close it binds operands on both of its sides; 0: it is a function.
  int Level() const {
    return op >= kLess && op <= kNotEqual ? 1
           : op < kAdd || op > kDivide    ? 0
           : op < kMultiply               ? 2
                                          : 3;
  }
};
#define EMBERD_RULE_OP(name, text, hlo, value) {text, hlo, name},
constexpr NamedOp kOps[] = {{"", "broadcast_in_dim", kCopy},
                            {"", "reshape", kCopy},
                            {"", "and", kMin},
                            {"", "or", kMax},
                            {"", "square", kMultiply},
                            {"", "not", kEqual},
                            EMBERD_RULE_OPS(EMBERD_RULE_OP)};
#undef EMBERD_RULE_OP

const NamedOp* FindOp(absl::string_view NamedOp::*column, absl::string_view name) {
  const auto* found = std::find_if(std::begin(kOps), std::end(kOps),
                                   [&](const NamedOp& one) { return one.*column == name; });
  return name.empty() || found == std::end(kOps) ? nullptr : found;
}

class RuleCompiler {
 public:
  explicit RuleCompiler(const v1::CustomConfig& custom)
      : custom_(custom),
        text_(custom.expression().empty() ? custom.stablehlo() : custom.expression()) {
    inputs_ = {Add(kGradient), Add(kWeight)};
    for (int i = 0; i < custom.slots_size(); ++i) inputs_.push_back(Add(kSlot, i));
    inputs_.push_back(Add(kLearningRate));
    for (int i = 0; i < custom.hyper_parameters_size(); ++i)
      inputs_.push_back(Add(kHyperParameter, i));
  }

  absl::StatusOr<RuleProgram> Compile() {
    program_.all_float32 = custom_.expression().empty();
    RETURN_IF_ERROR(program_.all_float32 ? CompileFunctions() : CompileStatements());
    RETURN_IF_ERROR(CheckSize(tokens_.back()));
    for (int& result : program_.results) {
      if (RuleOperands(program_.nodes[result].op) == 0) result = Add(kCopy, result);
    }
    return std::move(program_);
  }

 private:
  using Nodes = std::vector<int>;

  absl::Status CheckSize(Token token) const {
    const auto written = std::count_if(program_.nodes.begin(), program_.nodes.end(),
                                       [](const auto& node) { return node.op >= kNumber; });
    if (written <= kMaxNodes) return absl::OkStatus();
    return Fault(token, absl::StrCat("the rule has ", written,
                                     " operations and numbers; it may have ", kMaxNodes));
  }
  absl::Status Fault(Token token, absl::string_view what) const {
    const absl::string_view before = text_.substr(0, token.data() - text_.data());
    return absl::InvalidArgumentError(
        absl::StrCat("line ", 1 + std::count(before.begin(), before.end(), '\n'), ", column ",
                     before.size() - (before.rfind('\n') + 1) + 1, ": ", what));
  }
  absl::Status Expected(absl::string_view wanted, Token token) const {
    return Fault(token, absl::StrCat("expected ", wanted, ", not ",
                                     Ends(token) ? "the end of the statement" : QuotedText(token)));
  }

  int Add(RuleOp op, int a = 0, int b = 0, int c = 0, double number = 0) {
    program_.nodes.push_back({op, a, b, c, number});
    return static_cast<int>(program_.nodes.size()) - 1;
  }
  absl::StatusOr<int> Add(RuleOp op, Nodes operands, Token token) {
    const size_t count = operands.size(), wanted = RuleOperands(op);
    operands.resize(3);
    if (count == wanted) return Add(op, operands[0], operands[1], operands[2]);
    return Fault(token, absl::StrCat(token, " takes ", wanted, " values, not ", count));
  }

  // --- Statements of expressions.

  Token Now() const { return tokens_[next_]; }
  bool Take(absl::string_view text) {
    const bool taken = Now() == text;
    next_ += taken;
    return taken;
  }

  absl::Status CompileStatements() {
    const int slots = custom_.slots_size();
    values_ = {{"g", 0}, {"lr", inputs_[2 + slots]}, {"step", Add(kStep)}};
    for (int i = 0; i < custom_.hyper_parameters_size(); ++i) {
      values_[custom_.hyper_parameters(i).name()] = inputs_[3 + slots + i];
    }
    const auto fixed = values_;
    values_["w"] = 1;
    for (int i = 0; i < slots; ++i) values_[custom_.slots(i).name()] = 2 + i;
    bool updated = false;
    while (!Now().empty()) {
      if (Take("\n") || Take(";")) continue;
      const Token name = tokens_[next_++];
      if (!IsWord(name) || fixed.count(name) > 0 || FindOp(&NamedOp::text, name)) {
        return Expected("w, a slot or a name of your own to set, as in w = w - lr * g", name);
      }
      if (!Take("=")) return Expected("\"=\"", Now());
      ASSIGN_OR_RETURN(values_[name], Operand(1));
      updated = updated || name == "w";
      if (!Ends(Now())) return Expected("an operator or the end of the statement", Now());
    }
    if (!updated) return Expected("that w is set, as in w = w - lr * g", Now());
    program_.results = {values_["w"]};
    for (const v1::CustomSlot& slot : custom_.slots())
      program_.results.push_back(values_[slot.name()]);
    return absl::OkStatus();
  }

  // What operators of this level and above join, from left to right.
  absl::StatusOr<int> Operand(int level) {
    if (level > 3) return Signed();
    ASSIGN_OR_RETURN(int left, Operand(level + 1));
    for (bool joined = false;; joined = true) {
      const Token token = Now();
      const NamedOp* op = FindOp(&NamedOp::text, token);
      if (op == nullptr || op->Level() != level) return left;
      if (level == 1 && joined) return Expected("parentheses around a comparison", token);
      ++next_;
      ASSIGN_OR_RETURN(const int right, Operand(level + 1));
      left = Add(op->op, left, right);
    }
  }

  absl::StatusOr<int> Signed() {
    if (++depth_ > kMaxNesting)
      return Fault(Now(), absl::StrCat("more than ", kMaxNesting, " signs and parentheses"));
    const bool negative = Take("-");
    const auto value = negative || Take("+") ? Signed() : Simple();
    --depth_;
    return negative && value.ok() ? Add(kNegate, *value) : value;
  }

  absl::StatusOr<int> Simple() {
    const Token token = Now();
    double number;
    if (!token.empty() && absl::ascii_isdigit(token[0]) && absl::SimpleAtod(token, &number)) {
      if (!std::isfinite(number)) return Expected("a number below 1.8e308", token);
      ++next_;
      return Add(kNumber, 0, 0, 0, number);
    }
    if (const auto value = values_.find(token); value != values_.end()) {
      ++next_;
      return value->second;
    }
    const NamedOp* function = FindOp(&NamedOp::text, token);
    if (token != "(" && (function == nullptr || function->Level() > 0)) {
      std::vector<std::string> names;
      for (const auto& [name, node] : values_) names.emplace_back(name);
      for (const NamedOp& one : kOps) {
        if (IsWord(one.text)) names.emplace_back(one.text);
      }
      return absl::InvalidArgumentError(
          absl::StrCat(Expected("a number, a name or \"(\"", token).message(), "; ",
                       KnownNames("names", token, names)));
    }
    if (function != nullptr && tokens_[++next_] != "(") return Expected("\"(\"", Now());
    Nodes operands;
    do {
      ++next_;
      ASSIGN_OR_RETURN(operands.emplace_back(), Operand(1));
    } while (function != nullptr && Now() == ",");
    if (!Take(")")) return Expected("\")\"", Now());
    return function == nullptr ? operands[0] : Add(function->op, operands, token);
  }

  // --- Functions of StableHLO.

  struct Function {
    Token name;
    std::vector<absl::string_view> arguments;
    size_t body;  // token
  };

  absl::Status CompileFunctions() {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i] != "func.func") continue;
      while (!absl::StartsWith(tokens_[i], "@") && !Ends(tokens_[i])) ++i;
      Function& function = functions_[tokens_[i]];
      function = {tokens_[i], {}, 0};
      for (; tokens_[i] != "->" && !Ends(tokens_[i]); ++i) {
        if (absl::StartsWith(tokens_[i], "%")) function.arguments.push_back(tokens_[i]);
      }
      while (!Ends(tokens_[i])) ++i;
      function.body = i;
    }
    if (functions_.empty()) return Expected("a function, as func.func @main(", tokens_[0]);
    const auto main = functions_.find("@main");
    const Function& entry = main == functions_.end() ? functions_.begin()->second : main->second;
    ASSIGN_OR_RETURN(program_.results, Run(entry, inputs_));
    const size_t results = 1 + custom_.slots_size();
    if (program_.results.size() == results) return absl::OkStatus();
    return Fault(entry.name, absl::StrCat("the function returns ", program_.results.size(),
                                          " values, not ", results, ": weight, slots"));
  }

  // What the function returns.
  absl::StatusOr<Nodes> Run(const Function& function, const Nodes& arguments) {
    if (arguments.size() != function.arguments.size()) {
      return Fault(function.name,
                   absl::StrCat("the function takes ", function.arguments.size(), " values, not ",
                                arguments.size(), &arguments == &inputs_ ? kArguments : ""));
    }
    std::map<std::string, int> values;
    for (size_t i = 0; i < arguments.size(); ++i) {
      values[std::string(function.arguments[i])] = arguments[i];
    }
    for (size_t begin = function.body, end;; begin = end) {
      while (tokens_[begin] == "\n") ++begin;
      for (end = begin; !Ends(tokens_[end]);) ++end;
      const Tokens line(&tokens_[begin], end - begin);
      const bool named = line.size() > 1 && absl::StartsWith(line[0], "%");
      const auto work = named ? Find(line, "=") + 1 : line.begin();
      if (work >= line.end() || (!named && !absl::EndsWith(*work, "return"))) {
        return Expected("%name = operation, or return", tokens_[begin]);
      }
      Nodes operands;
      for (const Token token : Tokens(work, line.end() - work)) {
        if (!absl::StartsWith(token, "%")) continue;
        const auto value = values.find(std::string(token));
        if (value == values.end()) return Expected("the name of a value before it", token);
        operands.push_back(value->second);
      }
      if (!named) return operands;
      ASSIGN_OR_RETURN(const Nodes made, Operation(Tokens(work, line.end() - work), operands));
      RETURN_IF_ERROR(CheckSize(line[0]));  // before the calls of many functions multiply
      // "%2#0" is the first of several values of %2.
      for (size_t i = 0; i < made.size(); ++i) {
        values[made.size() == 1 ? std::string(line[0]) : absl::StrCat(line[0], "#", i)] = made[i];
      }
    }
  }

  static Tokens::const_iterator Find(Tokens line, absl::string_view prefix) {
    return std::find_if(line.begin(), line.end() - 1,
                        [&](Token token) { return absl::StartsWith(token, prefix); });
  }

  absl::StatusOr<Nodes> Operation(Tokens line, Nodes operands) {
    const absl::string_view name = line[0].substr(line[0].find('.') + 1);
    if (name == "call") {
      const auto found = functions_.find(*Find(line, "@"));
      // Functions that call themselves end here, too.
      if (found != functions_.end() && ++calls_ <= kMaxCalls) return Run(found->second, operands);
      return Expected(
          absl::StrCat("one of at most ", kMaxCalls, " calls, of functions of the text"), line[0]);
    }
    RETURN_IF_ERROR(CheckTypes(line, name == "convert", name == "constant"));
    if (name == "constant") return Constant(line);
    const NamedOp* op = FindOp(&NamedOp::hlo, name);
    for (const Token token : line) {
      if (name == "compare" && op == nullptr) op = FindOp(&NamedOp::hlo, token);
    }
    if (name == "clamp" && operands.size() == 3) {
      return Nodes{Add(kMin, Add(kMax, operands[1], operands[0]), operands[2])};
    }
    if (op == nullptr) return Expected("an elementwise operation of StableHLO on f32", line[0]);
    if (name == "square") operands.resize(2 * operands.size(), operands.empty() ? 0 : operands[0]);
    if (name == "not") operands.push_back(Add(kNumber));
    ASSIGN_OR_RETURN(const int value, Add(op->op, operands, line[0]));
    return Nodes{value};
  }

  // dense<1.5>, dense<-1>, dense<true>, dense<0x7F800000>: one number for all elements.
  absl::StatusOr<Nodes> Constant(Tokens line) {
    const auto dense = Find(line, "dense");
    std::string text;
    for (auto token = dense; token != line.end() && *token != ">"; ++token) {
      if (token - dense > 1) absl::StrAppend(&text, *token);
    }
    uint32_t bits;
    double number = text == "true";
    if (absl::StartsWith(text, "0x") && absl::SimpleHexAtoi(text, &bits)) {
      number = absl::bit_cast<float>(bits);
    } else if (text != "true" && text != "false" && !absl::SimpleAtod(text, &number)) {
      return Expected("one number for all elements, as dense<1.5>", *dense);
    }
    return Nodes{Add(kNumber, 0, 0, 0, number)};
  }

  // Elements are f32, and truths i1. Whole numbers may become f32.
  absl::Status CheckTypes(Tokens line, bool convert, bool constant) const {
    absl::string_view type;
    int types = 0;
    for (auto token = line.begin(); token != line.end(); ++token) {
      if (*token != "tensor") continue;
      while (token != line.end() - 1 && token[1] != ">") ++token;
      type = token->substr(token->rfind('x') + 1);
      const bool whole = (convert || constant) && (type == "i32" || type == "i64");
      if (type != "f32" && type != "i1" && !whole) return Expected("elements of f32", *token);
      ++types;
    }
    if (!convert || types < 2 || type == "f32") return absl::OkStatus();
    return Expected("a conversion to f32", line[0]);
  }

  const v1::CustomConfig& custom_;
  const absl::string_view text_;
  const std::vector<Token> tokens_ = Tokenize(text_);
  RuleProgram program_;
  Nodes inputs_;                             // as functions take them
  std::map<absl::string_view, int> values_;  // of statements, as set so far
  size_t next_ = 0;
  int depth_ = 0, calls_ = 0;
  std::map<absl::string_view, Function> functions_;
};

// Of a slot or hyper-parameter; `taken` has those before it.
absl::Status CheckRuleName(const std::string& name, const std::string& path,
                           std::set<std::string>& taken) {
  if (HasNameCharacters(name) && name.find_first_of(".-") == name.npos &&
      !absl::ascii_isdigit(name[0]) && name.size() <= kMaxNameLength &&
      FindOp(&NamedOp::text, name) == nullptr &&
      v1::OptimizerConfig::descriptor()->FindFieldByName(name) == nullptr &&
      taken.insert(name).second) {
    return absl::OkStatus();
  }
  return NotAllowed(path, QuotedText(name),
                    "1 to 128 characters of [A-Za-z0-9_], the first no digit, and no name that the "
                    "rule, a function, OptimizerConfig or a file of checkpoints has already");
}

}  // namespace

absl::StatusOr<RuleProgram> CompileRule(const v1::CustomConfig& custom) {
  auto program = RuleCompiler(custom).Compile();
  if (program.ok()) return program;
  return Annotate(program.status(), custom.expression().empty() ? "stablehlo" : "expression");
}

absl::Status CheckCustom(const v1::CustomConfig& custom, const std::string& path) {
  const size_t size = custom.expression().size() + custom.stablehlo().size();
  if (custom.expression().empty() == custom.stablehlo().empty() || size > kMaxRuleText) {
    return NotAllowed(path, absl::StrCat("a rule of ", size, " bytes"),
                      absl::StrCat("one of expression and stablehlo, of at most ", kMaxRuleText));
  }
  std::set<std::string> names = {"g", "w", "lr", "step", "weights"};
  const auto check = [&](const auto& list, absl::string_view field, int most) -> absl::Status {
    for (int i = 0; i < list.size(); ++i) {
      const std::string entry = FieldPath(path, field, i);
      if (i >= most) return NotAllowed(entry, "one more", absl::StrCat("one of at most ", most));
      RETURN_IF_ERROR(CheckRuleName(list[i].name(), FieldPath(entry, "name"), names));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(check(custom.slots(), "slots", kMaxCustomSlots));
  names.erase("weights");  // which no slot may have: what checkpoints call the rows themselves
  RETURN_IF_ERROR(check(custom.hyper_parameters(), "hyper_parameters", kMaxHyperParameters));
  return Annotate(CompileRule(custom).status(), path);
}

bool RuleUsesStep(const v1::CustomConfig& custom) {
  const std::vector<Token> tokens = Tokenize(custom.expression());
  return std::count(tokens.begin(), tokens.end(), "step") > 0;
}

}  // namespace emberd::config
