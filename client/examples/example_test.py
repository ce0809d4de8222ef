"""Runs the example on a cluster as its README does. It would catch an example that does not run or does not learn.

usage: example_test.py FOLDER_OF_PROGRAMS
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

BIN = sys.argv.pop(1)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "testing"))

from processes import Program  # noqa: E402


class ExampleTest(unittest.TestCase):
    def test_two_trainers_learn(self):
        with tempfile.TemporaryDirectory(prefix="emberd_example_") as folder:
            cluster = Program([f"{BIN}/emberd", "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", ""],
                              f"{folder}/cluster.log")
            try:
                address = cluster.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1]
                done = subprocess.run([f"{BIN}/emberd_example_trainer", address, "2", "400"], capture_output=True,
                                      text=True, timeout=240)
            finally:
                cluster.kill()
            self.assertEqual(done.returncode, 0, done.stderr)
            loss, best = map(float, re.search(r"held_out_loss=(\S+) best_loss=(\S+)", done.stdout).groups())
            self.assertLess(loss, 0.65, done.stdout)  # a coin has 0.69
            self.assertGreater(loss, best - 0.01, done.stdout)


if __name__ == "__main__":
    unittest.main()
