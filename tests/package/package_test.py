"""Installs the C++ client, builds a trainer against it outside of this tree, and trains ten steps on a real cluster.

What this would catch: a public header that includes one that is not installed, a library that is missing from the
exported target, and flags of this build that a stranger would inherit.

Usage: package_test.py PATH_OF_EMBERD BUILD_FOLDER
"""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

EMBERD, BUILD = sys.argv[1:3]
del sys.argv[1:3]
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "testing"))

from processes import Program  # noqa: E402


def run(*argv):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(argv)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


class PackageTest(unittest.TestCase):
    def setUp(self):
        # Not below the tree, where headers would be found by accident.
        self.folder = tempfile.mkdtemp(prefix="emberd_package_")
        self.addCleanup(shutil.rmtree, self.folder)
        self.prefix = os.path.join(self.folder, "prefix")
        run("cmake", "--install", BUILD, "--component", "client", "--prefix", self.prefix)

    def build_trainer(self):
        source = os.path.join(self.folder, "trainer")
        shutil.copytree(os.path.join(HERE, "trainer"), source)
        build = os.path.join(source, "build")
        run("cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}",
            "-DCMAKE_BUILD_TYPE=Release")
        run("cmake", "--build", build)
        return os.path.join(build, "trainer")

    def test_a_stranger_trains_ten_steps(self):
        trainer = self.build_trainer()
        cluster = Program([EMBERD, "up", "--shards", "2", "--listen", "127.0.0.1:0", "--http", ""],
                          os.path.join(self.folder, "cluster.log"))
        self.addCleanup(cluster.kill)
        address = cluster.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1]
        values = [float(line) for line in run(trainer, address).split()]
        # Each step halves the distance from 1, without rounding.
        self.assertEqual(values, [1 - 0.5 ** 10] * (4 * 8))
        self.assertEqual(cluster.stop(), 0)

    def test_nothing_of_this_tree_is_named_in_what_is_installed(self):
        tree = os.path.dirname(os.path.dirname(HERE))
        for folder, _, names in os.walk(self.prefix):
            for name in names:
                path = os.path.join(folder, name)
                if name.endswith((".cmake", ".h")):
                    with open(path) as file:
                        self.assertNotIn(tree, file.read(), path)


if __name__ == "__main__":
    unittest.main()
