"""The tutorial runs as it stands, learns, and leaves its plots."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

import cluster

try:
    import flax
    import jax
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))
try:
    import matplotlib
except ImportError:
    matplotlib = None


class TutorialTest(unittest.TestCase):
    def test_it_runs_as_it_stands(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-B", os.path.join(HERE, "..", "docs", "tutorial.py"), folder], capture_output=True, text=True,
                timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MPLCONFIGDIR": folder})
            self.assertEqual(done.returncode, 0, done.stderr)
            if matplotlib:
                for name in ("learning.png", "hot_rows.png", "chips.png"):
                    with open(os.path.join(folder, name), "rb") as file:
                        self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
        entropy = float(re.search(r"entropy (\S+)", done.stdout)[1])
        first, last = map(float, re.search(r"loss (\S+) at first, (\S+) at the end", done.stdout).groups())
        self.assertLess(last, entropy)
        self.assertGreater(first, entropy)
        self.assertRegex(done.stdout, r"hot rows: and \d+, the \d+|hot rows: the \d+, and \d+")
        # 50 million rows of 128 floats, twice.
        self.assertAlmostEqual(float(re.search(r"chips: +1 hold +(\S+) GiB", done.stdout)[1]), 47.68, places=1)
        self.assertIn("the next is 240", done.stdout)


if __name__ == "__main__":
    assert flax.__version__ and jax.__version__
    cluster.main()
