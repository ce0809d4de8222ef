"""emberd.ray on two nodes of Ray on this machine: processes are spread, watched and replaced, and trainers find them.

What this would catch: a shard that nobody starts again, rows that are lost without a word, and processes that are left.
"""

import os
import re
import signal
import subprocess
import sys
import time
import unittest

from cluster import counting_model, emberd, main

try:
    import ray
    from ray.cluster_utils import Cluster as Nodes
except ImportError as error:
    print(f"SKIP: Ray cannot be used here: {error}")
    sys.exit(77)

import tempfile  # noqa: E402

import emberd.ray  # noqa: E402
import numpy as np  # noqa: E402

PATIENCE = 240  # seconds


@ray.remote(num_cpus=0)
def train(cluster, steps):
    """A trainer somewhere in the cluster of Ray."""
    with cluster.connect() as client:
        with client.model("m").train("run") as stream:
            for _ in range(steps):
                stream.lookup({"t": [1]})
                stream.update({"t": np.ones((1, 4), np.float32)})
            return stream.next_step


class RayTest(unittest.TestCase):
    NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}

    @classmethod
    def setUpClass(cls):
        # Ray's sockets need a short path.
        cls.folder = tempfile.TemporaryDirectory(dir="/tmp", prefix="r")
        cls.addClassCleanup(cls.folder.cleanup)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.environ["RAY_TMPDIR"] = cls.folder.name
        os.environ["RAY_DEDUP_LOGS"] = "0"
        cls.nodes = Nodes(initialize_head=True, connect=False,
                          head_node_args={**cls.NODE, "include_dashboard": False})
        cls.addClassCleanup(cls.nodes.shutdown)
        cls.second = cls.add_node()
        ray.init(address=cls.nodes.address, log_to_driver=False)
        cls.addClassCleanup(ray.shutdown)

    @classmethod
    def add_node(cls):
        return cls.nodes.add_node(**cls.NODE)

    def wait_until(self, done, what):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                if done():
                    return
            except emberd.Error as error:
                what = f"{what}: {error}"
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.1)

    def test_a_cluster_lives_through_the_death_of_a_node(self):
        with emberd.ray.Cluster(shards=2, memory_per_shard=64 << 20, cpus_per_coordinator=0.5, listen="127.0.0.1", timeout=PATIENCE,
                                data=os.path.join(self.folder.name, "data")) as cluster:
            before = cluster.status()
            self.assertEqual(len({one["node"] for one in before["shards"]}), 2, "not spread")
            with cluster.connect() as client:
                model = client.declare(counting_model("m"))
                ray.get(train.remote(cluster, 3))
                self.assertEqual(model.read_rows("t", [1])[0, 0], -3)
                model.save_checkpoint("three")
                ray.get(train.remote(cluster, 2))
            pids = [one["pid"] for one in before["shards"] + before["coordinators"]]
            # The node that this process is on lives on.
            self.nodes.remove_node(self.second, allow_graceful=False)
            type(self).second = self.add_node()
            self.wait_until(lambda: cluster.status()["restarts"] >= 1, "no shard has come back")
            after = cluster.status()
            self.assertEqual(len({one["node"] for one in after["shards"]}), 2)
            self.assertNotEqual(before["shards"], after["shards"])
            with emberd.ray.connect() as client:
                rows = lambda: client.model("m").read_rows("t", [1])[0, 0]  # noqa: E731
                self.wait_until(lambda: rows() == -3, "the checkpoint has not come back")
                self.assertEqual(ray.get(train.remote(cluster, 1)), 3)
                self.assertEqual(rows(), -4)
            pids += [one["pid"] for one in after["shards"] + after["coordinators"]]
        self.wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "processes are left")

    def test_a_process_that_dies_is_replaced(self):
        with emberd.ray.Cluster(shards=1, cpus_per_coordinator=0.5, listen="127.0.0.1", name="small", timeout=PATIENCE) as cluster:
            address = cluster.addresses[0]
            os.kill(cluster.status()["coordinators"][0]["pid"], signal.SIGKILL)
            self.wait_until(lambda: cluster.status()["restarts"] >= 1, "no coordinator has come back")
            self.assertEqual(cluster.addresses, [address])
            with cluster.connect() as client:
                self.assertTrue(client.declare(counting_model("small")).created)

    def test_the_example_under_ray_train(self):
        try:
            import ray.train.torch  # noqa: F401
        except ImportError as error:
            self.skipTest(f"SKIP: Ray Train cannot be used here: {error}")
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "ray_train.py")
        environment = {**os.environ, "RAY_ADDRESS": self.nodes.address, "HOME": self.folder.name,
                       "RAY_TRAIN_V2_ENABLED": "0"}  # the newer one waits for a dashboard
        done = subprocess.run([sys.executable, "-B", script, "--listen", "127.0.0.1", "--timeout", str(PATIENCE)], capture_output=True, text=True,
                              timeout=4 * PATIENCE, env=environment)
        found = re.search(r"clicks: steps=60 loss=(\S+)", done.stdout)
        self.assertTrue(found, done.stdout + done.stderr)
        self.assertLess(float(found[1]), 0.5)  # a constant has 0.56

    def test_too_large_a_cluster_is_refused_with_what_it_needs(self):
        with self.assertRaisesRegex(Exception, "no room for 5 processes"):
            emberd.ray.Cluster(shards=4, cpus_per_shard=8, timeout=2, name="large")
        with self.assertRaisesRegex(ValueError, "each must be at least 1"):
            emberd.ray.Cluster(shards=0)


if __name__ == "__main__":
    main()
