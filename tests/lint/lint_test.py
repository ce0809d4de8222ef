#!/usr/bin/env python3
"""Shows that lint.py finds each kind of fault in a tree that has just this one, and none in a good tree."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
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
    "config/d_part_test.cc": '// Covers: d.cc, server/main_loop.cc\n#include "config/c.h"\n',
    "preprocess/batch/csr.h": '#pragma once\n#include "config/a.h"\n',
    "shard/engine.h": '#pragma once\n#include "preprocess/batch/csr.h"\n',
    "server/main.cc": '#include <grpcpp/grpcpp.h>\n#include "shard/engine.h"\n',
    "server/main_loop.cc": '#include "emberd/internal/v1/shard_service.grpc.pb.h"\n',
    "tests/bench/demo/main.cc": '#include "client/cpp/client.h"\n#include "emberd/v1/x_service.grpc.pb.h"\n',
    "client/cpp/client.h": "#pragma once\n",
    "shard/x-inl.h": "// included once per target\n",
    "tests/testing/random.h": "#pragma once\n",
    "tests/testing/cluster.cc": '#include "server/main.h"\n#include "tests/bench/demo/x.h"\n',
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
    "server includes client": ("server/main.cc", '#include "client/cpp/client.h"\n',
                               "server/main.cc:1: server may not include client/cpp/client.h"),
    "server includes tests": ("server/main.cc", '#include "tests/testing/cluster.h"\n',
                              "server/main.cc:1: server may not include tests/testing/cluster.h"),
    "client library includes the demo": ("client/cpp/client.h", '#pragma once\n#include "tests/bench/demo/x.h"\n',
                                         "client/cpp/client.h:2: client/cpp may not include tests/bench/demo/x.h"),
    "demo includes server": ("tests/bench/demo/main.cc", '  #  include "server/main.h"\n',
                             "tests/bench/demo/main.cc:1: tests/bench/demo may not include server/main.h"),
    "demo includes internal service": ("tests/bench/demo/main.cc", '#include "emberd/internal/v1/s.grpc.pb.h"\n',
                                       "tests/bench/demo/main.cc:1: tests/bench/demo may not include emberd/internal"),
    "include by bare name": ("config/a.cc", '#include "config/b.h"\n#include "x.h"\n',
                             'config/a.cc:2: "x.h": include by the path from the root'),
    "mutex that clang does not follow": ("config/a.cc", '#include <mutex>\n#include "config/b.h"\n',
                                         "config/a.cc:1: <mutex>: include base/mutex.h"),
    "no pragma once": ("config/b.h", "#ifndef B_H\n#define B_H\n#endif\n",
                       "config/b.h:1: the header has no #pragma once"),
    "long file": ("config/a_test.cc", '#include "config/a.h"\n' + "\n" * 500,
                  "config/a_test.cc:501: the file has 501 lines"),
    "leftover in source": ("config/d.cc", "int d;  // TO" + "DO: more\n", "config/d.cc:1: TO" + "DO"),
    "leftover in script": ("run", "#!/bin/bash\n# FIX" + "ME\n", "run:2: FIX" + "ME"),
    "source without a test": ("shard/lonely.cc", "int x;\n", "shard/lonely.cc:1: no test reaches it"),
    "part of a header without a test": ("shard/engine_part.cc", '#include "shard/engine.h"\n',
                                        "shard/engine_part.cc:1: no test reaches it"),
    "test for a file that is gone": ("config/d_part_test.cc", "// Covers: d.cc, gone.cc, server/main_loop.cc\n"
                                     '#include "config/c.h"\n',
                                     "config/d_part_test.cc:1: Covers: there is no file gone.cc"),
}


def lint(files):
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            file = Path(root) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return subprocess.run([sys.executable, LINT, root], capture_output=True, text=True, check=False)


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


# What clang must say to one seeded mistake in a source that is good otherwise.
GUARDED = """#include <string>
#include <vector>

#include "base/mutex.h"

class Counter {
 public:
  void Add(int n) {
    emberd::MutexLock lock(&mutex_);
    sum_ += n;
  }

 private:
  emberd::Mutex mutex_;
  int sum_ ABSL_GUARDED_BY(mutex_) = 0;
};
"""
MISTAKES = {
    "thread-safety": GUARDED.replace("    emberd::MutexLock lock(&mutex_);\n", ""),
    "bugprone-use-after-move": GUARDED + "std::string Twice(std::string s, std::vector<std::string>* to) {\n"
                               "  to->push_back(std::move(s));\n  return s;\n}\n",
    "performance-unnecessary-copy-initialization": GUARDED + "size_t Length(const std::vector<std::string>& all) {\n"
                                                   "  const std::string first = all.front();\n"
                                                   "  return first.size();\n}\n",
}


@unittest.skipUnless(shutil.which("clang-tidy-14"), "without clang-tidy-14")
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
                [LINT.parent / "tidy.sh", variables["CMAKE_CXX_COMPILER"], variables["CMAKE_CXX_FLAGS"], "-std=c++20",
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
