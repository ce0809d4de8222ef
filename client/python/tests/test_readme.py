"""Runs the first example of README.md as it stands there, and checks that it learns."""

import os
import re
import subprocess
import sys
import unittest

from cluster import main

README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "README.md")


class ReadmeTest(unittest.TestCase):
    def test_the_first_example_learns(self):
        with open(README, encoding="utf-8") as file:
            example = re.search(r"^```python\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[1]
        done = subprocess.run([sys.executable, "-B", "-c", example], capture_output=True, text=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(float(re.search(r"loss=(\S+)", done.stdout)[1]), 0.1)


if __name__ == "__main__":
    main()
