"""Certificates and tokens that are renewed while a shard and a coordinator serve, as processes behind mutual TLS.

What this would catch: a renewed certificate that one of the ports does not show; a token that counts only after a restart,
or still counts when it is gone; a file that is damaged, or half written, and shuts everybody out; a renewal that drops
the connections of others, or after which the coordinator's own no longer reach the shard; a trainer that has to be started again,
or that fills its log meanwhile.

Usage: renewal_test.py PATH_OF_EMBERD PATH_OF_REPOSITORY PATH_OF_LIBEMBERD_CLIENT
"""

import importlib
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import unittest

import grpc

EMBERD, REPOSITORY, LIBRARY = sys.argv[1:4]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "testing"))

import processes  # noqa: E402
from stubs import generate_stubs  # noqa: E402

MODEL = 'name: "m" tables { name: "t" vocabulary_size: 10 embedding_dim: 4 } features { name: "f" table: "t" }'
BROKEN = "cannot be read: the old ones stay"
READ = "certificates and tokens were read again"
SAME = "certificates and tokens have not changed"

# Says for each line that it reads how a call ended. A process of its own, for the stubs of this test are called as its package.
TRAINER = """
import sys
import emberd
address, folder, token = sys.argv[1:]
tls = emberd.Tls(f"{folder}/ca.pem", f"{folder}/client.pem", f"{folder}/client-key.pem")
client = emberd.connect(address, tls=tls, token_file=token)
for line in sys.stdin:
    try:
        client.status()
        print("OK", flush=True)
    except emberd.Error as error:
        print(str(error).replace(chr(10), " "), flush=True)
"""


def read(path):
    with open(path, "rb") as file:
        return file.read()


def replace(path, content):
    """Puts the file there as a whole, as careful people do."""
    with open(path + ".new", "wb") as file:
        file.write(content)
    os.replace(path + ".new", path)


class RenewalTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        os.mkdir(cls.path("stubs"))
        generate_stubs(os.path.join(REPOSITORY, "proto"), cls.path("stubs"))
        cls.api = importlib.import_module("emberd.v1.embedding_service_pb2")
        cls.stubs = importlib.import_module("emberd.v1.embedding_service_pb2_grpc")
        cls.make_ca("ca")
        cls.tokens = {role: cls.make_token(role, role) for role in ("cluster", "trainer")}
        replace(cls.path("cluster.token"), cls.tokens["cluster"].encode())
        ports = processes.free_ports(4)
        cls.shard_at, cls.address, cls.shard_http, cls.http = (f"127.0.0.1:{port}" for port in ports)
        with open(cls.path("cluster.textproto"), "w") as file:
            file.write(f"""
                shards {{ address: "{cls.shard_at}" http_address: "{cls.shard_http}" }}
                coordinators {{ address: "{cls.address}" http_address: "{cls.http}" }}
                security {{
                  tls {{ certificate_file: "ca/server.pem" key_file: "ca/server-key.pem" ca_file: "ca/ca.pem"
                         require_client_certificate: true }}
                  tokens_file: "tokens.textproto" cluster_token_file: "cluster.token"
                }}""".replace('"ca/', f'"{cls.path("ca")}/').replace('file: "tokens', f'file: "{cls.path("tokens")}')
                       .replace('file: "cluster', f'file: "{cls.path("cluster")}'))
        cls.shard, cls.coordinator = (cls.start(role) for role in ("shard", "coordinator"))
        for program in (cls.shard, cls.coordinator):
            program.wait_for_line("emberd: ready ")
        cls.ca = read(cls.path("ca/ca.pem"))
        cls.client = read(cls.path("ca/client-key.pem")), read(cls.path("ca/client.pem"))

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    @classmethod
    def start(cls, role):
        program = processes.Program([EMBERD, role, "--config", cls.path("cluster.textproto")], cls.path(role + ".log"))
        cls.addClassCleanup(program.stop)
        return program

    @classmethod
    def make_ca(cls, name):
        subprocess.run([os.path.join(REPOSITORY, "deploy", "make_test_ca.sh"), cls.path(name)], check=True,
                       stdout=subprocess.DEVNULL)

    @classmethod
    def make_token(cls, name, role):
        made = subprocess.run([EMBERD, "token", name, role, "--file", cls.path("tokens.textproto")], check=True,
                              capture_output=True, text=True)
        return made.stdout.strip()

    def channel(self):
        channel = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(self.ca, *self.client),
                                      options=[("grpc.use_local_subchannel_pool", 1)])
        self.addCleanup(channel.close)
        return channel

    def declare(self, channel, token):
        """The status code of a call that needs the shard, too."""
        request = self.api.DeclareModelRequest()
        importlib.import_module("google.protobuf.text_format").Parse(MODEL, request.config)
        try:
            self.stubs.EmbeddingServiceStub(channel).DeclareModel(
                request, timeout=120, metadata=[("authorization", "Bearer " + token)])
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def wait_for(self, what, condition):
        processes.wait_until(what, condition)

    def calm(self, program):
        """Whether the files that were read last were good."""
        said = re.findall(f"{BROKEN}|{READ}|{SAME}", program.output())
        return not said or said[-1] != BROKEN

    def renew_certificate(self):
        """A new certificate for the old key, of the old authority; gives what it says."""
        ca = self.path("ca")
        asked = subprocess.run(["openssl", "req", "-new", "-key", f"{ca}/server-key.pem", "-subj", "/CN=renewed"],
                               check=True, stdout=subprocess.PIPE).stdout
        with open(self.path("extensions"), "w") as file:
            file.write("basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
                       "extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n")
        made = subprocess.run(["openssl", "x509", "-req", "-CA", f"{ca}/ca.pem", "-CAkey", f"{ca}/ca-key.pem", "-days", "3",
                               "-set_serial", "77", "-extfile", self.path("extensions")], input=asked, check=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        replace(f"{ca}/server.pem", made)
        return made.decode()

    def shown(self, address):
        host, port = address.split(":")
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=120))

    def watch(self):
        """A call that lasts, and ends with its connection."""
        stream = self.channel().unary_stream("/grpc.health.v1.Health/Watch")(b"")
        self.addCleanup(stream.cancel)
        next(stream)
        return stream

    def test_a_token_comes_and_goes(self):
        held, before = self.watch(), self.channel()
        self.assertEqual(self.declare(before, "a token that will come"), grpc.StatusCode.UNAUTHENTICATED)
        kept = read(self.path("tokens.textproto"))
        added = self.make_token("newcomer", "trainer")
        self.wait_for("the new token counts", lambda: self.declare(before, added) == grpc.StatusCode.OK)
        replace(self.path("tokens.textproto"), kept)
        self.wait_for("the old file counts", lambda: self.declare(before, added) == grpc.StatusCode.UNAUTHENTICATED)
        self.assertEqual(self.declare(before, self.tokens["trainer"]), grpc.StatusCode.OK)
        self.assertTrue(held.is_active())

    def test_the_clusters_token_is_replaced(self):
        channel = self.channel()
        replace(self.path("cluster.token"), self.make_token("cluster-2", "cluster").encode())
        self.coordinator.process.send_signal(signal.SIGHUP)
        self.coordinator.wait_for_line(READ)
        self.wait_for("the shard takes the coordinator's new token",
                      lambda: self.declare(channel, self.tokens["trainer"]) == grpc.StatusCode.OK)

    def test_a_broken_file_changes_nothing_and_is_reported(self):
        channel = self.channel()
        for path, about in ((self.path("tokens.textproto"), "security.tokens_file"),
                            (self.path("ca/server.pem"), "security.tls.certificate_file")):
            kept = read(path)
            self.addCleanup(replace, path, kept)
            replace(path, kept[:len(kept) // 2] + b"\n{ nonsense")
            self.coordinator.wait_for_line(f"{BROKEN}.*{about}")
            self.shard.wait_for_line(f"{BROKEN}.*{about}")
            self.assertEqual(self.declare(channel, self.tokens["trainer"]), grpc.StatusCode.OK)
            self.assertEqual(self.declare(self.channel(), self.tokens["trainer"]), grpc.StatusCode.OK)
            replace(path, kept)
            self.wait_for("the log says that all is well again", lambda: self.calm(self.shard) and self.calm(self.coordinator))

    def test_a_certificate_is_renewed(self):
        held, before = self.watch(), self.channel()
        self.assertEqual(self.declare(before, self.tokens["trainer"]), grpc.StatusCode.OK)
        renewed = ssl.PEM_cert_to_DER_cert(self.renew_certificate())
        for address in (self.address, self.http, self.shard_at, self.shard_http):
            self.wait_for(f"the new certificate at {address}", lambda at=address: self.shown(at) == renewed)
        self.assertEqual(self.declare(self.channel(), self.tokens["trainer"]), grpc.StatusCode.OK)
        self.assertEqual(self.declare(before, self.tokens["trainer"]), grpc.StatusCode.OK)
        self.assertTrue(held.is_active())

    def test_a_hangup_reads_again_and_ends_nothing(self):
        held = self.watch()
        self.shard.process.send_signal(signal.SIGHUP)
        self.shard.wait_for_line(SAME)
        self.assertIsNone(self.shard.process.poll())
        self.assertTrue(held.is_active())

    def start_trainer(self):
        """With files of its own; gives what makes a call, and what it has written to standard error."""
        os.mkdir(self.path("mine"))
        for name in ("ca.pem", "client.pem", "client-key.pem"):
            shutil.copy(self.path(f"ca/{name}"), self.path(f"mine/{name}"))
        replace(self.path("mine/token"), self.tokens["trainer"].encode())
        environment = dict(os.environ, EMBERD_LIBRARY=LIBRARY, PYTHONPATH=os.path.join(REPOSITORY, "client", "python"))
        errors = open(self.path("trainer.log"), "w+", encoding="utf-8")
        trainer = subprocess.Popen([sys.executable, "-B", "-c", TRAINER, self.address, self.path("mine"), self.path("mine/token")],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)

        def call():
            trainer.stdin.write("call\n")
            trainer.stdin.flush()
            return trainer.stdout.readline().strip()

        def end():
            trainer.communicate(timeout=120)
            errors.close()

        self.addCleanup(end)
        return call, lambda: read(self.path("trainer.log")).decode().splitlines()

    def test_z_another_authority(self):
        """Last: clients of the old authority are turned away from then on, but stay where they are."""
        held = self.watch()
        call, complaints = self.start_trainer()
        self.assertEqual(call(), "OK")
        self.make_ca("other")
        for name in ("ca.pem", "server-key.pem", "server.pem"):
            shutil.copy(self.path(f"other/{name}"), self.path(f"ca/{name}.new"))
            os.replace(self.path(f"ca/{name}.new"), self.path(f"ca/{name}"))
        renewed = ssl.PEM_cert_to_DER_cert(read(self.path("other/server.pem")).decode())
        for address in (self.address, self.shard_at, self.shard_http, self.http):
            self.wait_for(f"the new certificate at {address}", lambda at=address: self.shown(at) == renewed)
        self.assertEqual(self.declare(self.channel(), self.tokens["trainer"]), grpc.StatusCode.UNAVAILABLE)
        self.assertTrue(held.is_active())
        # The coordinator, which comes to the shard anew, shows what the shard trusts now.
        self.ca = read(self.path("other/ca.pem"))
        self.client = read(self.path("other/client-key.pem")), read(self.path("other/client.pem"))
        self.shard.stop()
        program = self.start("shard")
        program.wait_for_line("(?s)emberd: ready .*emberd: ready ")
        channel = self.channel()
        self.wait_for("the coordinator reaches the shard", lambda: self.declare(channel, self.tokens["trainer"]) in (
            grpc.StatusCode.OK, grpc.StatusCode.DATA_LOSS))
        # A trainer that has to connect again cannot, until its own files are renewed.
        self.coordinator.stop()
        self.start("coordinator").wait_for_line("(?s)emberd: ready .*emberd: ready ")
        self.assertIn("certificate verify failed", call())
        for name in ("ca.pem", "client.pem", "client-key.pem"):
            replace(self.path(f"mine/{name}"), read(self.path(f"other/{name}")))
        self.wait_for("the trainer follows its files", lambda: call() == "OK")
        self.assertLessEqual(len(complaints()), 1, complaints())


if __name__ == "__main__":
    unittest.main(verbosity=2)
