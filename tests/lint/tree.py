"""The source tree as the lint reads it: files, who includes whom, what is product and what is test."""

import re
from pathlib import Path

SOURCE_SUFFIXES = {".h", ".cc", ".py", ".proto", ".cmake", ".sh", ".js", ".css", ".html"}
TOP_FOLDERS = ("base", "client", "config", "preprocess", "proto", "server", "shard", "tests")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')
IMPORT = re.compile(r'^import "([^"]+)";', re.MULTILINE)
GENERATED = re.compile(r"\.(grpc\.)?pb\.h$")


def is_product(path):
    """Whether a file is part of what users get: no test, and nothing that only tests include."""
    *folders, name = Path(path).parts
    return not (folders[:1] == ["tests"] or "tests" in folders or "testing" in folders
                or re.match(r"testing_|test_", name) or re.search(r"_test\.\w+$", name))


def is_grpc(include):
    return include.startswith(("grpc/", "grpcpp/")) or include.endswith(".grpc.pb.h")


class Tree:
    def __init__(self, root):
        self.root = Path(root)
        self.files = sorted(self.find_files())
        self.texts = {path: (self.root / path).read_text(errors="replace") for path in self.files}
        self._includes = {}

    def find_files(self):
        for folder in TOP_FOLDERS:
            for path in (self.root / folder).rglob("*"):
                if path.is_file() and (path.suffix in SOURCE_SUFFIXES or path.name == "CMakeLists.txt"):
                    yield str(path.relative_to(self.root))
        for name in ("run", ".ci/run", "CMakeLists.txt"):
            if (self.root / name).is_file():
                yield name

    def lines(self, path):
        return self.texts[path].count("\n")

    def includes(self, path):
        """As they are written. A generated header includes what its .proto imports."""
        if path not in self._includes:
            text = self.texts.get(path, "")
            found = [match[2] for match in map(INCLUDE.match, text.splitlines()) if match]
            if GENERATED.search(path):
                proto = "proto/" + GENERATED.sub(".proto", path)
                found = [proto] + [name.replace(".proto", ".pb.h") for name in IMPORT.findall(self.texts.get(proto, ""))]
            self._includes[path] = found
        return self._includes[path]

    def closure(self, path):
        """The file, and all that it includes, itself or through others."""
        seen, waiting = {path}, [path]
        while waiting:
            new = set(self.includes(waiting.pop())) - seen
            seen |= new
            waiting += new
        return seen
