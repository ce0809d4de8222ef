#!/usr/bin/env python3
"""Checks the rules of the source tree that no compiler knows. Prints each fault as path:line: text; status 1 if any.

usage: lint.py [ROOT]                 (default: the tree that this file is in)
       lint.py --build FOLDER [ROOT]  whether a whole build in FOLDER, which CMake configured, has few enough objects and programs
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import figures  # noqa: E402
from tree import INCLUDE, Tree, is_grpc, is_product  # noqa: E402

# What most folders of server/ may include.
SERVER = {"proto", "base", "base/rpc", "grpc", "internal"}
# Who may include whom: module -> (modules, single files of other modules). A module is the folder of a file, or the
# nearest folder above it that stands here; it may always include itself. "grpc" stands for gRPC and the generated
# services: only who lists it may include them. "internal" stands for the internal services of the servers.
MODULES = {
    "base": (set(), set()),
    "base/rpc": ({"proto", "base", "grpc"}, set()),
    "config": ({"proto", "base"}, set()),
    "preprocess": ({"proto", "base", "config"}, set()),
    "shard": ({"proto", "base", "config"}, {"preprocess/batch/csr.h"}),
    "server/files": ({"proto", "base"}, set()),
    "server/ops": ({*SERVER, "config"}, set()),
    "server/security": ({*SERVER, "config", "server/ops"}, set()),
    "server/rpc": ({*SERVER, "config", "server/ops", "server/security"}, set()),
    "server/checkpoint": ({"proto", "base", "internal", "config", "preprocess", "shard", "server/files"}, set()),
    "server/log": ({"proto", "base", "internal", "server/files"}, set()),
    "server/group": ({"proto", "base", "internal"}, set()),
    "server/host": ({*SERVER, "config", "preprocess", "shard", "server/files", "server/ops", "server/security", "server/rpc",
                     "server/checkpoint", "server/log", "server/group"}, set()),
    "server/step": ({*SERVER, "config", "preprocess", "shard", "server/ops", "server/rpc", "server/host"}, set()),
    "server/coordinator": ({*SERVER, "config", "preprocess", "server/files", "server/ops", "server/security", "server/rpc",
                            "server/checkpoint", "server/group", "server/host", "server/step"}, set()),
    "server/status_page": ({*SERVER, "config", "server/ops", "server/security"}, set()),
    "server/launcher": ({*SERVER, "config", "server/files", "server/ops", "server/security", "server/rpc", "server/log",
                         "server/host", "server/coordinator", "server/status_page"}, set()),
    "server": ({"base", "config", "server/launcher", "server/ops"}, set()),
    "client": ({"proto", "base", "config", "preprocess", "grpc"}, set()),
    "client/cpp": ({"proto", "base", "base/rpc", "config", "preprocess", "grpc"}, set()),
    "tests/bench/demo": ({"proto", "base", "config", "preprocess", "grpc", "client/cpp"}, set()),
    "client/c": ({"base", "client/cpp"}, set()),
    "client/examples": ({"client/cpp"}, set()),
    "client/emberctl": ({"proto", "base", "config", "preprocess", "grpc", "client/cpp"}, {"server/log/inspect.h", "server/log/testing/sample.h"}),
}
MODULES["tests"] = ({"proto", "grpc", "internal", *MODULES}, set())

MAX_LINES = 800
# absl::Mutex stands for them: clang's analysis follows it.
MUTEXES = {"mutex", "shared_mutex", "condition_variable"}
LEFTOVER = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
# Of std::filesystem, what throws without a std::error_code as the last argument.
THROWS = re.compile(
    r"(?:\bfilesystem|\bfs)::(?:(?:weakly_)?canonical|absolute|copy\w*|create_\w+|current_path|equivalent|exists|file_size|"
    r"hard_link_count|is_\w+|last_write_time|permissions|read_symlink|relative|remove(?:_all)?|rename|resize_file|space|"
    r"(?:symlink_)?status|temp_directory_path)\((?!.*\b(?:error|ignored|gone)\))|"
    r"for \([^;]*: (?:std::filesystem|fs)::(?:recursive_)?directory_iterator")
# Whose times are those of steady_time.h, so that nobody who sets the clock ends or prolongs anything.
STEADY = ("base/", "client/c/", "client/cpp/", "client/emberctl/", "server/", "shard/")
DATES = re.compile(r"\b(absl::Now\(|system_clock::now\(|gettimeofday\(|time\(nullptr\))")
COVERS = re.compile(r"^// Covers: (.+)$", re.MULTILINE)


def module_of(path):
    """The longest prefix of a path from the root that is a module; None if there is none."""
    folders = Path(path).parts[:-1]
    for length in range(len(folders), 0, -1):
        name = "/".join(folders[:length])
        if name in MODULES or name == "proto":
            return name
    return None


def target_of(include):
    """The name in MODULES for what is included; None for other people's headers."""
    if is_grpc(include):
        return "internal" if include.startswith("emberd/internal/") else "grpc"
    if include.startswith("emberd/"):
        return "internal" if include.startswith("emberd/internal/") else "proto"
    return module_of(include)


class Linter(Tree):
    def __init__(self, root):
        super().__init__(root)
        self.faults = []
        self.hints = []

    def fault(self, path, line, text):
        self.faults.append(f"{path}:{line}: {text}")

    def run(self):
        for path in self.files:
            self.check_size(path)
            self.check_leftovers(path)
            if path.endswith((".h", ".cc")):
                self.check_includes(path)
                if is_product(path):
                    self.check_file_system(path)
                self.check_clocks(path)
            if path.endswith(".h"):
                self.check_include_guard(path)
        self.check_tests()
        self.check_image()
        self.check_ratchets(figures.tree_ratchets(self), whole=True)

    def check_ratchets(self, counted, whole):
        faults, hints = figures.compare(self.root, counted, whole)
        self.faults += faults
        self.hints += hints

    def check_size(self, path):
        lines = self.lines(path)
        if lines > MAX_LINES:
            self.fault(path, lines, f"the file has {lines} lines; at most {MAX_LINES} are allowed")

    def check_leftovers(self, path):
        for number, line in enumerate(self.texts[path].splitlines(), 1):
            found = LEFTOVER.search(line)
            if found:
                self.fault(path, number, f"{found[0]}: finish it, or write an issue instead")

    def check_file_system(self, path):
        for number, line in enumerate(self.texts[path].splitlines(), 1):
            if THROWS.search(line.split("//")[0]):
                self.fault(path, number, "throws where the file system has a fault: give std::filesystem a std::error_code, "
                           "and step through folders by increment(error)")

    def check_clocks(self, path):
        if not path.startswith(STEADY) or path.endswith("_test.cc") or "testing" in path:
            return
        for number, line in enumerate(self.texts[path].splitlines(), 1):
            found = DATES.search(line)
            if found and not line.endswith("// a date"):
                self.fault(path, number, f"{found[0]}): take SteadyNow() of base/steady_time.h, or, for a date that is shown "
                           "or stored, end the line with // a date")

    def check_include_guard(self, path):
        if not re.search(r"^#pragma once$", self.texts[path], re.MULTILINE):
            if not path.endswith(("-inl.h", ".inc.h")):  # made to be included more than once: one SIMD target each
                self.fault(path, 1, "the header has no #pragma once")

    def check_includes(self, path):
        module = module_of(path)
        modules, files = MODULES[module]
        for number, line in enumerate(self.texts[path].splitlines(), 1):
            found = INCLUDE.match(line)
            if not found:
                continue
            quote, include = found.groups()
            if quote == '"' and "/" not in include:
                self.fault(path, number, f'"{include}": include by the path from the root')
            if quote == "<" and include in MUTEXES:
                self.fault(path, number, f"<{include}>: use absl::Mutex, which clang checks")
            if path.endswith("_test.cc") and include.startswith("tests/testing/"):
                continue
            target = target_of(include)
            if target not in modules | {None, module} and include not in files:
                self.fault(path, number, f"{module} may not include {include} ({target}); "
                           f"it may include {', '.join(sorted(modules | files))}")

    def check_tests(self):
        """Each .cc must be reached from a test: a test reaches foo.cc if it is foo_test.cc, if it says "// Covers: foo.cc",
        or if it includes foo.h, itself or through files that it reaches. Programs need none."""
        reached = set()
        waiting = []
        for test in (path for path in self.files if path.endswith("_test.cc")):
            waiting += [test, test.replace("_test.cc", ".cc")] + self.covered_by(test)
        while waiting:
            path = waiting.pop()
            if path in reached or path not in self.texts:
                continue
            reached.add(path)
            waiting += self.includes(path)
            if path.endswith(".h"):
                waiting += self.implementations(path)
        for path in self.files:
            is_program = re.search(r"(^|/|_)(main|bench|test)\.cc$|^client/examples/", path)
            if path.endswith(".cc") and not path.startswith("tests/") and not is_program and path not in reached:
                self.fault(path, 1, f"no test reaches it; add {Path(path).stem}_test.cc, or say \"// Covers: "
                           f"{Path(path).name}\" in a test that does")

    def check_image(self):
        """.dockerignore lets back in each module of CMakeLists.txt but tests, and each source of tests that a module names."""
        ignored = self.root / ".dockerignore"
        if not ignored.is_file():
            return
        kept = {line[1:] for line in ignored.read_text().splitlines() if line.startswith("!")}
        needed = set(re.search(r"foreach\(module ([^)]*)\)", self.texts["CMakeLists.txt"])[1].split()) - {"tests"}
        for path in self.files:
            if path.endswith("/CMakeLists.txt") and not path.startswith("tests/"):
                needed.update(re.findall(r"\$\{CMAKE_SOURCE_DIR\}/(tests/\S+\.cc)", self.texts[path]))
        for path in sorted(needed - kept):
            self.fault(".dockerignore", 1, f"the image cannot be compiled without {path}; add !{path}")

    def covered_by(self, test):
        """The files that a test names: beside itself, or by the path from the root."""
        covered = []
        for name in re.findall(r"[^,\s]+", ",".join(COVERS.findall(self.texts[test]))):
            places = {str(Path(test).parent / name), name} & self.texts.keys()
            if not places:
                self.fault(test, 1, f"Covers: there is no file {name}")
            covered += places
        return covered

    def implementations(self, header):
        """foo.cc of foo.h; for a header without one, each .cc beside it that includes it."""
        own = re.sub(r"\.h$", ".cc", header)
        if own in self.texts:
            return [own]
        folder = Path(header).parent
        return [path for path in self.files
                if path.endswith(".cc") and Path(path).parent == folder and header in self.includes(path)]


def main():
    arguments = sys.argv[1:]
    build = arguments[1] if arguments[:1] == ["--build"] else None
    rest = arguments[2:] if build else arguments
    linter = Linter(rest[0] if rest else Path(__file__).resolve().parents[2])
    if build:
        linter.check_ratchets(figures.build_ratchets(build), whole=False)
    else:
        linter.run()
    for fault in linter.faults:
        print(fault)
    for hint in linter.hints:
        print(hint, file=sys.stderr)
    if linter.faults:
        print(f"lint: {len(linter.faults)} faults", file=sys.stderr)
    return 1 if linter.faults else 0


if __name__ == "__main__":
    sys.exit(main())
