"""Trains in a container of 1.5 GB, then asks it for more than it has. Skips, and says why, where no engine runs.

What this would catch: a default budget that takes the machine's memory for the container's, a table that is declared
although it cannot be held and says nothing of it, and shards that the kernel kills because they touched the last page.

Usage: memory_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT, BINARIES = sys.argv[1:3]
BENCH = os.path.join(os.path.dirname(os.path.abspath(BINARIES)), "bench")
del sys.argv[1:3]
sys.path[:0] = [os.path.join(ROOT, "tests", "testing"), os.path.dirname(os.path.abspath(__file__))]

import engine  # noqa: E402
from engine import docker, remove_container  # noqa: E402
from processes import wait_until  # noqa: E402

SKIPPED = 77  # CMakeLists.txt
LIMIT = 1_500_000_000
MODEL = """
name: "%s"
tables { name: "t" vocabulary_size: %d embedding_dim: %d optimizer { adagrad {} } }
features { name: "x" table: "t" batch_size: 4096 }
"""
# 4.8 GiB with their accumulators: more than three times what there is.
BIG = (5_000_000, 128)
SMALL = (500_000, 64)
CLUSTER = """
shards { address: "127.0.0.1:0" } shards { address: "127.0.0.1:0" }
coordinators { address: "127.0.0.1:7400" }
budgets { bytes_per_sparsecore: 4294967296 }
"""


def setUpModule():
    engine.make_images(ROOT, os.environ.get("EMBERD_CONTAINER_BUILD") == "source")


class MemoryTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.chmod(folder.name, 0o755)
        self.folder = folder.name
        for name, shape in (("big", BIG), ("bench_big", BIG), ("bench_small", SMALL)):
            self.write(name, MODEL % (name, *shape))
        self.write("cluster", CLUSTER)

    def write(self, name, text):
        path = os.path.join(self.folder, f"{name}.textproto")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o644)

    def start(self, *arguments):
        self.container = docker("run", "-d", "--memory", str(LIMIT), "--memory-swap", str(LIMIT),
                                "--volume", f"{self.folder}:/models:ro", "--volume", f"{BENCH}:/bench:ro", engine.EMBERD, "up", "--processes", *arguments)
        self.addCleanup(remove_container, self.container)
        wait_until("the cluster serves", lambda: "emberd: ready" in self.log())

    def log(self):
        done = subprocess.run(["docker", "logs", self.container], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        return done.stdout

    def execute(self, *command):
        """Exit code, and everything that was printed."""
        done = subprocess.run(["docker", "exec", self.container, *command], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout

    def emberctl(self, *arguments):
        return self.execute("emberctl", *arguments)

    def train(self, model, seconds, ids):
        """By the benchmark's load: what it is linked with is what emberd is."""
        return self.execute("/bench/emberd_bench", "load", "--config", f"/models/{model}.textproto", "--update",
                            "--batch", "4096", "--zipf", "0", "--ids-per-sample", ids, "--seconds", seconds)

    def assert_nobody_died(self):
        self.assertNotIn("a process died", self.log())
        self.assertEqual(docker("inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}", self.container),
                         "true false")

    def test_by_default_budgets_fit_the_container(self):
        self.start("--shards", "2", "--http", "")
        code, answer = self.emberctl("declare", "/models/big.textproto")
        self.assertEqual(code, 1, answer)
        # A half of the container for four partitions.
        self.assertRegex(answer, r"needs 1280000000 bytes in every partition; 0 of the budget of 187[0-9]{6} "
                                 r"\(budgets.bytes_per_sparsecore\) are in use, so 109[0-9]{7} do not fit")
        code, answer = self.train("bench_small", "5", "20")
        self.assertEqual(code, 0, answer)
        self.assert_nobody_died()

    def test_a_budget_beyond_the_memory_is_told_of_and_new_rows_are_refused(self):
        self.start("--config", "/models/cluster.textproto")
        for command in (["declare", "/models/big.textproto"], ["plan", "big"]):
            code, answer = self.emberctl(*command)
            self.assertEqual(code, 0, answer)
            self.assertIn("warning: if every row is touched, the tables of shard 0 need 2.4 GiB, and it has 715.3 MiB "
                          "of memory: 1.7 GiB do not fit.", answer)
        # 160 MB of new rows a step. On a busy machine steps miss their deadline, too, and their rows are touched all the same.
        refused = (r"the rows that this touches for the first time need [0-9]+ bytes on each of 2 shards of this machine; [0-9]+ of "
                   f"{LIMIT // 4096 * 4096} bytes of memory are left")
        for _ in range(20):  # as long as it takes here
            code, answer = self.train("bench_big", "30", "40")
            if re.search(refused, answer):
                break
        self.assertEqual(code, 1, answer)
        self.assertRegex(answer, refused)
        self.assert_nobody_died()

    def test_a_process_that_is_killed_for_memory_is_named(self):
        self.start("--shards", "1", "--http", "")
        shard = re.search(r"pids=\d+,(\d+)", self.log())[1]
        # Somebody else in the container takes all memory; the kernel is told to take the shard for it.
        docker("exec", self.container, "sh", "-c", f"echo 1000 > /proc/{shard}/oom_score_adj")
        subprocess.run(["docker", "exec", self.container, "sh", "-c",
                        "head -c 1600000000 /dev/zero | tail -c 1600000000 > /dev/null"], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until("the supervisor has seen it", lambda: "a process died" in self.log())
        self.assertIn("the kernel killed it because memory ran out", self.log())
        self.assertRegex(self.log(), "set budgets.bytes_per_sparsecore to [0-9]+ or less")


if __name__ == "__main__":
    reason = engine.why_not()
    if reason:
        print(f"SKIP: {reason}")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
