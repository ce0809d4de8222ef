"""Runs what README.md tells a user to type in "Run a cluster" and the like, line by line, as it stands there.

What this would catch: a README whose commands no longer work, or no longer do what is said beside them.

Blocks marked ```sh are run; others (```text) are not. A line that starts `emberd up`, `shard` or `coordinator` is a
server and keeps running; PID stands for the last one. Ports are the defaults, so the test runs in a network namespace
of its own where the system allows it; else on this machine's loopback interface, if nobody listens there.

Usage: readme_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT, BINARIES = sys.argv[1:3]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

from documents import commands, run_alone, section  # noqa: E402
from processes import Program  # noqa: E402

SECTION = "Run a cluster"
TRAINERS = "Use it from a trainer"
CHECKPOINTS = "Checkpoints"
PORTS = (7400, 7401)
SERVER = re.compile(r"^\S*\bemberd (up|shard|coordinator)\b")


class ReadmeTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.servers = []  # (command, program), the last one last
        self.addCleanup(lambda: [program.kill() for _, program in self.servers])
        with open(os.path.join(ROOT, "README.md")) as file:
            self.text = section(file.read(), SECTION)

    def start(self, command):
        command = re.sub(r"&\s*(#.*)?$", "", command)
        log = os.path.join(self.folder, f"server-{len(self.servers)}.log")
        program = Program(["bash", "-c", f"cd {ROOT} && exec {command}"], log)
        self.servers.append((command, program))
        program.wait_for_line("^emberd: ready ")

    def run_to_end(self, command):
        pid = self.servers[-1][1].process.pid if self.servers else "PID"
        done = subprocess.run(["bash", "-c", re.sub(r"\bPID\b", str(pid), command)], cwd=ROOT, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                              env={**os.environ, "no_proxy": "127.0.0.1"})
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}")
        self.check(command, done.stdout)

    def check(self, command, output):
        """What the README says that the command does."""
        if "kill -TERM" in command:
            server = self.servers.pop()[1]
            self.assertEqual(server.process.wait(60), 0, server.output())
        elif "emberctl status" in command:
            shards = re.search(r"--shards (\d+)", self.servers[-1][0])
            self.assertEqual(len(re.findall(r"\bok\b", output)), int(shards[1]) if shards else 1, output)
        elif command.startswith("curl"):
            self.assertRegex(output, r"(?m)^# (HELP|TYPE) \w+")
        else:
            self.assertNotEqual(output, "", command)

    def test_every_command_works(self):
        ran = 0
        for command in commands(self.text):
            command = command.replace("build/bin/", BINARIES + "/")
            with self.subTest(command):
                if SERVER.search(command):
                    self.start(command)
                else:
                    self.run_to_end(command)
                ran += 1
        self.assertGreaterEqual(ran, 4)
        self.assertEqual(self.servers, [], "the section leaves a server running")

    def test_checkpoints_are_saved_and_restored(self):
        with open(os.path.join(ROOT, "README.md")) as file:
            text = section(file.read(), CHECKPOINTS)
        ran = 0
        for command in commands(text):
            command = re.sub(r"\bbuild/(?!bin/)", self.folder + "/", command).replace("build/bin/", BINARIES + "/")
            with self.subTest(command):
                if SERVER.search(command):
                    self.start(command)
                else:
                    self.run_to_end(command)
                ran += 1
        self.assertGreaterEqual(ran, 10)
        self.assertEqual(self.servers, [], "the section leaves a server running")
        self.assertIn("user.safetensors", " ".join(os.listdir(os.path.join(self.folder, "tables"))))

    def test_a_trainers_first_commands_work(self):
        with open(os.path.join(ROOT, "README.md")) as file:
            text = section(file.read(), TRAINERS)
        ran = 0
        for command in commands(text):
            if command.startswith("./run "):
                continue  # the binaries are there
            command = command.replace("build/bin/", BINARIES + "/").replace("build/stubs", self.folder + "/stubs")
            with self.subTest(command):
                if SERVER.search(command):
                    self.start(command)
                else:
                    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
                    self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}")
                ran += 1
        self.assertGreaterEqual(ran, 6)

    def test_what_the_section_links_to_is_there(self):
        for target in re.findall(r"\]\(([^)#:]+)\)", self.text):
            self.assertTrue(os.path.exists(os.path.join(ROOT, target)), target)


if __name__ == "__main__":
    run_alone(PORTS)
    del sys.argv[1:3]
    unittest.main(verbosity=2)
