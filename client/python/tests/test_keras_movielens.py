"""The MovieLens example in Keras learns what it learns with tables in its own process. KERAS_BACKEND says on which backend."""

import os
import re
import subprocess
import sys
import unittest

import cluster

os.environ.setdefault("KERAS_BACKEND", "jax")
try:
    import keras
except ImportError as error:
    print(f"SKIP: {error.name} is not installed, which Keras on {os.environ['KERAS_BACKEND']} needs")
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))


class MovieLensTest(unittest.TestCase):
    def run_example(self, *options):
        script = os.path.join(HERE, "..", "examples", "movielens_keras.py")
        data = os.path.join(HERE, "..", "..", "..", "tests", "data", "movielens")
        done = subprocess.run([sys.executable, "-B", script, data, *options], capture_output=True, text=True, timeout=240,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(done.returncode, 0, done.stderr)
        return [float(one) for one in re.search(r"movielens: loss=(\S+) auc=(\S+)", done.stdout).groups()]

    def test_it_learns_as_with_tables_of_its_own(self):
        ours, plain = self.run_example(), self.run_example("--plain")
        self.assertAlmostEqual(ours[0], plain[0], delta=1e-4)
        self.assertAlmostEqual(ours[1], plain[1], delta=1e-3)


if __name__ == "__main__":
    assert keras.__version__
    cluster.main()
