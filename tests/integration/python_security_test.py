"""A cluster behind mutual TLS and tokens, made by the tools that deploy/README.md names, and a client of another
language, with nothing but what its gRPC brings along.

What this would catch: certificates or tokens that only our own C++ accepts, tools whose files do not fit each other,
and a door that is open for whoever does not use our client.

Usage: python_security_test.py PATH_OF_EMBERD PATH_OF_REPOSITORY
"""

import base64
import importlib
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

import grpc

EMBERD, REPOSITORY = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "testing"))

from processes import WITH_PARENT  # noqa: E402
from stubs import generate_stubs  # noqa: E402

ROLES = ["reader", "trainer", "cluster"]
MODEL = 'name: "m" tables { name: "t" vocabulary_size: 10 embedding_dim: 4 } features { name: "f" table: "t" }'


def read(path):
    with open(path, "rb") as file:
        return file.read()


def start_cluster(config, log):
    """Starts `emberd up` with a process for each part; gives it and the coordinator's addresses."""
    process = subprocess.Popen([*WITH_PARENT, EMBERD, "up", "--processes", "--config", config],
                               stdout=subprocess.PIPE, stderr=log, text=True)
    for line in process.stdout:
        found = re.match(r"emberd: ready coordinator=(\S+) http=(\S+)", line)
        if found:
            return process, found.group(1), found.group(2)
    log.seek(0)
    raise RuntimeError("emberd did not get ready:\n" + log.read())


class SecurityTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        stubs, certificates = (os.path.join(cls.folder.name, name) for name in ("stubs", "ca"))
        os.mkdir(stubs)
        generate_stubs(os.path.join(REPOSITORY, "proto"), stubs)
        cls.api = importlib.import_module("emberd.v1.embedding_service_pb2")
        cls.stubs = importlib.import_module("emberd.v1.embedding_service_pb2_grpc")
        subprocess.run([os.path.join(REPOSITORY, "deploy", "make_test_ca.sh"), certificates], check=True,
                       stdout=subprocess.DEVNULL)
        tokens = os.path.join(cls.folder.name, "tokens.textproto")
        cls.tokens = {}
        for role in ROLES:
            made = subprocess.run([EMBERD, "token", f"my-{role}", role, "--file", tokens], check=True,
                                  capture_output=True, text=True)
            cls.tokens[role] = made.stdout.strip()
        cluster_token = os.path.join(cls.folder.name, "cluster.token")
        with open(cluster_token, "w") as file:
            file.write(cls.tokens["cluster"] + "\n")
        config = os.path.join(cls.folder.name, "cluster.textproto")
        with open(config, "w") as file:
            file.write(f"""
                shards {{ address: "127.0.0.1:0" }} shards {{ address: "127.0.0.1:0" }}
                coordinators {{ address: "127.0.0.1:0" http_address: "127.0.0.1:0" }}
                security {{
                  tls {{
                    certificate_file: "{certificates}/server.pem" key_file: "{certificates}/server-key.pem"
                    ca_file: "{certificates}/ca.pem" require_client_certificate: true
                  }}
                  tokens_file: "{tokens}" cluster_token_file: "{cluster_token}"
                }}""")
        cls.certificates, cls.token_file, cls.cluster_token = certificates, tokens, cluster_token
        cls.log = tempfile.TemporaryFile("w+")
        cls.addClassCleanup(cls.log.close)
        cls.process, cls.address, cls.http = start_cluster(config, cls.log)
        cls.addClassCleanup(cls.stop)

    @classmethod
    def stop(cls):
        cls.process.send_signal(signal.SIGTERM)
        cls.process.wait(60)
        cls.process.stdout.close()

    def pem(self, name):
        return read(os.path.join(self.certificates, name + ".pem"))

    def stub(self, credentials):
        channel = grpc.secure_channel(self.address, credentials)
        self.addCleanup(channel.close)
        return self.stubs.EmbeddingServiceStub(channel)

    def tls(self, with_certificate=True):
        if not with_certificate:
            return grpc.ssl_channel_credentials(self.pem("ca"))
        return grpc.ssl_channel_credentials(self.pem("ca"), self.pem("client-key"), self.pem("client"))

    def as_role(self, role):
        return self.stub(grpc.composite_channel_credentials(
            self.tls(), grpc.access_token_call_credentials(self.tokens[role])))

    def declare(self, stub):
        request = self.api.DeclareModelRequest()
        importlib.import_module("google.protobuf.text_format").Parse(MODEL, request.config)
        return stub.DeclareModel(request, timeout=120)

    def assert_refused(self, code, call):
        with self.assertRaises(grpc.RpcError) as refused:
            call()
        self.assertEqual(refused.exception.code(), code, refused.exception.details())

    def test_roles(self):
        self.assertGreater(self.declare(self.as_role("trainer")).model_id, 0)
        self.as_role("reader").DescribeModel(self.api.DescribeModelRequest(name="m"), timeout=120)
        self.assert_refused(grpc.StatusCode.PERMISSION_DENIED, lambda: self.declare(self.as_role("reader")))
        self.assert_refused(grpc.StatusCode.PERMISSION_DENIED, lambda: self.declare(self.as_role("cluster")))
        self.assert_refused(grpc.StatusCode.UNAUTHENTICATED, lambda: self.declare(self.stub(self.tls())))

    def test_a_reader_keeps_no_batches(self):
        def look_up(inference):
            self.as_role("reader").Lookup(self.api.LookupRequest(model_id=1, inference=inference), timeout=120)

        self.assert_refused(grpc.StatusCode.PERMISSION_DENIED, lambda: look_up(False))
        self.assert_refused(grpc.StatusCode.NOT_FOUND, lambda: look_up(True))  # nobody declared it

    def test_metadata_does_what_call_credentials_do(self):
        stub = self.stub(self.tls())
        request = self.api.DescribeModelRequest(name="nobody declared it")
        metadata = [("authorization", "Bearer " + self.tokens["reader"])]
        self.assert_refused(grpc.StatusCode.NOT_FOUND,
                            lambda: stub.DescribeModel(request, timeout=120, metadata=metadata))

    def test_no_connection_without_a_certificate(self):
        self.assert_refused(grpc.StatusCode.UNAVAILABLE,
                            lambda: self.declare(self.stub(self.tls(with_certificate=False))))

    def fetch(self, headers, with_certificate=True):
        """Status of /metrics."""
        context = ssl.create_default_context(cafile=os.path.join(self.certificates, "ca.pem"))
        if with_certificate:
            context.load_cert_chain(*(os.path.join(self.certificates, name) for name in
                                      ("client.pem", "client-key.pem")))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}),
                                             urllib.request.HTTPSHandler(context=context))
        try:
            with opener.open(urllib.request.Request(f"https://{self.http}/metrics", headers=headers),
                             timeout=120) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def test_a_wrong_description_is_refused_at_the_start(self):
        good = {"certificate_file": "server.pem", "key_file": "server-key.pem", "ca_file": "ca.pem"}
        trainers = os.path.join(self.folder.name, "trainer.token")
        with open(trainers, "w") as file:
            file.write(self.tokens["trainer"])
        tokens = f'tokens_file: "{self.token_file}" cluster_token_file: "%s"'
        for address, files, more, flags, error in [
                ("0.0.0.0:0", {}, "", [], "shards[0].address: .* traffic is not encrypted"),
                ("0.0.0.0:0", good, "", [], "shards[0].address: .* anybody may call"),
                ("0.0.0.0:0", {}, tokens % self.cluster_token, ["--insecure"],
                 "shards[0].address: .* tokens would travel there in plain text"),
                ("127.0.0.1:0", {**good, "ca_file": ""}, "", [], "security.tls.ca_file: empty"),
                ("127.0.0.1:0", {**good, "ca_file": "nothing.pem"}, "", [], "security.tls.ca_file: .*/nothing.pem: No such"),
                ("127.0.0.1:0", {**good, "key_file": "ca-key.pem"}, "", [], "security.tls.key_file: .* is not the key"),
                ("127.0.0.1:0", {}, tokens % trainers, [], "security.cluster_token_file: .* has the role TRAINER"),
        ]:
            tls = "".join(f'{field}: "{name and os.path.join(self.certificates, name)}" ' for field, name in files.items())
            config = os.path.join(self.folder.name, "wrong.textproto")
            with open(config, "w") as file:
                file.write(f'shards {{ address: "{address}" }} security {{ {more} {"tls {" + tls + "}" if tls else ""} }}')
            ended = subprocess.run([EMBERD, "shard", "--config", config] + flags, capture_output=True, text=True,
                                   timeout=120)
            self.assertEqual(ended.returncode, 2, ended.stderr)
            self.assertRegex(ended.stderr, error.replace("[", r"\["))

    def test_pages(self):
        pair = base64.b64encode(("me:" + self.tokens["reader"]).encode()).decode()
        self.assertEqual(self.fetch({"Authorization": "Bearer " + self.tokens["reader"]}), 200)
        self.assertEqual(self.fetch({"Authorization": "Basic " + pair}), 200)
        self.assertEqual(self.fetch({"Authorization": "Bearer " + self.tokens["cluster"]}), 403)
        self.assertEqual(self.fetch({}), 401)
        self.assertEqual(self.fetch({"Authorization": "Bearer " + self.tokens["reader"]}, with_certificate=False), 403)


if __name__ == "__main__":
    unittest.main()
