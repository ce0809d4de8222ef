"""Follows deploy/README.md and client/emberctl/README.md word by word, in a clone that nobody has touched.

What this would catch: an example that no longer works, a flag that is gone, a unit file or a description that no process
takes, and an example that stands in a table for a command that does something else.

The pages of docs/ are held against the tree: what they name must be there, and who reads the tree must come upon them.

Steps that need a container engine, a registry or a Kubernetes cluster are marked so in the text ("# needs ...") or begin with
kubectl; they are left out with a message.

Usage: documents_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT, BINARIES = sys.argv[1:3]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

from documents import blocks, fresh_clone, run_alone, section  # noqa: E402
from processes import Program, wait_until  # noqa: E402

PORTS = (7400, 7401, 7100, 9100, 7101, 7102, 7103, 7104, 9101, 9102, 9103, 9104)
MODEL = """name: "my_model"
tables { name: "users" vocabulary_size: 1000 embedding_dim: 8 }
features { name: "user" table: "users" batch_size: 4 }
optimizer { learning_rate: 0.1 adagrad { initial_accumulator: 0.1 } }
"""
BATCH = '{"user": {"ids": [1, 2, 7, 2]}}'


def read(*names):
    with open(os.path.join(ROOT, *names), encoding="utf-8") as file:
        return file.read()


class PagesTest(unittest.TestCase):
    """What this would catch: a page that grew too long to be read at once, or that names what was renamed or is gone."""

    def setUp(self):
        tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], check=True, capture_output=True, text=True).stdout
        self.files = {name for name in tracked.splitlines() if os.path.isfile(os.path.join(ROOT, name))}
        self.pages = {f"docs/{name}": read("docs", name) for name in os.listdir(os.path.join(ROOT, "docs"))}
        self.assertGreaterEqual(len(self.pages), 8)

    def quoted(self):
        """Page and text of what stands in backquotes, but not in drawings."""
        for page, text in self.pages.items():
            for quoted in set(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text))):
                yield page, quoted

    def test_pages_are_short_and_drawn(self):
        for page, text in self.pages.items():
            with self.subTest(page):
                self.assertLessEqual(text.count("\n"), 150)
                self.assertLessEqual(max(map(len, text.splitlines())), 128)
                self.assertRegex(text, r"(?ms)^```\n.*?^```$", "it has no drawing")

    def test_paths_are_there(self):
        folders = {os.path.dirname(name) + "/" for name in self.files}
        paths = [(page, quoted) for page, quoted in self.quoted() if re.fullmatch(r"[\w.-]+/[\w./-]*|\w+\.(h|cc|md)", quoted)]
        self.assertGreater(len(paths), 100)
        for page, path in paths:
            self.assertTrue(path in self.files | folders, f"{page}: there is no {path}")

    def test_names_are_those_of_the_code(self):
        words = set()
        for name in self.files:
            if name.endswith((".h", ".cc", ".proto")):
                words |= set(re.findall(r"\w+", read(name)))
        names = [(page, quoted) for page, quoted in self.quoted() if re.fullmatch(r"[A-Za-z]\w*((::|\.)\w+)*", quoted)]
        self.assertGreater(len(names), 100)
        for page, name in names:
            missing = set(re.findall(r"\w+", name)) - words
            self.assertTrue(name in self.files or not missing, f"{page}: no source has {missing} of {name}")

    def test_members_are_those_of_their_class(self):
        words = {}  # of a class: those of all sources that define it
        for name in self.files:
            if name.endswith((".h", ".cc")):
                text = read(name)
                for owner in re.findall(r"(?m)^ *(?:class|struct) (\w+)\b[^;{]*{", text):
                    words.setdefault(owner, set()).update(re.findall(r"\w+", text))
        members = {(page, *quoted.split("::")) for page, quoted in self.quoted()
                   if re.fullmatch(r"\w+::\w+", quoted) and not re.match("std|absl", quoted)}
        self.assertGreater(len(members), 30)
        for page, owner, member in members:
            self.assertTrue(member in words.get(owner, set()), f"{page}: no {owner} has {member}")

    def test_readers_of_the_tree_come_upon_them(self):
        headers = [read(name) for name in self.files if name.endswith(".h")]
        comments = "\n".join(line for text in headers for line in re.findall(r"(?m)^//.*$", text))
        for page in self.pages:
            self.assertIn(page, comments, "no header names it")
            self.assertIn(f"({page})", read("README.md"))


class DocumentsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.clone = os.path.join(self.folder, "emberd")
        fresh_clone(ROOT, self.clone, BINARIES)
        # The text says `emberd` and `emberctl` where they are installed.
        self.environment = {**os.environ, "no_proxy": "127.0.0.1", "PATH": f"{BINARIES}:{os.environ['PATH']}"}

    def start(self, command, ready="^emberd: ready ", count=1):
        """Ends with the test, and so does what the command has started."""
        log = os.path.join(self.folder, f"server-{len(os.listdir(self.folder))}.log")
        program = Program(["bash", "-c", f"trap 'kill $(jobs -p); wait; exit 0' TERM\ncd {self.clone}\n"
                           f"export PATH={BINARIES}:$PATH\n{command}\nwait"], log)
        self.addCleanup(program.stop)
        wait_until(f"{count} processes of {command}",
                   lambda: len(re.findall(ready, program.output(), re.MULTILINE)) >= count or
                   program.process.poll() is not None)
        self.assertIsNone(program.process.poll(), program.output())
        return program

    def run_in_shell(self, command, folder=None):
        return subprocess.run(["bash", "-e", "-c", command], cwd=folder or self.clone, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, env=self.environment)

    def run_to_end(self, command, folder=None):
        done = self.run_in_shell(command, folder)
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}")
        return done.stdout

    def deploy_blocks(self, title):
        """Those that can be followed here."""
        followed = []
        for block in blocks(section(read("deploy", "README.md"), title)):
            if marked := re.match(r"# (needs .*)", block):
                print(f"left out: {title}: {marked[1]}")
            else:
                followed.append(block)
        return followed

    def wait_for_shards(self, *command):
        """A shard that does not answer the coordinator within a second is not ok."""
        def all_are_ok():
            done = self.run_in_shell(*command)
            return done.returncode == 0 and len(re.findall(r"\bok\b", done.stdout)) == 4
        wait_until(f"four shards are ok: {command}", all_are_ok)

    def test_a_cluster_by_hand(self):
        block, status = self.deploy_blocks("By hand")
        self.start(block, count=5)
        self.wait_for_shards(status)

    def test_the_unit_starts_a_shard(self):
        unit = re.search(r"^ExecStart=(.*)$", read("deploy", "README.md"), re.MULTILINE)[1]
        unit = unit.replace("/usr/local/bin/", BINARIES + "/").replace("%i", "2")
        self.start(unit.replace("/etc/emberd/cluster.textproto", "config/samples/cluster_local.textproto") + " &")

    def test_the_unit_starts_a_shard_again_until_it_can(self):
        """One that cannot start ends at once, and systemd gives up after five starts within ten seconds."""
        self.assertGreater(5 * int(re.search(r"^RestartSec=(\d+)$", read("deploy", "README.md"), re.MULTILINE)[1]), 10)

    def test_steps_with_containers_are_marked(self):
        for title in ("Compose cluster", "Where no registry can be reached"):
            self.assertEqual(self.deploy_blocks(title), [], "commands of Docker need a mark")

    def test_secrets_for_kubernetes(self):
        block, = self.deploy_blocks("Kubernetes")
        followed = []
        for line in block.splitlines():
            if line.startswith("kubectl") or "secrets/admin.token status" in line:
                print(f"left out: {line}: needs a cluster")
            else:
                followed.append(line)
        self.run_to_end("\n".join(followed))
        made = os.path.join(self.clone, "deploy", "kubernetes")
        for name in ("server.pem", "server-key.pem", "ca.pem", "tokens.textproto", "cluster.token", "admin.token"):
            self.assertTrue(os.path.getsize(os.path.join(made, "secrets", name)), name)
        with open(os.path.join(made, "monitoring", "secrets", "reader.token"), encoding="utf-8") as file:
            token = file.read()
        self.assertEqual(token, token.strip())  # Prometheus is given it as it is
        # What a pod is given, on this machine.
        text = read("deploy", "kubernetes", "cluster.textproto")
        text = text.replace("/etc/emberd/tls/", f"{made}/secrets/").replace("/etc/emberd/tokens/", f"{made}/secrets/")
        text = re.sub(r"shard-\d.shard.emberd.svc:740\d|coordinator.emberd.svc:740\d", "localhost:0", text)
        text = re.sub(r"(?s)storage \{.*?\n\}\n", "", text)
        with open(os.path.join(made, "here.textproto"), "w", encoding="utf-8") as file:
            file.write(text)
        program = self.start(f"emberd up --processes --config {made}/here.textproto &")
        address = re.search(r"coordinator=(\S+)", program.output())[1].replace("127.0.0.1", "localhost")
        self.wait_for_shards(f"emberctl --ca secrets/ca.pem --token-file secrets/admin.token -a {address} status", made)

    def test_doors_are_closed(self):
        for block in self.deploy_blocks("Security"):
            self.run_to_end(block)
        made = os.path.join(self.clone, "build")
        settings = re.search(r"^```\n(security \{.*?)^```", read("deploy", "README.md"), re.MULTILINE | re.DOTALL)[1]
        for name in ("tokens.textproto", "cluster.token"):
            settings = settings.replace(f"/etc/emberd/{name}", f"{made}/{name}")
        settings = settings.replace("/etc/emberd/", f"{made}/ca/")
        with open(os.path.join(made, "closed.textproto"), "w", encoding="utf-8") as file:
            file.write(read("config", "samples", "cluster_local.textproto") + settings)
        self.start("emberd up --processes --config build/closed.textproto &")
        closed = "emberctl --ca build/ca/ca.pem --cert build/ca/client.pem --key build/ca/client-key.pem -a 127.0.0.1:7100"
        self.wait_for_shards(f"{closed} --token-file build/alice.token status")
        refused = subprocess.run(f"{closed} status".split(), cwd=self.clone, env=self.environment, capture_output=True, text=True)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("no token", refused.stderr)

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)

    def test_the_examples_of_emberctl(self):
        self.write("model.textproto", MODEL)
        self.write("batch.json", BATCH)
        self.write("cluster.textproto", read("config", "samples", "cluster_local.textproto"))
        program = self.start(f"emberd up --shards 4 --data {self.folder}/data --durability log &")
        for command in ("emberctl declare model.textproto", "emberctl checkpoint save my_model step-1000",
                        "emberctl checkpoint save my_model step-2000 --incremental",
                        f"{BINARIES}/../bench/emberd_bench load --model my_model --seconds 1"):
            self.run_to_end(command, self.folder)
        rows = re.findall(r"^\| `.*\| `(emberctl [^`]*)` \|$", read("client", "emberctl", "README.md"), re.MULTILINE)
        self.assertGreater(len(rows), 20)
        for command in rows:
            with self.subTest(command):
                elsewhere = {"emberctl top": "needs a terminal; top_terminal_test has one",
                             "emberctl memory": "needs a cluster that evicts; memory_operator_test has one",
                             "emberctl memory pin my_model": "the same",
                             "emberctl memory release": "the same"}
                if command in elsewhere:
                    print(f"left out: {command}: {elsewhere[command]}")
                    continue
                command = command.replace("/var/lib/emberd", f"{self.folder}/data")
                self.assertNotEqual(self.run_to_end(command, self.folder), "", command)
                if command.startswith("emberctl drain"):
                    self.run_to_end("emberctl drain --undo")
        for block in blocks(read("client", "emberctl", "README.md")):
            pid = re.search(r"pid=(\d+)", program.output())
            block = block.replace("10.0.0.7:7400", "127.0.0.1:7400").replace("PID", pid[1] if pid else str(program.process.pid))
            self.run_to_end(block, self.folder)


if __name__ == "__main__":
    run_alone(PORTS)
    del sys.argv[1:3]
    unittest.main(verbosity=2)
