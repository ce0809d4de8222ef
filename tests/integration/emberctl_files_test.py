"""What emberctl writes for other programs: tables as NumPy and safetensors files, and scripts for shells.

What this would catch: a header whose length is off by a byte, rows in another order than their ids, and a script that a
shell does not read.

Usage: emberctl_files_test.py EMBERD EMBERCTL ROOT_OF_REPOSITORY
"""

import json
import os
import resource
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
        cls.program = program = Program([EMBERD, "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", "", "--data", cls.path("data"),
                           "--durability", "memory"], cls.path("log"))
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

    def test_slots_are_described_with_their_shapes(self):
        with open(self.path("slots"), "w", encoding="utf-8") as file:
            file.write('name: "slots" tables { name: "plain" vocabulary_size: 10 embedding_dim: 4 optimizer { sgd {} } } '
                       'tables { name: "rare" vocabulary_size: 20 embedding_dim: 4 optimizer { f2a {} } } '
                       'tables { name: "user" vocabulary_size: 30 embedding_dim: 4 optimizer { adam {} } } '
                       'features { name: "a" table: "plain" } features { name: "b" table: "rare" } '
                       'features { name: "c" table: "user" }')
        self.emberctl("declare", self.path("slots"))
        printed = self.emberctl("describe", "slots")
        lines = [line.split() for line in printed.splitlines()]
        start = lines.index(["TABLE", "SLOT", "SHAPE"])
        self.assertEqual([" ".join(line) for line in lines[start + 1:start + 5]], [
            "rare accumulator 20 x 4", "rare local_step 20 x 1", "user momentum 30 x 4", "user velocity 30 x 4"])
        slots = json.loads(self.emberctl("--json", "describe", "slots"))["slots"]
        self.assertEqual([(slot["table"], slot["slot"], [int(one) for one in slot["shape"]]) for slot in slots][1],
                         ("rare", "local_step", [20, 1]))
        # What is described is what is read.
        values = self.emberctl("rows", "get", "slots", "rare", "3", "--slot", "local_step").strip().split("=")[1]
        self.assertEqual(len(values.split(",")), 1)

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

    def test_import(self):
        before = self.rows()
        self.emberctl("export", "m", "t", self.path("i.safetensors"))
        np.save(self.path("i.npy"), before + 1)
        self.emberctl("checkpoint", "import", "m", self.path("i.npy"), "--table", "t")
        np.testing.assert_array_equal(self.rows(), before + 1)
        self.assertIn(f'table "t": {ROWS} rows', self.emberctl("checkpoint", "import", "m", self.path("i.safetensors")))
        np.testing.assert_array_equal(self.rows(), before)

    def test_a_negative_accumulator_is_refused(self):
        before = self.rows("--slot", "accumulator")
        bad = before.copy()
        bad[700, 3] = -0.5
        np.save(self.path("bad.npy"), bad)
        for arguments in (("checkpoint", "import", "m", self.path("bad.npy"), "--table", "t", "--slot", "accumulator"),
                          ("rows", "set", "m", "t", "700=1,1,1,-0.5,1", "--slot", "accumulator")):
            refused = subprocess.run([EMBERCTL, "-a", self.address, *arguments], stderr=subprocess.PIPE, check=False, text=True)
            self.assertEqual(refused.returncode, 1, refused.stderr)
            self.assertRegex(refused.stderr, r"slot 'accumulator' of table 't'.*-0\.5 for id 700.*at least 0")
        np.testing.assert_array_equal(self.rows("--slot", "accumulator"), before)

    def test_checkpoints(self):
        before = self.rows()
        self.assertRegex(self.emberctl("checkpoint", "save", "m", "a"), r"checkpoint 'a' of model 'm' saved: \d+ rows, .*; "
                         r"updates paused .*; groups: -\n$")
        self.emberctl("export", "m", "t", self.path("live.safetensors"))
        self.emberctl("rows", "set", "m", "t", "7=1,2,3,4,5")
        self.assertIn("on top of 'a'", self.emberctl("checkpoint", "save", "m", "b", "--incremental"))
        self.assertRegex(self.emberctl("checkpoint", "list", "m"), r"(?s)\nm +b .* a  .*\nm +a ")
        self.assertRegex(self.emberctl("checkpoint", "diff", "m", "a", "b"), rf"\nt +- +{ROWS} +1 ")
        self.assertIn("is intact, with the 1 checkpoint that", self.emberctl("checkpoint", "verify", "m"))
        self.assertIn("on top of 'a'", self.emberctl("checkpoint", "show", "m", "b"))
        self.assertIn("needs no other checkpoint", self.emberctl("checkpoint", "merge", "m", "b"))

        self.emberctl("checkpoint", "export", "m", "a", self.path("tables"))
        self.assertEqual(sorted(os.listdir(self.path("tables"))), ["t.accumulator.safetensors", "t.safetensors"])
        with open(self.path("live.safetensors"), "rb") as live, open(self.path("tables/t.safetensors"), "rb") as saved:
            self.assertEqual(live.read()[-ROWS * DIM * 4:], saved.read()[-ROWS * DIM * 4:])
        self.assertEqual(self.rows()[7].tolist(), [1, 2, 3, 4, 5])
        self.emberctl("checkpoint", "import", "m", self.path("tables"))
        np.testing.assert_array_equal(self.rows(), before)
        self.assertIn("has the rows of checkpoint 'b'", self.emberctl("checkpoint", "restore", "m"))
        self.assertEqual(self.rows()[7].tolist(), [1, 2, 3, 4, 5])
        self.emberctl("checkpoint", "restore", "m", "a")
        np.testing.assert_array_equal(self.rows(), before)
        for name in ("b", "a"):
            self.assertIn(" freed", self.emberctl("checkpoint", "delete", "m", name))
        self.assertEqual(self.emberctl("checkpoint", "list"), "no checkpoints\n")

    def test_output_that_cannot_be_written_is_an_error(self):
        for arguments in ("--help", "--version", "tables", "rows get m t 0-999", "--json tables"):
            for where in ("> /dev/full", ">&-"):
                with self.subTest(arguments=arguments, where=where):
                    ended = subprocess.run(["sh", "-c", f'exec "$0" -a "$1" {arguments} {where}', EMBERCTL, self.address],
                                           stderr=subprocess.PIPE, check=False, text=True)
                    self.assertEqual(ended.returncode, 1)
                    self.assertIn("the output could not be written", ended.stderr)
                    if "--json" in arguments:
                        self.assertIn("message", json.loads(ended.stderr)["error"])
                    else:
                        self.assertEqual(ended.stderr.count("\n"), 1, ended.stderr)
        # What failed before keeps its own status.
        ended = subprocess.run(["sh", "-c", '"$0" --no-such-flag > /dev/full', EMBERCTL], stderr=subprocess.PIPE, check=False)
        self.assertEqual(ended.returncode, 2)

    def test_a_limit_of_the_size_of_files_is_a_full_disk(self):
        """As `ulimit -f`, whose signal ends a program that does not ignore it."""
        server = self.program.process.pid
        limits = resource.prlimit(server, resource.RLIMIT_FSIZE)
        resource.prlimit(server, resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            full = subprocess.run([EMBERCTL, "-a", self.address, "checkpoint", "save", "m", "full"], stderr=subprocess.PIPE,
                                  check=False, text=True)
        finally:
            resource.prlimit(server, resource.RLIMIT_FSIZE, limits)
        self.assertEqual(full.returncode, 1, full.stderr)
        self.assertIn("RESOURCE_EXHAUSTED", full.stderr)
        left = [os.path.join(folder, name) for folder, *names in os.walk(self.path("data")) for name in sum(names, [])]
        self.assertEqual([path for path in left if ".saving-" in path], [])
        self.emberctl("checkpoint", "save", "m", "full")
        self.emberctl("checkpoint", "delete", "m", "full")
        with open(self.path("full.npy"), "w", encoding="utf-8") as file:
            file.write("what was there before")
        full = subprocess.run(["sh", "-c", 'ulimit -f 1; exec "$0" -a "$1" export m t "$2"', EMBERCTL, self.address,
                               self.path("full.npy")], stderr=subprocess.PIPE, check=False, text=True)
        self.assertEqual(full.returncode, 1, full.stderr)
        self.assertIn("full.npy", full.stderr)
        with open(self.path("full.npy"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "what was there before")
        self.assertEqual([name for name in os.listdir(self.folder) if ".partial" in name], [])

    def test_an_export_keeps_a_link(self):
        os.symlink("linked.npy", self.path("link.npy"))
        with open(self.path("linked.npy"), "w", encoding="utf-8"):
            pass
        self.emberctl("export", "m", "t", self.path("link.npy"))
        self.assertTrue(os.path.islink(self.path("link.npy")))
        np.testing.assert_array_equal(np.load(self.path("linked.npy")), self.rows())

    def test_what_is_no_file_is_written_to(self):
        os.mkfifo(self.path("pipe"))
        reader = os.open(self.path("pipe"), os.O_RDWR | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.emberctl("limits", "m", "--out", self.path("pipe"))
        self.assertIn(b'name: "m"', os.read(reader, 1 << 16))

    def test_an_error_is_json_and_nothing_else(self):
        refused = subprocess.run([EMBERCTL, "-a", self.address, "--json", "describe", b"\xff"], stderr=subprocess.PIPE, check=False)
        self.assertEqual(refused.returncode, 1, refused.stderr)
        self.assertIn("message", json.loads(refused.stderr)["error"])

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
        self.assertEqual(self.complete("emberctl", "checkpoint", "ve"), ["verify"])
        self.assertEqual(self.complete("emberctl", "checkpoint", "export", "--fi"), ["--file-bytes"])
        self.assertIn("--token-file", self.complete("emberctl", "plan", "--t"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
