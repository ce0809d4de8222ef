"""The example for Lightning learns in automatic mode, and goes on from its checkpoint with the tables of the same step.

What this would catch: a step of the dense part without one of the tables, a lookup that counts as a step in Lightning's check of the validation, and
tables that are at another step than the file of Lightning.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

from cluster import main

try:
    import lightning
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "lightning_clicks.py")


class LightningTest(unittest.TestCase):
    def run_example(self, *options):
        done = subprocess.run([sys.executable, "-B", EXAMPLE, *options], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(done.returncode, 0, done.stderr)
        steps, held_out = re.search(r"steps=(\d+) held_out=(\S+)", done.stdout).groups()
        return int(steps), float(held_out)

    def test_a_model_is_trained_saved_and_resumed(self):
        with tempfile.TemporaryDirectory() as folder:
            steps, first = self.run_example("--folder", folder, "--epochs", "2")
            self.assertEqual(steps, 200)
            steps, last = self.run_example("--folder", folder, "--epochs", "4", "--resume")
            self.assertEqual(steps, 400)
        self.assertLess(max(first, last), 0.3)  # a coin has 0.693


if __name__ == "__main__":
    assert lightning.__version__
    main()
