#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

// Each shell calls `emberctl` for nothing: what it completes is in the script.
constexpr char kBash[] = R"(# emberctl completion bash > /etc/bash_completion.d/emberctl
_emberctl() {
  local word=${COMP_WORDS[COMP_CWORD]} verb= i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case " @VERBS@ " in *" ${COMP_WORDS[i]} "*) verb=${COMP_WORDS[i]}; break ;; esac
  done
  case $verb in
@CASES@  *) COMPREPLY=($(compgen -W "@VERBS@ @COMMON@" -- "$word")) ;;
  esac
}
complete -o default -F _emberctl emberctl
)";
constexpr char kBashCase[] = "  @VERB@) COMPREPLY=($(compgen -W \"@WORDS@\" -- \"$word\")) ;;\n";

constexpr char kZsh[] = R"(#compdef emberctl
# emberctl completion zsh > "${fpath[1]}/_emberctl"
_emberctl() {
  local verb= word
  for word in ${words[2,CURRENT-1]}; do
    case " @VERBS@ " in *" $word "*) verb=$word; break ;; esac
  done
  case $verb in
@CASES@  *) compadd -- @VERBS@ @COMMON@ ;;
  esac
}
compdef _emberctl emberctl
)";
constexpr char kZshCase[] = "  @VERB@) compadd -- @WORDS@; _files ;;\n";

constexpr char kFish[] = R"(# emberctl completion fish > ~/.config/fish/completions/emberctl.fish
complete -c emberctl -n __fish_use_subcommand -f -a "@VERBS@"
@CASES@)";
constexpr char kFishCase[] =
    "complete -c emberctl -n \"__fish_seen_subcommand_from @VERB@\" -a \"@WORDS@\"\n";

std::vector<const CLI::App*> AllVerbs(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* verb) { return !verb->get_name().empty(); });
}

// Options and commands of `app` itself.
std::set<std::string> WordsOf(const CLI::App& app) {
  std::set<std::string> words;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_lnames().empty()) words.insert("--" + option->get_lnames().front());
  }
  for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!one->get_name().empty()) words.insert(one->get_name());
    words.merge(WordsOf(*one));  // of an option group, or of a verb's own verb
  }
  return words;
}

std::string Script(const CLI::App& app, const std::string& shell) {
  const char* const script = shell == "bash" ? kBash : shell == "zsh" ? kZsh : kFish;
  const char* const verb_case = shell == "bash" ? kBashCase : shell == "zsh" ? kZshCase : kFishCase;
  std::vector<std::string> verbs;
  std::vector<std::string> common;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_lnames().empty()) common.push_back("--" + option->get_lnames().front());
  }
  std::string cases;
  for (const CLI::App* verb : AllVerbs(app)) {
    verbs.push_back(verb->get_name());
    std::set<std::string> words = WordsOf(*verb);
    words.insert(common.begin(), common.end());
    absl::StrAppend(&cases,
                    absl::StrReplaceAll(verb_case, {{"@VERB@", verb->get_name()},
                                                    {"@WORDS@", absl::StrJoin(words, " ")}}));
  }
  return absl::StrReplaceAll(script, {{"@VERBS@", absl::StrJoin(verbs, " ")},
                                      {"@COMMON@", absl::StrJoin(common, " ")},
                                      {"@CASES@", cases}});
}

struct CompletionOptions {
  const CLI::App* app = nullptr;
  std::string shell;
};

absl::Status PrintScript(Session& session, const CompletionOptions& options) {
  session.out << Script(*options.app, options.shell);
  return absl::OkStatus();
}

}  // namespace

void AddCompletion(CLI::App& app, Session& session) {
  auto [completion, options] =
      AddVerb(app, session, "completion", "Print a script that lets a shell complete commands",
              "emberctl completion bash > /etc/bash_completion.d/emberctl", PrintScript);
  options->app = &app;
  completion->add_option("SHELL", options->shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}).description(""));
}

}  // namespace emberd::emberctl
