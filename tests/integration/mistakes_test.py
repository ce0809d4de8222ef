"""Makes the mistakes of mistakes.txt and holds the whole text of each answer against it.

What this would catch: an error that names no cause, or leaves the user without the next thing to do, where it did
before. mistakes.txt is a list of blocks:

  # what is wrong
  $ COMMAND, with {places} for what changes from run to run
  status EXIT_CODE
  everything that is printed

and of requests to a coordinator, in text proto, with the status of the call:

  > METHOD REQUEST
  CODE
  the message

Usage: mistakes_test.py EMBERD EMBERCTL ROOT_OF_REPOSITORY [--write FILE]
--write: writes what is answered now, to be read before it takes the place of mistakes.txt.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

EMBERD, EMBERCTL, ROOT = sys.argv[1:4]
WRITE = sys.argv[5] if sys.argv[4:5] == ["--write"] else None
del sys.argv[1:]
sys.path.insert(0, os.path.join(ROOT, "tests", "testing"))

import grpc  # noqa: E402
from google.protobuf import text_format  # noqa: E402
from processes import Program, free_ports, wait_until  # noqa: E402
from stubs import generate_stubs  # noqa: E402

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mistakes.txt")
MODEL = """
name: "ads"
tables { name: "users" vocabulary_size: 100 embedding_dim: 4 optimizer { adagrad {} } }
tables { name: "items" vocabulary_size: 50 embedding_dim: 8 max_ids_per_partition: 8 }
features { name: "user" table: "users" batch_size: 4 }
features { name: "item" table: "items" batch_size: 4 }
"""
# Files of {dir}, by name.
FILES = {
    "model": MODEL,
    "model.yaml": "name: ads\ntables:\n  - name: users\n    vocabulary_size: 100\n",
    "model_field": MODEL.replace("vocabulary_size: 100", "vocab: 100"),
    "model_enum": MODEL.replace("embedding_dim: 4", "embedding_dim: 4 combiner: AVG"),
    "model_zero": MODEL.replace("vocabulary_size: 100", "vocabulary_size: 0"),
    "model_table": MODEL.replace('table: "users"', 'table: "user"'),
    "model_optimizer": MODEL.replace("adagrad {}", "adagard {}"),
    "model_adam": MODEL.replace("adagrad {}", "adam { beta1: 1.5 }"),
    "model_rows": MODEL.replace("vocabulary_size: 100", "vocabulary_size: 1099511627776"),
    "model_large": MODEL.replace("vocabulary_size: 100", "vocabulary_size: 100000000000"),
    "model_open": MODEL + "tables {",
    "model_twice": MODEL + 'name: "two"',
    "model_other": MODEL.replace("embedding_dim: 4", "embedding_dim: 16"),
    "model.json": '{"name": "ads", "tabels": []}',
    "broken.json": '{"name": "ads",',
    "cluster": 'shards { address: "127.0.0.1:0" } coordinators { address: "127.0.0.1:0" }',
    "cluster_three": 'shards { address: "a:1" } shards { address: "a:2" } shards { address: "a:3" }',
    "cluster_twice": 'shards { address: "a:1" } coordinators { address: "a:1" }',
    "cluster_port": 'shards { address: "a" } coordinators { address: "a:1" }',
    "cluster_open": 'shards { address: "127.0.0.1:0" } coordinators { address: "0.0.0.0:0" }',
    "cluster_key": 'shards { address: "127.0.0.1:0" } coordinators { address: "127.0.0.1:0" } '
                   'security { tls { certificate_file: "/no/cert" key_file: "/no/key" ca_file: "/no/ca" } }',
    "cluster_storage": 'shards { address: "127.0.0.1:0" } storage { every_seconds: 60 }',
    "cluster_steps": 'shards { address: "127.0.0.1:0" } storage { directory: "/d" every_steps: 5 }',
    "cluster_fsync": 'shards { address: "127.0.0.1:0" } storage { directory: "/d" durability: CHECKPOINT fsync: ALWAYS }',
    "cluster_interval": 'shards { address: "127.0.0.1:0" } '
                        'storage { directory: "/d" durability: LOG fsync: ALWAYS fsync_interval_ms: 5 }',
    "cluster_durability": 'shards { address: "127.0.0.1:0" } storage { directory: "/d" durability: DISK }',
    "short.npy": "x",
    "cluster.yaml": "shards:\n  - address: 127.0.0.1:7001\n",
    "batch.json": '{"user": {"ids": [1, 2, 3, 4]}, "item": {"ids": [[1, 2], [3], [], [4]]}}',
    "batch_id.json": '{"user": {"ids": [1, 2, 3, 400]}, "item": {"ids": [1, 2, 3, 4]}}',
    "batch_feature.json": '{"usr": {"ids": [1]}, "item": {"ids": [1]}}',
    "batch_missing.json": '{"user": {"ids": [1]}}',
    "batch_limit.json": '{"user": {"ids": [1, 2, 3, 4]}, "item": {"ids": [%s]}}' % ", ".join(["0"] * 64),
    "batch_list.json": "[1, 2, 3]",
    "token_short": "secret\n",
    "token_wrong": "x" * 32 + "\n",
}


def security(folder, mutual):
    return f"""
security {{
  tls {{ certificate_file: "{folder}/ca/server.pem" key_file: "{folder}/ca/server-key.pem" ca_file: "{folder}/ca/ca.pem"
        require_client_certificate: {"true" if mutual else "false"} }}
  tokens_file: "{folder}/tokens" cluster_token_file: "{folder}/token_cluster"
}}"""


class Mistakes:
    """Clusters to be asked in the wrong way."""

    def __init__(self, folder):
        self.folder = folder
        self.programs = []
        for name, text in FILES.items():
            self.write(name, text)
        self.run([os.path.join(ROOT, "deploy", "make_test_ca.sh"), f"{folder}/ca", "localhost", "127.0.0.1"])
        self.run([os.path.join(ROOT, "deploy", "make_test_ca.sh"), f"{folder}/other_ca", "localhost", "127.0.0.1"])
        for role in ("cluster", "reader", "trainer", "admin"):
            self.write(f"token_{role}", self.run([EMBERD, "token", role, role, "--file", f"{folder}/tokens"]))
        plain = self.start("up", "--shards", "2", "--processes", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        self.places = {"dir": folder, "plain": plain["coordinator"], "web": plain["http"],
                       "shard": plain["shard_grpc"].split(",")[0], "free": f"127.0.0.1:{free_ports(1)[0]}"}
        for name, mutual, certificate in (("tls", False, "server"), ("mutual", True, "server"), ("expired", False, "expired")):
            self.write(f"cluster_{name}", FILES["cluster"] + security(folder, mutual).replace("server", certificate))
            self.places[name] = self.start("up", "--config", f"{folder}/cluster_{name}")["coordinator"]
        self.places["data"] = self.start("up", "--listen", "127.0.0.1:0", "--http", "", "--data", f"{folder}/data",
                                         "--durability", "memory")["coordinator"]
        # The longest first: one address may begin with another.
        self.hide = sorted(self.places.items(), key=lambda place: -len(place[1]))
        for place in ("plain", "data"):
            self.run([EMBERCTL, "-a", self.places[place], "declare", f"{folder}/model"])
        for name in ("one", "two"):
            self.run([EMBERCTL, "-a", self.places["data"], "checkpoint", "save", "ads", name, "--incremental"])

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)

    def run(self, argv):
        return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, text=True).stdout

    def start(self, *arguments):
        """What the ready line gives."""
        program = Program([EMBERD, *arguments], os.path.join(self.folder, f"log_{len(self.programs)}"))
        self.programs.append(program)
        line = program.wait_for_line("^emberd: ready (.*)$")[1]
        return dict(word.split("=", 1) for word in line.split())

    def end(self):
        for program in self.programs:
            program.stop()

    def shown(self, text):
        for name, value in self.hide:
            text = text.replace(value, "{%s}" % name)
        return re.sub(r"^\d{4}-\d\d-\d\dT[0-9:.]+Z ", "", text, flags=re.MULTILINE).strip()

    def answer(self, command):
        """Of a block's second line: what follows it."""
        kind, command = command[:2], command[2:]
        # Not str.format: requests have braces of their own.
        command = re.sub(r"\{(%s)\}" % "|".join(self.places), lambda place: self.places[place[1]], command)
        if kind == "> ":
            return self.request(*command.split(" ", 1))
        argv = shlex.split(command)
        argv[0] = {"emberd": EMBERD, "emberctl": EMBERCTL}[argv[0]]

        def asked():
            """Whoever listens may be silent for a second on a busy machine: emberctl cannot say what it is then."""
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  timeout=120, env={**os.environ, "EMBERD_ADDRESS": self.places["plain"]})
            return None if "no coordinator accepted a connection within" in done.stdout else done
        done = wait_until(command, asked)
        return f"status {done.returncode}\n{self.shown(done.stdout)}"

    def request(self, method, text):
        api = importlib.import_module("emberd.v1.embedding_service_pb2")
        stubs = importlib.import_module("emberd.v1.embedding_service_pb2_grpc")
        with grpc.insecure_channel(self.places["plain"], [("grpc.enable_http_proxy", 0)]) as channel:
            stub = stubs.EmbeddingServiceStub(channel)
            model = stub.DescribeModel(api.DescribeModelRequest(name="ads"), timeout=120)
            message = text_format.Parse(text.replace("MODEL", str(model.model_id)), getattr(api, method + "Request")())
            try:
                answer = getattr(stub, method)(message, timeout=120)
                if method == "ExportTable":
                    list(answer)
            except grpc.RpcError as error:
                return f"{error.code().name}\n{self.shown(error.details())}"
            return "OK"


def read_table():
    """(what is wrong, command, answer) of each block."""
    with open(TABLE, encoding="utf-8") as file:
        blocks = re.split(r"^(?=# )", file.read(), flags=re.MULTILINE)
    for block in blocks:
        if block.startswith("# "):
            what, command, answer = (block.strip() + "\n\n").split("\n", 2)
            yield what[2:], command, answer.strip()


class MistakesTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        generate_stubs(os.path.join(ROOT, "proto"), folder.name)
        cls.mistakes = Mistakes(folder.name)
        cls.addClassCleanup(cls.mistakes.end)

    def test_each_answer_names_the_cause_and_what_to_do(self):
        table = list(read_table())
        self.assertGreaterEqual(len(table), 60)
        answers = [(what, command, self.mistakes.answer(command)) for what, command, _ in table]
        if WRITE:
            with open(WRITE, "w", encoding="utf-8") as file:
                file.write("\n".join(f"# {what}\n{command}\n{answer}\n" for what, command, answer in answers))
            return
        for (what, command, expected), (_, _, answer) in zip(table, answers):
            with self.subTest(what, command=command):
                self.assertEqual(answer, expected)


if __name__ == "__main__":
    unittest.main(verbosity=2)
