"""The peers of `./run bench step` run, print what peer.cc reads, and make the steps that they say.

usage: peers_test.py, by a Python that has some of their libraries

Would catch: a mistake in a peer's script, by which the benchmark leaves it out or compares with less work, and a peer whose
library is missing and which ends as if it had failed.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = {"torch_steps.py": "torch", "fbgemm_steps.py": "fbgemm_gpu", "torchrec_steps.py": "torchrec", "tensorflow_steps.py": "tensorflow"}
INSTALLED = [script for script, library in PEERS.items() if importlib.util.find_spec(library)]
if not INSTALLED:
    print("SKIP: no peer is installed (deploy/packages.txt: python3-torch)")
    sys.exit(77)

import numpy  # noqa: E402

ROWS, WIDTH, TABLES, BAG = 8, 4, 2, 2
IDS = numpy.array([0, 1, 2, 3, 3, 3, 1, 3, 4, 7, 5, 5, 7, 6, 7, 4])  # of four samples of either table


class PeersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "ids")
        IDS.tofile(self.path)

    def run_peer(self, script, *options):
        sharding = ["row_wise"] if script == "torchrec_steps.py" else []
        return subprocess.run([sys.executable, *options, "-B", "-W", "ignore", os.path.join(HERE, script), *sharding, str(ROWS), str(WIDTH), str(TABLES),
                               "1", "tiny", str(BAG), self.path], capture_output=True, text=True, timeout=600)

    def test_those_that_are_installed_print_their_times(self):
        for script in INSTALLED:
            done = self.run_peer(script)
            self.assertEqual(done.returncode, 0, done.stderr)
            found = re.fullmatch(rf"tiny (\S+) (\S+) 1 {TABLES}\n", done.stdout)
            self.assertTrue(found, done.stdout)
            self.assertGreater(min(map(float, found.groups())), 0)

    def test_those_that_are_not_say_so(self):
        for script in PEERS:
            done = self.run_peer(script, "-E", "-S")  # without installed packages
            self.assertEqual((done.returncode, done.stdout), (3, ""), done.stderr)

    def expected(self, *batches):
        """The rows after Adagrad's steps, as NumPy makes them."""
        weights, slots = numpy.full((ROWS, 1), 0.01), numpy.full((ROWS, 1), 0.1)
        for ids in batches:
            gradient = 1e-3 * numpy.bincount(ids.ravel(), minlength=ROWS)[:, None]
            slots += gradient ** 2
            weights -= 0.01 * gradient / numpy.sqrt(slots)
        return numpy.tile(weights, WIDTH)

    @unittest.skipUnless("torch_steps.py" in INSTALLED, "SKIP: PyTorch is not installed")
    def test_a_step_of_pytorch(self):
        import torch_steps
        for tables in (1, TABLES):
            bags = torch_steps.Bags(ROWS, WIDTH, tables)
            _, step = bags.works(torch_steps.Batch("tiny", BAG, self.path, WIDTH))
            step()
            rows = numpy.concatenate([layer.weight.detach().numpy() for layer in bags.layers])
            numpy.testing.assert_allclose(rows, self.expected(IDS), rtol=1e-5)

    @unittest.skipUnless("tensorflow_steps.py" in INSTALLED, "SKIP: TensorFlow is not installed")
    def test_steps_of_tensorflow(self):
        import tensorflow_steps
        halves = tensorflow_steps.halves(self.path, ROWS // TABLES, TABLES, BAG)
        for partitioned in (False, True):
            bags = tensorflow_steps.Bags(tensorflow_steps.tf.distribute.get_strategy(), ROWS, WIDTH, TABLES, partitioned)
            for half in halves:
                bags.step(tensorflow_steps.tf.constant(half))
            rows = numpy.concatenate([numpy.stack([part.numpy() for part in parts], 1).reshape(-1, WIDTH) for parts in bags.tables])
            first, second = numpy.split(IDS.reshape(TABLES, 2, -1), 2, axis=1)
            numpy.testing.assert_allclose(rows, self.expected(first, second), rtol=1e-5)


if __name__ == "__main__":
    unittest.main()
