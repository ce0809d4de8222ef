"""The tutorial runs, learns, and leaves its plots; docs/tutorial.md is what it says."""

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


DOCS = os.path.join(HERE, "..", "docs")
PLOTS = ("learning.png", "hot_rows.png", "chips.png")


def read(folder):
    with open(os.path.join(folder, "tutorial.md"), encoding="utf-8") as file:
        return file.read()


OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class TutorialTest(unittest.TestCase):
    @unittest.skipUnless(matplotlib, "SKIP: matplotlib is not installed")
    def test_it_runs_and_is_what_the_repository_shows(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-B", os.path.join(DOCS, "render.py"), folder], capture_output=True, text=True,
                timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MPLCONFIGDIR": folder})
            self.assertEqual(done.returncode, 0, done.stderr)
            for name in PLOTS:
                for where in (folder, DOCS):
                    with open(os.path.join(where, name), "rb") as file:
                        self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
            rendered = read(folder)
        self.assertEqual(OUTPUT.sub("", rendered), OUTPUT.sub("", read(DOCS)), "docs/render.py docs renews it")
        for one in (rendered, read(DOCS)):
            self.check(one)

    def check(self, rendered):
        for name in PLOTS:
            self.assertIn(f"]({name})", rendered)
        said = "".join(OUTPUT.findall(rendered))
        entropy = float(re.search(r"entropy (\S+)", said)[1])
        first, last = map(float, re.search(r"loss (\S+) at first, (\S+) at the end", said).groups())
        self.assertLess(last, entropy)
        self.assertGreater(first, entropy)
        self.assertRegex(said, r"hot rows: and \d+, the \d+|hot rows: the \d+, and \d+")
        # 50 million rows of 128 floats, twice.
        self.assertAlmostEqual(float(re.search(r"chips: +1 hold +(\S+) GiB", said)[1]), 47.68, places=1)
        self.assertIn("the next is 240", said)


if __name__ == "__main__":
    assert flax.__version__ and jax.__version__
    cluster.main()
