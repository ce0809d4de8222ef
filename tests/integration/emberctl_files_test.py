"""What emberctl writes for other programs: tables as NumPy and safetensors files, and scripts for shells.

What this would catch: a header whose length is off by a byte, rows in another order than their ids, and a script that a
shell does not read.

Usage: emberctl_files_test.py EMBERD EMBERCTL ROOT_OF_REPOSITORY
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

EMBERD, EMBERCTL, ROOT = sys.argv[1:4]
del sys.argv[1:]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

import numpy as np  # noqa: E402
from processes import Program  # noqa: E402

ROWS, DIM = 1000, 5
MODEL = f'name: "m" tables {{ name: "t" vocabulary_size: {ROWS} embedding_dim: {DIM} }} features {{ name: "f" table: "t" }}'


class FilesTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        program = Program([EMBERD, "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", ""], cls.path("log"))
        cls.addClassCleanup(program.stop)
        cls.address = program.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1]
        with open(cls.path("model"), "w", encoding="utf-8") as file:
            file.write(MODEL)
        cls.emberctl("declare", cls.path("model"))

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    @classmethod
    def emberctl(cls, *arguments):
        return subprocess.run([EMBERCTL, "-a", cls.address, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              check=True, text=True).stdout

    def rows(self, *slot):
        lines = self.emberctl("rows", "get", "m", "t", f"0-{ROWS - 1}", *slot).splitlines()
        self.assertEqual([int(line.split("=")[0]) for line in lines], list(range(ROWS)))
        return np.array([line.split("=")[1].split(",") for line in lines], "<f4")

    def test_npy(self):
        self.assertEqual(self.emberctl("export", "m", "t", self.path("t.npy")), f"{self.path('t.npy')}: {ROWS} rows\n")
        np.testing.assert_array_equal(np.load(self.path("t.npy")), self.rows())

    def test_safetensors(self):
        self.emberctl("export", "m", "t", self.path("t.safetensors"), "--slot", "accumulator")
        with open(self.path("t.safetensors"), "rb") as file:
            size, = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            data = file.read()
        self.assertEqual(size % 8, 0)
        self.assertEqual(header["t.accumulator"],
                         {"dtype": "F32", "shape": [ROWS, DIM], "data_offsets": [0, ROWS * DIM * 4]})
        np.testing.assert_array_equal(np.frombuffer(data, "<f4").reshape(ROWS, DIM), self.rows("--slot", "accumulator"))

    def complete(self, *words):
        script = (f"source {self.path('bash')}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _emberctl; "
                  'echo "${COMPREPLY[@]}"')
        return subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, check=True, text=True).stdout.split()

    def test_completion(self):
        for shell in ("bash", "zsh", "fish"):
            with open(self.path(shell), "w", encoding="utf-8") as file:
                file.write(self.emberctl("completion", shell))
            if shutil.which(shell):
                subprocess.run([shell, "-n", self.path(shell)], check=True)
        self.assertEqual(self.complete("emberctl", "sta"), ["status", "stats"])
        self.assertEqual(self.complete("emberctl", "stats", "--hot"), ["--hot-rows"])
        self.assertEqual(self.complete("emberctl", "rows", "g"), ["get"])
        self.assertIn("--token-file", self.complete("emberctl", "plan", "--t"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
