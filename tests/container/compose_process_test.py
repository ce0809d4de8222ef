"""Runs what deploy/docker-compose.yml runs, as processes on loopback, and trains on it. No container engine is needed.

What this would catch: a flag that emberd no longer has, a host of the cluster description or a target of Prometheus
that is no service, memory limits below what budgets allow, a library that the image lacks, a coordinator that does not
find a shard again that was out of reach, and rows that depend on where they are.

Usage: compose_process_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD
"""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import urllib.request

ROOT, BINARIES = sys.argv[1:3]
del sys.argv[1:3]
sys.path[:0] = [os.path.join(ROOT, "tests", "testing"), os.path.dirname(os.path.abspath(__file__))]

import engine  # noqa: E402
import grpc  # noqa: E402
import yaml  # noqa: E402
from certificates import credentials_of, make_certificates  # noqa: E402
from compose_file import ComposeFile  # noqa: E402
from engine import compose_commands  # noqa: E402
from processes import Program, Relay, free_ports, wait_until  # noqa: E402
from stubs import generate_stubs  # noqa: E402
from trainer import Trainer  # noqa: E402

EMBERD = os.path.join(BINARIES, "emberd")
FILES = [os.path.join(ROOT, "deploy", name) for name in ("docker-compose.yml", "docker-compose.tls.yml")]
COMPOSE = ComposeFile(FILES[0])
SHARDS = ["shard-0", "shard-1", "shard-2", "shard-3"]
LOST = 2  # the shard that things happen to
OUT_OF_REACH = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class LocalCompose:
    """The services as processes. Port p of a service's own network is another port of 127.0.0.1 here."""

    def __init__(self, folder, compose):
        self.folder, self.compose = folder, compose
        self.programs = {}
        self.local = {}
        for service in compose.emberd():
            for inner, outer in zip((7400, 7401), free_ports(2)):
                self.local[service.name, inner] = outer
        self.local["prometheus", 9090], = free_ports(1)
        self.relay = Relay(self.local[SHARDS[LOST], 7400])
        # What others reach a service by, beside what it listens on.
        self.reached = dict(self.local)
        self.reached[SHARDS[LOST], 7400] = self.relay.port

    def localize(self, text):
        """A file's text with service:port replaced by where that is here."""
        for (name, inner), outer in self.reached.items():
            text = re.sub(rf"\b{name}:{inner}\b", f"127.0.0.1:{outer}", text)
        return text

    def argv(self, service, command):
        """A command of a service, on this machine: its own addresses, and copies of its files."""
        copies = {}
        for inside, outside in service.files().items():
            if os.path.isfile(outside):
                copies[inside] = os.path.join(self.folder, f"{service.name}-{os.path.basename(outside)}")
                with open(outside) as source, open(copies[inside], "w") as target:
                    target.write(self.localize(source.read()))
        volumes = {inside: os.path.join(self.folder, volume) for inside, volume in service.volumes().items()}
        for copy in copies.values():  # one file may name another, or a volume
            with open(copy) as file:
                text = file.read()
            for inside, outside in copies.items():
                text = text.replace(inside, outside)
            for inside, outside in volumes.items():
                text = text.replace(f'"{inside}"', f'"{outside}"')
            with open(copy, "w") as file:
                file.write(text)
        copies.update(volumes)

        def here(argument):
            for inside, outside in copies.items():
                argument = re.sub(rf"(^|=){re.escape(inside)}$", rf"\g<1>{outside}", argument)
            return re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)",
                          lambda at: f"127.0.0.1:{self.local[service.name, int(at[1])]}", argument)
        return [here(argument) for argument in command]

    def start(self, name):
        service = self.compose.services[name]
        program = "/usr/bin/prometheus" if name == "prometheus" else EMBERD
        self.programs[name] = Program([program] + self.argv(service, service.command()),
                                      os.path.join(self.folder, name + ".log"))

    def start_emberd(self):
        for service in self.compose.emberd():
            self.start(service.name)
        for service in self.compose.emberd():
            self.programs[service.name].wait_for_line("^emberd: ready ")

    def health(self, name):
        """The health check of the file; gives its exit status."""
        service = self.compose.services[name]
        program, *arguments = service.health_command()
        argv = [os.path.join(BINARIES, program)] + self.argv(service, arguments)
        return subprocess.run(argv + ["--timeout", "30"], stdin=subprocess.DEVNULL, capture_output=True).returncode

    def close(self):
        for program in self.programs.values():
            program.kill()
        self.relay.close()


class ComposeProcessTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        generate_stubs(os.path.join(ROOT, "proto"), folder.name)
        embedded = Program([EMBERD, "up", "--shards", "4", "--sparsecores", "2", "--listen", "127.0.0.1:0",
                            "--http", ""], os.path.join(folder.name, "embedded.log"))
        cls.addClassCleanup(embedded.kill)
        ready = embedded.wait_for_line(r"^emberd: ready coordinator=(\S+)")
        cls.undisturbed = Trainer(ready[1])
        cls.addClassCleanup(cls.undisturbed.close)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.use(COMPOSE)

    def use(self, compose):
        self.cluster = LocalCompose(self.folder, compose)
        self.addCleanup(self.cluster.close)

    def train_undisturbed(self, steps):
        """SHA-256 of the tables after that many steps in one process; never fewer than before."""
        self.undisturbed.train(steps - self.undisturbed.next_step)
        return self.undisturbed.sha256()

    def connect(self, credentials=None, timeout=120):
        trainer = Trainer(f"127.0.0.1:{self.cluster.reached['coordinator', 7400]}", timeout, credentials)
        self.addCleanup(trainer.close)
        return trainer

    def assert_fails(self, call, codes):
        """With one of the codes, before the deadline of the call, until the shard is named: another one may be late, too."""
        def is_named():
            with self.assertRaises(grpc.RpcError) as caught:
                call(timeout=120)
            self.assertIn(caught.exception.code(), codes, caught.exception.details())
            return f"shard {LOST}" in caught.exception.details()
        wait_until("the lost shard is named", is_named)

    def find_again(self, trainer):
        """Looks up until the lost shard has read its log and answers."""
        def found():
            try:
                return trainer.lookup(timeout=10)
            except grpc.RpcError as error:
                self.assertIn(error.code(), OUT_OF_REACH)
                return None
        return wait_until("the shard is back", found)

    def test_1_a_cut_network_loses_no_update_and_rows_of_a_killed_shard_come_back(self):
        self.cluster.start_emberd()
        for name in SHARDS + ["coordinator"]:  # a shard reads its log first
            wait_until(f"{name} serves", lambda: self.cluster.health(name) == 0)
        trainer = self.connect()
        trainer.train(5)
        self.assertEqual(trainer.sha256(), self.train_undisturbed(5))

        found = trainer.lookup()
        self.cluster.relay.cut()
        self.assert_fails(lambda timeout: trainer.apply(found, timeout), OUT_OF_REACH)
        self.cluster.relay.rejoin()
        wait_until("the update is accepted", lambda: self.applied(trainer, found))
        trainer.train(4)
        self.assertEqual(trainer.sha256(), self.train_undisturbed(10))

        self.cluster.programs[SHARDS[LOST]].kill()
        self.assert_fails(trainer.lookup, [grpc.StatusCode.UNAVAILABLE])
        self.assertEqual(self.cluster.health(SHARDS[LOST]), 1)
        self.cluster.start(SHARDS[LOST])
        self.find_again(trainer)
        self.assertEqual(trainer.sha256(), self.train_undisturbed(10))
        trainer.train(3)
        self.assertEqual(trainer.sha256(), self.train_undisturbed(13))

        for name in ["coordinator"] + SHARDS:
            self.assertEqual(self.cluster.programs[name].stop(), 0, name)

    def applied(self, trainer, found):
        try:
            return trainer.apply(found, timeout=10)
        except grpc.RpcError as error:
            self.assertIn(error.code(), OUT_OF_REACH)
            return None

    @unittest.skipUnless(os.path.exists("/usr/bin/prometheus"), "Prometheus is not installed")
    def test_2_prometheus_scrapes_all_processes(self):
        self.cluster.start_emberd()
        self.assert_prometheus_scrapes_all()

    def assert_prometheus_scrapes_all(self):
        self.cluster.start("prometheus")
        prometheus = self.cluster.programs["prometheus"]
        url = f"http://127.0.0.1:{self.cluster.local['prometheus', 9090]}/api/v1/query?query=up"
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def all_up():
            self.assertIsNone(prometheus.process.poll(), prometheus.output())
            try:
                with without_proxy.open(url, timeout=10) as response:
                    series = json.load(response)["data"]["result"]
            except OSError:
                return False
            return {one["metric"]["process"] for one in series if one["value"][1] == "1"} == {
                "coordinator-0", "shard-0", "shard-1", "shard-2", "shard-3"}
        wait_until("five targets are up", all_up)
        self.assertEqual(prometheus.stop(), 0)

    def test_3_by_mutual_tls_only_those_with_a_certificate_are_served(self):
        certificates = os.path.join(self.folder, "certificates")
        make_certificates(ROOT, certificates, SHARDS)
        self.use(ComposeFile(*FILES, variables={"EMBERD_CERTS": certificates}))
        self.cluster.start_emberd()
        for service in self.cluster.compose.emberd():
            self.assertNotIn("insecure", self.cluster.programs[service.name].output())
            # A shard listens, and says so, while it still reads its log.
            wait_until(f"{service.name} serves", lambda name=service.name: self.cluster.health(name) == 0)
        trainer = self.connect(credentials_of(certificates))
        trainer.train(3)
        for stranger in (None, credentials_of(certificates, client=False)):
            with self.assertRaises(grpc.RpcError):
                self.connect(stranger, timeout=3)
        argv = [os.path.join(BINARIES, "emberctl"), "--address", f"127.0.0.1:{self.cluster.reached['coordinator', 7400]}",
                *(part for option, name in (("--ca", "ca"), ("--cert", "client"), ("--key", "client-key"))
                  for part in (option, os.path.join(certificates, name + ".pem"))), "status"]

        def all_are_ok():
            """A shard that is too busy to answer the coordinator in a second is not."""
            status = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            return status.returncode == 0 and len(re.findall(r"\bok\b", status.stdout)) == len(SHARDS)
        wait_until("all shards are ok", all_are_ok)
        if os.path.exists("/usr/bin/prometheus"):
            self.assert_prometheus_scrapes_all()


class ComposeFileTest(unittest.TestCase):

    def test_containers_have_the_memory_that_budgets_allow(self):
        with open(COMPOSE.services["coordinator"].files()["/etc/emberd/cluster.textproto"]) as file:
            text = file.read()

        def budget(name):
            return int(re.search(rf"\b{name}: (\d+)", text)[1])
        process = 192 << 20  # an idle process, threads' stacks, gRPC's buffers
        requests = budget("batch_bytes") + budget("in_flight_bytes")
        tables = budget("bytes_per_sparsecore") * budget("sparsecores_per_shard") + budget("copy_bytes")
        for service in COMPOSE.emberd():
            need = process + requests + (tables if service.name in SHARDS else 0)
            self.assertGreaterEqual(service.memory(), need, service.name)

    def test_containers_have_time_to_drain(self):
        with open(COMPOSE.services["coordinator"].files()["/etc/emberd/cluster.textproto"]) as file:
            drain = int(re.search(r"drain_ms: (\d+)", file.read())[1]) / 1000 + 5
        for service in COMPOSE.emberd():
            self.assertGreater(int(service.fields["stop_grace_period"].rstrip("s")), drain, service.name)

    def test_a_shard_may_read_its_log_before_it_counts_as_unhealthy(self):
        """Compose gives up starting what depends on an unhealthy service. All shards read from one disk, which may be slow."""
        with open(COMPOSE.services["coordinator"].files()["/etc/emberd/cluster.textproto"]) as file:
            text = file.read()
        log, core, cores = (int(re.search(rf"\b{name}: (\d+)", text)[1])
                            for name in ("log_bytes", "bytes_per_sparsecore", "sparsecores_per_shard"))
        slow = 10e6  # bytes/s
        for name in SHARDS:
            given = int(COMPOSE.services[name].fields["healthcheck"]["start_period"].rstrip("s"))
            self.assertGreater(given, len(SHARDS) * (log + core * cores) / slow, name)

    def test_no_container_can_more_than_it_needs(self):
        for service in COMPOSE.services.values():
            fields = service.fields
            self.assertTrue(fields["read_only"], service.name)
            self.assertEqual(fields["cap_drop"], ["ALL"], service.name)
            self.assertIn("no-new-privileges:true", fields["security_opt"], service.name)
            self.assertNotEqual(fields["user"].split(":")[0], "0", service.name)
            self.assertEqual(fields["restart"], "unless-stopped", service.name)
            self.assertGreater(service.memory(), 0, service.name)
            for port in fields.get("ports", []):
                self.assertTrue(port.startswith("127.0.0.1:"), f"{service.name}: {port}")

    def test_both_descriptions_are_of_one_cluster(self):
        def statements(name):
            with open(os.path.join(ROOT, "deploy", "compose", name)) as file:
                return re.sub(r"#.*", "", file.read()).split()
        plain, closed = statements("cluster.textproto"), statements("cluster_tls.textproto")
        self.assertEqual(closed[:len(plain)], plain)
        self.assertEqual(closed[len(plain)], "security")

    def test_another_description_is_read_with_tls_too(self):
        for files in (FILES[:1], FILES):
            for service in ComposeFile(*files, variables={"EMBERD_CLUSTER": "/mine"}).emberd():
                self.assertEqual(service.files()["/etc/emberd/cluster.textproto"], "/mine", service.name)

    def test_what_is_mounted_is_there(self):
        for service in COMPOSE.services.values():
            for path in service.files().values():
                self.assertTrue(os.path.exists(path), f"{service.name}: {path}")

    def test_grafana_finds_what_it_is_to_show(self):
        grafana = COMPOSE.services["grafana"]
        mounted = grafana.files()
        for path in glob.glob(os.path.join(mounted["/etc/grafana/provisioning"], "dashboards", "*.yml")):
            with open(path) as file:
                for provider in yaml.safe_load(file)["providers"]:
                    self.assertTrue(glob.glob(os.path.join(mounted[provider["options"]["path"]], "*.json")), path)
        for path in glob.glob(os.path.join(mounted["/etc/grafana/provisioning"], "datasources", "*.yml")):
            with open(path) as file:
                for variable in re.findall(r"\$\{(\w+)\}", file.read()):
                    self.assertIn(variable, grafana.fields["environment"], path)
        self.assertEqual(grafana.fields["environment"]["PROMETHEUS_URL"], "http://prometheus:9090")

    @unittest.skipUnless(compose_commands(), "Compose is not installed")
    def test_compose_reads_the_files_with_every_profile(self):
        for files in (FILES[:1], FILES):
            for profile in ([], ["--profile", "grafana"]):
                named = [part for file in files for part in ("-f", file)]
                for command in compose_commands():
                    subprocess.run([*command, *named, *profile, "config", "-q"], check=True)


class ImageTest(unittest.TestCase):

    def test_containers_of_another_release_are_not_made(self):
        with tempfile.NamedTemporaryFile("w") as release:
            release.write("VERSION_CODENAME=trixie\n")
            release.flush()
            with unittest.mock.patch("engine.RELEASE", release.name):
                self.assertRegex(engine.why_not(), "^the image is made of Debian bookworm, ")

    @unittest.skipUnless(engine.is_of_the_image(), "the image is made of another release")
    @unittest.skipUnless(os.path.realpath(BINARIES) == os.path.realpath(os.path.join(ROOT, "build", "bin")),
                         "no image is made of this build")
    def test_the_image_has_the_libraries_that_the_programs_are_linked_with(self):
        with open(os.path.join(ROOT, "deploy", "image", "runtime_packages.txt")) as file:
            listed = set(re.sub(r"#.*", "", file.read()).split())
        for program in ("emberd", "emberctl"):
            path = os.path.join(BINARIES, program)
            dynamic = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout
            # The loader itself stands there by its path alone.
            where = {os.path.basename(name): found or name for name, found in re.findall(
                r"^\s*(\S+)(?: => (\S+))? \(0x", subprocess.run(
                    ["ldd", path], check=True, capture_output=True, text=True).stdout, re.MULTILINE)}
            for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
                found = os.path.realpath(where[library])
                owners = subprocess.run(["dpkg", "-S", found, found.removeprefix("/usr")], capture_output=True,
                                        text=True).stdout
                packages = {line.split(":")[0] for line in owners.splitlines()}
                self.assertTrue(packages & (listed | {"libc6", "libgcc-s1"}),
                                f"{program} needs {library} of {packages}")

    def test_make_base_explains_itself(self):
        script = os.path.join(ROOT, "deploy", "image", "make_base.sh")
        helped = subprocess.run([script, "--help"], check=True, capture_output=True, text=True)
        self.assertIn("usage: make_base.sh", helped.stdout)
        wrong = subprocess.run([script, "--fast"], capture_output=True, text=True)
        self.assertEqual((wrong.returncode, wrong.stdout), (2, ""))
        self.assertIn("usage: make_base.sh", wrong.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
