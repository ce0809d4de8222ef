"""A cluster that a program starts for itself ends with the program, however that ends.

What this would catch: servers that are left when a trainer is killed, or that a worker forked from it keeps alive.
"""

import copy
import gc
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from cluster import counting_model, emberd, main

SCRIPT = """
import os, sys
import emberd
cluster = emberd.local(shards=2, processes={processes})
if {fork} and os.fork() == 0:
    os.setpgid(0, 0)
    os.write(1, b"child %d\\n" % os.getpid())
    sys.stdin.read()
    os._exit(0)
os.write(1, b"ready %d\\n" % cluster.pid)
sys.stdin.read()  # ends with the test
"""


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


class LocalTest(unittest.TestCase):
    def start(self, **options):
        """A program with a cluster; gives what it printed, by word."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        script = SCRIPT.format(**{"processes": False, "fork": False, **options})
        program = subprocess.Popen([sys.executable, "-B", "-c", script], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.addCleanup(program.stdout.close)
        self.addCleanup(program.stdin.close)
        self.addCleanup(program.wait)
        self.addCleanup(program.kill)
        said = {}
        while "ready" not in said or (options.get("fork") and "child" not in said):
            word, pid = program.stdout.readline().split()
            said[word] = int(pid)
        return program, said

    def assert_ends(self, pids):
        end = time.monotonic() + 120
        while any(running(pid) for pid in pids):
            self.assertLess(time.monotonic(), end, [pid for pid in pids if running(pid)])
            time.sleep(0.05)

    def test_nothing_is_left_of_a_killed_program(self):
        for processes in (False, True):
            program, said = self.start(processes=processes)
            servers = [said["ready"], *children(said["ready"])]
            self.assertEqual(len(servers), 4 if processes else 1)
            program.send_signal(signal.SIGKILL)
            self.assert_ends(servers)

    def test_a_forked_worker_does_not_keep_it(self):
        program, said = self.start(fork=True)
        program.send_signal(signal.SIGKILL)
        self.assert_ends([said["ready"]])
        self.assertTrue(running(said["child"]))

    def test_ctrl_c_is_for_the_program(self):
        program, said = self.start()
        program.send_signal(signal.SIGINT)
        self.assertNotEqual(program.wait(600), 0)
        self.assert_ends([said["ready"]])

    def test_what_is_wrong_is_said(self):
        with self.assertRaisesRegex(ValueError, "power of two"):
            emberd.local(shards=3)

    def test_durability_needs_a_folder(self):
        for durability in ("checkpoint", "log"):
            said = f"^durability: '{durability}' needs a folder .* with data$"
            with self.assertRaisesRegex(ValueError, said):
                emberd.local(durability=durability)

    def test_the_same_arguments_are_the_same_cluster(self):
        with emberd.local(shards=1) as first, first.connect() as client:
            client.declare(counting_model("m"))
            with emberd.local(shards=1, sparsecores=2) as second:
                self.assertEqual((second.pid, second.address), (first.pid, first.address))
                self.assertIsNot(second, first)
            with second.connect() as again:  # the first is still there
                self.assertEqual(again.model("m").name, "m")
            second.close()
            for options in ({"sparsecores": 4}, {"new": True}, {"processes": True}):
                with emberd.local(shards=1, **options) as other, other.connect() as client_of_other:
                    self.assertNotEqual(other.pid, first.pid)
                    with self.assertRaises(emberd.NotFound):
                        client_of_other.model("m")
            pid = first.pid
        self.assertFalse(running(pid))
        with emberd.local(shards=1) as fresh, fresh.connect() as client:
            self.assertNotEqual(fresh.pid, pid)
            os.kill(fresh.pid, signal.SIGKILL)
            os.waitid(os.P_PID, fresh.pid, os.WEXITED | os.WNOWAIT)
            with emberd.local(shards=1) as next_one, next_one.connect() as client:
                client.status()  # not the one that was killed

    def test_paths_of_data_are_compared_whole(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(shards=1, data=folder) as first:
            with emberd.local(shards=1, data=pathlib.Path(os.path.relpath(folder))) as second:
                self.assertEqual(second.pid, first.pid)

    def test_threads_that_ask_at_once_get_one(self):
        found = []
        threads = [threading.Thread(target=lambda: found.append(emberd.local(shards=1))) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.assertEqual(len({one.pid for one in found}), 1)
        pid = found[0].pid
        for place, one in enumerate(found):
            self.assertTrue(running(pid), place)
            one.close()
            one.close()
        self.assertFalse(running(pid))

    def test_a_forgotten_one_ends_with_its_last_reference(self):
        client = emberd.local(shards=1).connect()
        pid = client._cluster.pid
        model = client.declare(counting_model("m"))
        del client
        gc.collect()
        self.assertEqual(model.read_rows("t", [1]).tolist(), [[0] * 4])  # which the model keeps
        del model
        gc.collect()
        self.assertFalse(running(pid))
        with emberd.local(shards=1).connect() as client:
            pid = client._cluster.pid
        self.assertFalse(running(pid))

    def test_copies_of_a_client_keep_it(self):
        for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            client = emberd.local(shards=1, new=True).connect()
            pid = client._cluster.pid
            model = copied(client.declare(counting_model("m")))
            del client
            gc.collect()
            self.assertEqual(model.read_rows("t", [1]).tolist(), [[0] * 4])
            del model
            gc.collect()
            self.assertFalse(running(pid))

    def test_a_child_starts_its_own(self):
        script = ("import emberd, os, sys\n"
                  "cluster = emberd.local(shards=1)\n"
                  "child = os.fork()\n"
                  "mine = emberd.local(shards=1)\n"
                  "with mine.connect() as client: client.status()\n"
                  "same = mine.pid == cluster.pid\n"
                  "if child == 0: sys.exit(3 if same else 4)\n"
                  "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
                  "with cluster.connect() as client: client.status()\n"
                  "sys.exit(0 if same and code == 4 else code or 1)\n")
        done = subprocess.run([sys.executable, "-B", "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=600)
        self.assertEqual(done.returncode, 0)

    def test_it_serves_until_it_is_closed(self):
        with emberd.local(shards=1, http="127.0.0.1:0") as cluster:
            self.assertRegex(cluster.http, r"^127\.0\.0\.1:\d+$")
            with cluster.connect() as client:
                self.assertEqual(len(client.status()["shards"]), 1)
            pid = cluster.pid
        self.assertFalse(running(pid))
        cluster.close()
        with self.assertRaises(emberd.Unavailable):
            emberd.connect(cluster.address, connect_timeout=0.3)


if __name__ == "__main__":
    main()
