"""Trains with a program in plain C that links the shared library alone, and reads what the library exports.

What this would catch: a header that is not C, a symbol that leaks into the host program, and an allocator of ours in it.

usage: library_test.py EMBERD LIBRARY TRAINER
"""

import os
import subprocess
import sys
import tempfile
import unittest

EMBERD, LIBRARY, TRAINER = sys.argv[1:4]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "testing"))

from processes import Program  # noqa: E402


class LibraryTest(unittest.TestCase):
    def test_a_program_in_c_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            cluster = Program([EMBERD, "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", ""],
                              f"{folder}/cluster.log")
            try:
                address = cluster.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1]
                done = subprocess.run([TRAINER, address], capture_output=True, text=True, timeout=120)
            finally:
                cluster.kill()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([float(line) for line in done.stdout.split()], [1 - 0.5 ** 10] * 8)

    def test_only_the_c_interface_is_exported(self):
        lines = subprocess.check_output(["nm", "-D", "--defined-only", LIBRARY], text=True).splitlines()
        names = {line.split()[-1] for line in lines}
        self.assertIn("emberd_connect", names)
        self.assertEqual({name for name in names if not name.startswith("emberd_")}, set())

    def test_the_allocator_stays_that_of_the_host(self):
        needed = subprocess.check_output(["ldd", LIBRARY], text=True)
        self.assertNotIn("tcmalloc", needed)


if __name__ == "__main__":
    unittest.main()
