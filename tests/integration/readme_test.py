"""Runs what README.md, client/README.md and deploy/README.md tell a user to type in "Run a cluster" and the like,
as it stands there, in a clone that nobody has touched.

What this would catch: a README whose commands no longer work, or no longer do what is said beside them.

Blocks marked ```sh are run; others (```text) are not. The commands of a section go to one shell,
one after the other, as a user pastes them: servers are in the background, `$!` is the last one.
Ports are the defaults, so the test runs in a network namespace of its own where the system allows
it; else on this machine's loopback interface, if nobody listens there.

Usage: readme_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT, BINARIES = sys.argv[1:3]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

from documents import commands, fresh_clone, run_alone, section  # noqa: E402

PORTS = (7400, 7401)
SECONDS = 120  # for one command


def read(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return file.read()


class Shell:
    """A bash that is given one command after the other. What it has started in the background ends
    with it, and it ends with this process."""

    def __init__(self, folder, output):
        self.output = output
        self.process = subprocess.Popen(["bash"], cwd=folder, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, start_new_session=True, text=True,
                                        env={**os.environ, "no_proxy": "127.0.0.1"})
        self.write("trap 'kill -KILL $(jobs -p) 2>/dev/null' EXIT")

    def write(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def run(self, command):
        """The status and what was written; by what it starts in the background, what is there."""
        # A file of its own for each command: servers go on writing to theirs.
        path = f"{self.output}-{len(os.listdir(os.path.dirname(self.output)))}"
        self.write(f"{{\n{command}\n}} >{path} 2>&1 </dev/null\necho $?")
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            raise AssertionError(f"not within {SECONDS} s: {command}")
        status = self.process.stdout.readline()
        with open(path, errors="replace") as file:
            return int(status or -1), file.read()

    def running(self):
        """The number of its jobs."""
        return len(self.run("jobs -rp")[1].split())

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(120)  # it ends the servers
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()


class ReadmeTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.clone = os.path.join(folder.name, "emberd")
        cls.outputs = os.path.join(folder.name, "outputs")
        os.mkdir(cls.outputs)
        fresh_clone(ROOT, cls.clone, BINARIES)

    def follow(self, title, page="README.md"):
        """Runs the commands of a section and gives their number."""
        ran = 0
        shell = Shell(self.clone, os.path.join(self.outputs, "output"))
        self.addCleanup(shell.close)
        shards = 1
        for command in commands(section(read(page), title)):
            if command.startswith("./run "):
                continue  # the binaries are there
            if started := re.search(r"emberd up .*--shards (\d+)", command):
                shards = int(started[1])
            status, output = shell.run(command)
            end = time.monotonic() + SECONDS
            while status != 0 and "emberctl status" in command and time.monotonic() < end:
                # A shard that does not answer the coordinator within a second is not ok.
                status, output = shell.run(command)
            self.assertEqual(status, 0, f"{command}\n{output}")
            self.check(command, output, shards)
            ran += 1
        self.assertEqual(shell.running(), 0, f"the section '{title}' leaves a server running")
        return ran

    def check(self, command, output, shards):
        """What the README says that the command does."""
        if "emberctl status" in command:
            self.assertEqual(len(re.findall(r"\bok\b", output)), shards, output)
        elif command.startswith("curl"):
            self.assertRegex(output, r"(?m)^# (HELP|TYPE) \w+")
        elif "emberctl" in command:
            self.assertNotEqual(output, "", command)

    def test_a_cluster_runs(self):
        self.assertGreaterEqual(self.follow("Run a cluster"), 5)

    def test_checkpoints_are_saved_and_restored(self):
        self.assertGreaterEqual(self.follow("Checkpoints", "deploy/README.md"), 11)
        self.assertIn("user.safetensors", os.listdir(os.path.join(self.clone, "build", "tables")))

    def test_a_trainers_first_commands_work(self):
        self.assertGreaterEqual(self.follow("Use it from a trainer"), 7)

    def test_stubs_can_be_imported(self):
        self.assertEqual(self.follow("Other languages", "client/README.md"), 1)
        # The imports of the example, on the stubs that the command has made.
        imports = re.search(r"(?ms)^```python\n(import grpc.*?)\n\n", read("client/README.md"))
        stubs = os.path.join("build", "stubs")
        done = subprocess.run([sys.executable, "-B", "-c", imports[1]], capture_output=True,
                              text=True, timeout=SECONDS, cwd=self.clone,
                              env={**os.environ, "PYTHONPATH": stubs})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_they_link_to_is_there(self):
        for folder in ("", "client", "deploy", "tests/bench", "tests/bench/demo"):
            page = os.path.join(folder, "README.md")
            links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", read(page))
            self.assertTrue(links, page)
            for target, title in links:
                path = os.path.normpath(os.path.join(folder, target)) if target else page
                self.assertTrue(os.path.exists(os.path.join(ROOT, path)), f"{page}: {target}")
                if title:
                    titles = re.findall(r"^#+ (.*)$", read(path), re.MULTILINE)
                    anchors = [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in titles]
                    self.assertIn(title, anchors, f"{page}: {target}")


if __name__ == "__main__":
    run_alone(PORTS)
    del sys.argv[1:3]
    unittest.main(verbosity=2)
