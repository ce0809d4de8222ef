"""Opens what `emberctl checkpoint export` writes with the public safetensors package, and what that package writes with
`emberctl checkpoint import`.

What this would catch: a header that others do not read, an index that does not name the parts, rows in another order, and
bits that differ from those of `emberctl export`.

Usage: exported_tables_test.py EMBERD EMBERCTL ROOT    (needs the packages safetensors and numpy)
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

EMBERD, EMBERCTL, ROOT = sys.argv[1:4]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

import numpy as np  # noqa: E402
from processes import Program  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

TABLES = {"users": (1000, 5), "items": (300, 8)}
MODEL = 'name: "m" ' + " ".join(
    f'tables {{ name: "{name}" vocabulary_size: {rows} embedding_dim: {dim} optimizer {{ adam {{}} }} }} '
    f'features {{ name: "{name}" table: "{name}" }}' for name, (rows, dim) in TABLES.items())
SLOTS = ("", "momentum", "velocity")
FILE_BYTES = 9000


class ExportedTablesTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        program = Program([EMBERD, "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", "", "--data", cls.path("data"),
                           "--durability", "memory"], cls.path("log"))
        cls.addClassCleanup(program.stop)
        cls.address = program.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1]
        with open(cls.path("model"), "w", encoding="utf-8") as file:
            file.write(MODEL)
        cls.emberctl("declare", cls.path("model"))
        random = np.random.default_rng(5)
        os.mkdir(cls.path("mine"))
        cls.arrays = {}
        for table, shape in TABLES.items():
            for slot in SLOTS:
                name = f"{table}.{slot}" if slot else table
                cls.arrays[name] = np.abs(random.normal(size=shape)).astype("<f4")
        save_file(cls.arrays, cls.path("mine/all.safetensors"))
        cls.emberctl("checkpoint", "import", "m", cls.path("mine"))
        cls.emberctl("checkpoint", "save", "m", "a")

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    @classmethod
    def emberctl(cls, *arguments):
        return subprocess.run([EMBERCTL, "-a", cls.address, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              check=True, text=True).stdout

    def assert_same(self, found):
        self.assertEqual(set(found), set(self.arrays))
        for name, array in self.arrays.items():
            self.assertEqual(found[name].dtype, np.float32)
            np.testing.assert_array_equal(found[name], array, name)

    def test_others_read_what_is_written(self):
        self.emberctl("checkpoint", "export", "m", "a", self.path("whole"))
        found = {}
        for file in os.listdir(self.path("whole")):
            found.update(load_file(self.path(f"whole/{file}")))
        self.assert_same(found)

    def test_parts_are_those_of_the_index(self):
        self.emberctl("checkpoint", "export", "m", "a", self.path("parts"), "--file-bytes", str(FILE_BYTES))
        found = {}
        indexes = [file for file in os.listdir(self.path("parts")) if file.endswith(".safetensors.index.json")]
        for index in indexes:
            with open(self.path(f"parts/{index}"), encoding="utf-8") as file:
                said = json.load(file)
            parts = []
            for tensor, file in said["weight_map"].items():
                with safe_open(self.path(f"parts/{file}"), framework="numpy") as opened:
                    self.assertEqual(list(opened.keys()), [tensor])
                    self.assertEqual(int(opened.metadata()["first_row"]), sum(len(part) for part in parts))
                    parts.append(opened.get_tensor(tensor))
                self.assertLessEqual(parts[-1].nbytes, FILE_BYTES)
            name = index[:-len(".safetensors.index.json")]
            found[name] = np.concatenate(parts)
            self.assertEqual(said["metadata"]["total_size"], found[name].nbytes)
        self.assertEqual(len(indexes), 6)
        self.assert_same(found)

    def test_a_live_table_has_the_same_bits(self):
        for table in TABLES:
            for slot in SLOTS:
                name = f"{table}.{slot}" if slot else table
                file = self.path("live.safetensors")
                self.emberctl("export", "m", table, file, *(["--slot", slot] if slot else []))
                np.testing.assert_array_equal(load_file(file)[name], self.arrays[name], name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
