#!/usr/bin/env python3
"""Shows that lint.py finds each kind of fault in a tree that has just this one, and none in a good tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

LINT = Path(__file__).resolve().parent / "lint.py"
RUN = LINT.parents[2] / "run"

GOOD = {
    "config/a.h": '#pragma once\n#include <string>\n#include "absl/status/status.h"\n#include "emberd/v1/model.pb.h"\n',
    "config/a.cc": '#include "config/a.h"\n#include "config/b.h"\n',
    "config/a_test.cc": '#include "config/a.h"\n#include "tests/testing/random.h"\n',
    "config/b.h": "#pragma once\n",
    "config/b.cc": '#include "config/b.h"\n',  # reached through a.cc
    "config/c.h": "#pragma once\n",
    "config/c_one.cc": '#include "config/c.h"\n',  # c.h has no c.cc: this is a part of it
    "config/d.cc": "int d;\n",
    "config/d_part_test.cc": '// Covers: d.cc, server/host/main_loop.cc\n#include "config/c.h"\n',
    "preprocess/batch/csr.h": '#pragma once\n#include "config/a.h"\n',
    "shard/engine.h": '#pragma once\n#include "preprocess/batch/csr.h"\n',
    "server/host/main.cc": '#include <grpcpp/grpcpp.h>\n#include "shard/engine.h"\nauto saved = absl::Now();  // a date\n',
    "server/host/main_loop.cc": '#include "emberd/internal/v1/shard_service.grpc.pb.h"\n',
    "tests/bench/demo/main.cc": '#include "client/cpp/client.h"\n#include "emberd/v1/x_service.grpc.pb.h"\n',
    "client/cpp/client.h": "#pragma once\n",
    "shard/x-inl.h": "// included once per target\n",
    "tests/testing/random.h": "#pragma once\n",
    "CMakeLists.txt": "foreach(module config shard tests)\n",
    "config/CMakeLists.txt": "emberd_test(x SRCS ${CMAKE_SOURCE_DIR}/tests/testing/x.cc)\n",
    ".dockerignore": "*\n!config\n!shard\n!tests/testing/x.cc\n",
    "tests/testing/cluster.cc": '#include "server/host/main.h"\n#include "tests/bench/demo/x.h"\n',
    "tests/lint/ratchet.txt": "files 99\ngrpcpp 99\nobjects 2\nprograms 1\n" + "".join(
        f"lines.{folder} 1500\n" for folder in ("client", "config", "preprocess", "server/host", "shard", "tests")),
}

# name of the case: (file, its text, what lint must say)
BAD = {
    "config includes preprocess": ("config/a.h", '#pragma once\n#include "preprocess/batch/csr.h"\n',
                                   "config/a.h:2: config may not include preprocess/batch/csr.h"),
    "config includes gRPC": ("config/a.h", "#pragma once\n#include <grpcpp/grpcpp.h>\n",
                             "config/a.h:2: config may not include grpcpp/grpcpp.h (grpc)"),
    "config includes a service": ("config/a.h", '#pragma once\n#include "emberd/v1/x_service.grpc.pb.h"\n',
                                  "config/a.h:2: config may not include emberd/v1/x_service.grpc.pb.h (grpc)"),
    "preprocess includes shard": ("preprocess/batch/csr.h", '#pragma once\n#include "shard/engine.h"\n',
                                  "preprocess/batch/csr.h:2: preprocess may not include shard/engine.h"),
    "shard includes more of preprocess": ("shard/engine.h", '#pragma once\n\n#include "preprocess/plan.h"\n',
                                          "shard/engine.h:3: shard may not include preprocess/plan.h"),
    "shard includes internal messages": ("shard/engine.h", '#pragma once\n#include "emberd/internal/v1/s.pb.h"\n',
                                         "shard/engine.h:2: shard may not include emberd/internal/v1/s.pb.h"),
    "server waits by the wall clock": ("server/host/main.cc", "auto end = absl::Now() + wait;\n",
                                       "server/host/main.cc:1: absl::Now(): take SteadyNow()"),
    "server waits by the system's clock": ("server/host/main.cc", "auto now = std::chrono::system_clock::now();\n",
                                           "server/host/main.cc:1: system_clock::now(): take SteadyNow()"),
    "server includes client": ("server/host/main.cc", '#include "client/cpp/client.h"\n',
                               "server/host/main.cc:1: server/host may not include client/cpp/client.h"),
    "an arrow up": ("server/host/main.cc", '#include "server/coordinator/coordinator.h"\n',
                    "server/host/main.cc:1: server/host may not include server/coordinator/coordinator.h"),
    "server includes tests": ("server/host/main.cc", '#include "tests/testing/cluster.h"\n',
                              "server/host/main.cc:1: server/host may not include tests/testing/cluster.h"),
    "a call that throws": ("config/d.cc", "bool d() { return std::filesystem::exists(path); }\n",
                           "config/d.cc:1: throws where the file system has a fault"),
    "a loop that throws": ("config/d.cc", "void d() {\n  for (const auto& entry : fs::directory_iterator(path, error)) {\n",
                           "config/d.cc:2: throws where the file system has a fault"),
    "client library includes the demo": ("client/cpp/client.h", '#pragma once\n#include "tests/bench/demo/x.h"\n',
                                         "client/cpp/client.h:2: client/cpp may not include tests/bench/demo/x.h"),
    "demo includes server": ("tests/bench/demo/main.cc", '  #  include "server/host/main.h"\n',
                             "tests/bench/demo/main.cc:1: tests/bench/demo may not include server/host/main.h"),
    "demo includes internal service": ("tests/bench/demo/main.cc", '#include "emberd/internal/v1/s.grpc.pb.h"\n',
                                       "tests/bench/demo/main.cc:1: tests/bench/demo may not include emberd/internal"),
    "include by bare name": ("config/a.cc", '#include "config/b.h"\n#include "x.h"\n',
                             'config/a.cc:2: "x.h": include by the path from the root'),
    "mutex that clang does not follow": ("config/a.cc", '#include <mutex>\n#include "config/b.h"\n',
                                         "config/a.cc:1: <mutex>: use absl::Mutex"),
    "no pragma once": ("config/b.h", "#ifndef B_H\n#define B_H\n#endif\n",
                       "config/b.h:1: the header has no #pragma once"),
    "module that the image lacks": (".dockerignore", "*\n!shard\n!tests/testing/x.cc\n",
                                    ".dockerignore:1: the image cannot be compiled without config; add !config"),
    "source of tests that the image lacks": (".dockerignore", "*\n!config\n!shard\n",
                                             ".dockerignore:1: the image cannot be compiled without tests/testing/x.cc"),
    "long file": ("config/a_test.cc", '#include "config/a.h"\n' + "\n" * 800,
                  "config/a_test.cc:801: the file has 801 lines"),
    "leftover in source": ("config/d.cc", "int d;  // TO" + "DO: more\n", "config/d.cc:1: TO" + "DO"),
    "leftover in script": ("run", "#!/bin/bash\n# FIX" + "ME\n", "run:2: FIX" + "ME"),
    "source without a test": ("shard/lonely.cc", "int x;\n", "shard/lonely.cc:1: no test reaches it"),
    "part of a header without a test": ("shard/engine_part.cc", '#include "shard/engine.h"\n',
                                        "shard/engine_part.cc:1: no test reaches it"),
    "test for a file that is gone": ("config/d_part_test.cc", "// Covers: d.cc, gone.cc, server/host/main_loop.cc\n"
                                     '#include "config/c.h"\n',
                                     "config/d_part_test.cc:1: Covers: there is no file gone.cc"),
}


def lint(files, *arguments):
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            file = Path(root) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return subprocess.run([sys.executable, "-B", LINT, *arguments, root], capture_output=True, text=True, check=False)


class LintTest(unittest.TestCase):
    maxDiff = None

    def test_a_good_tree_has_no_faults(self):
        result = lint(GOOD)
        self.assertEqual((result.stdout, result.returncode), ("", 0))

    def test_each_fault_is_found_alone(self):
        for name, (path, text, expected) in BAD.items():
            with self.subTest(name):
                result = lint(GOOD | {path: text})
                lines = result.stdout.splitlines()
                self.assertEqual((len(lines), result.returncode), (1, 1), result.stdout)
                self.assertTrue(lines[0].startswith(expected), lines[0])


class RatchetTest(unittest.TestCase):
    def faults_with(self, ratchets, planted=None):
        """With lines of ratchet.txt set anew, and files planted."""
        lines = dict(line.split() for line in GOOD["tests/lint/ratchet.txt"].splitlines()) | ratchets
        text = "".join(f"{name} {value}\n" for name, value in lines.items() if value)
        return lint(GOOD | {"tests/lint/ratchet.txt": text} | (planted or {}))

    def test_a_planted_file_that_sees_grpc_and_long_additions_are_named(self):
        planted = {"server/host/new.cc": "#include <grpcpp/grpcpp.h>\n" + "\n" * 100, "server/host/new_test.cc": "// Covers: new.cc\n"}
        for name, ratchet in (("files", "13"), ("grpcpp", "2"), ("lines.server/host", "10")):
            with self.subTest(name):
                result = self.faults_with({name: ratchet}, planted)
                self.assertIn(f": {name} is ", result.stdout)
                self.assertIn("raise it in tests/lint/ratchet.txt and say why in the commit, or make room", result.stdout)
                self.assertEqual((len(result.stdout.splitlines()), result.returncode), (1, 1), result.stdout)
        parts = {f"config/part_{n}_test.cc": "\n" * 700 for n in range(3)}
        self.assertIn(": lines.tests is 21", self.faults_with({}, parts).stdout)

    def test_without_a_ratchet_and_of_what_is_gone(self):
        self.assertIn("lines.shard has no ratchet", self.faults_with({"lines.shard": None}).stdout)
        self.assertIn("there is no lines.old: remove the line", self.faults_with({"lines.old": "5"}).stdout)

    def test_far_below_is_a_hint(self):
        result = self.faults_with({})
        self.assertIn("lines.server/host is 4, far below its ratchet of 1500: lower it", result.stderr)
        self.assertEqual((result.stdout, result.returncode), ("", 0))

    def test_objects_and_programs_of_a_build(self):
        link = "build bin/p: CXX_EXECUTABLE_LINKER__p_Release a.o\nbuild bin/q: CXX_EXECUTABLE_LINKER__q_Release a.o\n"
        with tempfile.TemporaryDirectory() as build:
            file = Path(build) / "build.ninja"
            file.write_text("".join(f"build {name}.o: CXX_COMPILER__x {name}.cc\n" for name in "abc") + link)
            result = lint(GOOD, "--build", build)
        self.assertIn("objects is 3, 1 above its ratchet of 2", result.stdout)
        self.assertIn("programs is 2, 1 above its ratchet of 1", result.stdout)
        self.assertEqual(result.returncode, 1)


class ChangedTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name in ("changed.py", "tree.py"):
            self.write(f"tests/lint/{name}", (LINT.parent / name).read_text())
        self.write("base/a.h", "#pragma once\n")
        self.write("base/a.cc", '#include "base/a.h"\n')
        self.write("base/b.cc", '#include "base/a.h"\n')
        self.write("base/c.cc", "int c;\n")
        self.write("base/c_test.cc", "int t;\n")
        names = ("a", "b", "c", "c_test")
        self.write("build/compile_commands.json", json.dumps(
            [{"file": f"{self.root}/base/{n}.cc", "command": f"clang++ -o {n}.o -c base/{n}.cc"} for n in names]))
        self.write(".gitignore", "/build/\n__pycache__/\n")

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *arguments], cwd=self.root, check=True,
                       capture_output=True)

    def commit(self, date):
        self.git("add", "-A")
        with unittest.mock.patch.dict(os.environ, {"GIT_COMMITTER_DATE": date}):
            self.git("commit", "-q", "-m", "x")

    def read(self, *options):
        done = subprocess.run([sys.executable, "-B", "tests/lint/changed.py", "build", *options], cwd=self.root,
                              capture_output=True, text=True, check=True)
        return done.stdout.split(), done.stderr

    def test_without_history_everything_is_read(self):
        self.assertEqual(self.read()[0], ["a.o", "b.o", "c.o", "c_test.o"])
        self.assertEqual(self.read("--shipped")[0], ["a.o", "b.o", "c.o"])

    def test_what_changed_since_the_main_branch_was_left(self):
        self.git("init", "-q", "-b", "main")
        self.commit("2026-01-01T00:00:00Z")
        self.git("checkout", "-q", "-b", "mine")
        self.write("base/c.cc", "int d;\n")
        self.commit("2026-01-01T00:01:00Z")
        objects, text = self.read()
        self.assertEqual(objects, ["c.o"])
        self.assertIn("reading 1 of 4 sources, changed since ", text)
        self.write("base/a.h", "#pragma once\nint x;\n")  # not committed; who includes it is read
        self.assertEqual(self.read()[0], ["a.o", "b.o", "c.o"])
        self.assertEqual(len(self.read("--all")[0]), 4)
        self.git("checkout", "-q", "base/a.h")
        self.write("base/b.cc", '#include "base/m.pb.h"\n')
        self.write("proto/base/m.proto", 'syntax = "proto3";\n')
        self.commit("2026-01-01T00:02:00Z")
        self.git("branch", "-f", "main")
        self.git("checkout", "-q", "-b", "other")
        self.write("proto/base/m.proto", 'syntax = "proto3";\nmessage M {}\n')
        self.commit("2026-01-01T00:03:00Z")
        self.assertEqual(self.read()[0], [])  # what a message is to its sources is the compiler's matter
        self.write(".clang-tidy", "Checks: x\n")
        self.assertEqual(len(self.read()[0]), 4)

    def test_presets_change_the_rules_where_clang_reads_by_them(self):
        presets = {name: {"name": name, "inherits": parents} for name, parents in
                   (("base", []), ("lint", "base"), ("release", ["base"]))}

        def write_presets():
            self.write("CMakePresets.json", json.dumps({"configurePresets": list(presets.values())}))

        self.git("init", "-q", "-b", "main")
        write_presets()
        self.commit("2026-01-01T00:00:00Z")
        self.git("checkout", "-q", "-b", "mine")
        presets["release"]["generator"] = "Ninja"
        write_presets()
        self.commit("2026-01-01T00:01:00Z")
        self.assertEqual(self.read()[0], [])
        presets["base"]["generator"] = "Ninja"
        write_presets()
        self.assertEqual(len(self.read()[0]), 4)

    def test_on_the_main_branch_since_three_hours_before(self):
        self.git("init", "-q", "-b", "main")
        self.commit("2026-01-01T00:00:00Z")
        self.assertEqual(len(self.read()[0]), 4)  # nothing is older
        for name, date in (("b", "2026-01-05T00:00:00Z"), ("c", "2026-01-05T03:00:01Z"), ("a", "2026-01-05T06:00:00Z")):
            self.write(f"base/{name}.cc", "int e;\n")
            self.commit(date)
        self.assertEqual(self.read()[0], ["a.o", "c.o"])


# What clang must say to one seeded mistake in a source that is good otherwise.
GUARDED = """#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"

class Counter {
 public:
  void Add(int n) {
    absl::MutexLock lock(&mutex_);
    sum_ += n;
  }

 private:
  absl::Mutex mutex_;
  int sum_ ABSL_GUARDED_BY(mutex_) = 0;
};
"""
MISTAKES = {
    "thread-safety": GUARDED.replace("    absl::MutexLock lock(&mutex_);\n", ""),
    "bugprone-use-after-move": GUARDED + "std::string Twice(std::string s, std::vector<std::string>* to) {\n"
                               "  to->push_back(std::move(s));\n  return s;\n}\n",
    "performance-unnecessary-copy-initialization": GUARDED + "size_t Length(const std::vector<std::string>& all) {\n"
                                                   "  const std::string first = all.front();\n"
                                                   "  return first.size();\n}\n",
}


CLANG = next((version for version in (14, 19) if shutil.which(f"clang-tidy-{version}")), None)


@unittest.skipUnless(CLANG, "without clang-tidy")
class ClangTest(unittest.TestCase):
    """By the command that the preset `lint` puts in front of its compiler, with its flags."""

    def judge(self, text, target="seeded"):
        """As a source of `target`, which is relative to the build's folder."""
        presets = json.loads((RUN.parent / "CMakePresets.json").read_text())["configurePresets"]
        variables = next(preset for preset in presets if preset["name"] == "lint")["cacheVariables"]
        # Below the root, whose .clang-tidy holds for it.
        build = RUN.parent / "build"
        build.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=build, prefix="seeded_") as folder:
            source = Path(folder) / "seeded.cc"
            source.write_text(text)
            (Path(folder) / target).parent.mkdir(exist_ok=True)
            return subprocess.run(
                [LINT.parent / "tidy.sh", f"clang++-{CLANG}", variables["CMAKE_CXX_FLAGS"], "-std=c++20",
                 f"-I{RUN.parent}", "-MD", "-MF", f"{source}.d", "-o", f"{target}.o", "-c", source],
                capture_output=True, text=True, check=False, cwd=folder, stdin=subprocess.DEVNULL)

    def test_a_good_source_passes(self):
        result = self.judge(GUARDED)
        self.assertEqual((result.stdout, result.returncode), ("", 0), result.stderr)

    def test_each_mistake_is_found(self):
        for check, text in MISTAKES.items():
            with self.subTest(check):
                result = self.judge(text)
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertIn(check, result.stdout)


    def test_sources_of_tests_have_the_warnings_of_clang_alone(self):
        for target in ("tests/seeded", "seeded_test.dir/seeded"):
            for check, text in MISTAKES.items():
                with self.subTest(check, target=target):
                    result = self.judge(text, target)
                    self.assertEqual(result.returncode, int(check == "thread-safety"), result.stderr)


class RunTest(unittest.TestCase):
    def run_script(self, *arguments):
        return subprocess.run([RUN, *arguments], capture_output=True, text=True, check=False,
                              stdin=subprocess.DEVNULL)

    def test_help_lists_every_verb(self):
        verbs = {line.split("(")[0][len("verb_"):].replace("_", "-")
                 for line in RUN.read_text().splitlines() if line.startswith("verb_")}
        self.assertIn("test-asan", verbs)
        result = self.run_script("--help")
        self.assertEqual(result.returncode, 0)
        listed = {line.split()[0] for line in result.stdout.splitlines() if re.match(r"  \S", line)}
        self.assertEqual(listed, verbs)

    def test_an_unknown_verb_is_refused(self):
        for arguments in ((), ("tset",), ("verb_clean",)):
            result = self.run_script(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn("usage: ./run VERB", result.stderr)


if __name__ == "__main__":
    unittest.main()
