"""Builds the image, brings the cluster of deploy/docker-compose.yml up in containers, trains on it from outside, and
takes shards from it. Skips, and says why, where no container engine runs.

What this would catch: an image that lacks a library or a right, a health check that says nothing, a coordinator that
looks for a shard where it was before, updates that are lost or made twice when the network is cut, alerts that nobody
gets, and containers that do not end when they are asked to.

Usage: container_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD
EMBERD_CONTAINER_BUILD=source compiles emberd for the image; default: what stands in build/bin.
"""

import json
import os
import sys
import tempfile
import unittest
import urllib.request

ROOT, BINARIES = sys.argv[1:3]
del sys.argv[1:3]
sys.path[:0] = [os.path.join(ROOT, "tests", "testing"), os.path.dirname(os.path.abspath(__file__))]

import grpc  # noqa: E402
import engine  # noqa: E402
from certificates import credentials_of, make_certificates  # noqa: E402
from engine import docker, remove_container  # noqa: E402
from processes import Program, free_ports, wait_until  # noqa: E402
from stubs import generate_stubs  # noqa: E402
from trainer import Trainer  # noqa: E402

SKIPPED = 77  # CMakeLists.txt
FILES = [os.path.join(ROOT, "deploy", name) for name in ("docker-compose.yml", "docker-compose.tls.yml")]
# And the test's process, whose id is of this namespace: where several share an engine, none removes what is another's.
PROJECTS = f"emberd-test-{os.stat('/proc/self/ns/pid').st_ino}-"
SHARDS = ["shard-0", "shard-1", "shard-2", "shard-3"]
EMBERD = ["coordinator"] + SHARDS
LOST = "shard-2"  # the one that things happen to
OUT_OF_REACH = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
MAX_IMAGE_BYTES = 200_000_000
USER = "10001"


def setUpModule():
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    generate_stubs(os.path.join(ROOT, "proto"), folder.name)
    engine.remove_orphans(PROJECTS)
    engine.make_images(ROOT, os.environ.get("EMBERD_CONTAINER_BUILD") == "source")


class ClusterTest(unittest.TestCase):
    """Brings a cluster up for all tests of a class. Tests run by their numbers."""

    @classmethod
    def bring_up(cls, name, files, variables):
        """Gives the coordinator's address."""
        port, http, cls.prometheus, grafana = free_ports(4)
        cls.project = engine.Project(f"{PROJECTS}{os.getpid()}-{name}", files, {
            "EMBERD_IMAGE": engine.EMBERD, "PROMETHEUS_IMAGE": engine.PROMETHEUS, "EMBERD_PORT": str(port),
            "EMBERD_HTTP_PORT": str(http), "PROMETHEUS_PORT": str(cls.prometheus), "GRAFANA_PORT": str(grafana),
            **variables})
        cls.addClassCleanup(cls.take_down)
        cls.project("up", "-d")
        return f"127.0.0.1:{port}"

    @classmethod
    def take_down(cls):
        left = cls.project.take_down()
        if left:
            raise AssertionError(f"left of {cls.project.name}: {left}")

    def kill_process(self, service):
        """kill -9 from outside of the container: the engine takes it for a crash and starts it again."""
        docker("run", "--rm", "--pid", "host", "--user", "0", "--entrypoint", "sh", engine.EMBERD,
               "-c", f"kill -9 {self.project.inspect(service)['State']['Pid']}")

    def wait_healthy(self, service):
        wait_until(f"{service} is healthy", lambda: self.project.health(service) == "healthy")

    def ask_prometheus(self, path):
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with without_proxy.open(f"http://127.0.0.1:{self.prometheus}/api/v1/{path}", timeout=10) as response:
                return json.load(response)["data"]
        except OSError:
            return None

    def up(self):
        """The processes that Prometheus could scrape."""
        answer = self.ask_prometheus("query?query=up")
        return {one["metric"]["process"] for one in answer["result"] if one["value"][1] == "1"} if answer else set()

    def wait_all_up(self):
        everyone = {"coordinator-0"} | set(SHARDS)
        wait_until("five targets are up", lambda: self.up() == everyone)


class ContainerTest(ClusterTest):

    @classmethod
    def setUpClass(cls):
        cls.trainer = Trainer(cls.bring_up("plain", FILES[:1], {}))
        cls.addClassCleanup(cls.trainer.close)
        log = tempfile.NamedTemporaryFile()
        cls.addClassCleanup(log.close)
        embedded = Program([os.path.join(BINARIES, "emberd"), "up", "--shards", "4", "--sparsecores", "2",
                            "--listen", "127.0.0.1:0", "--http", ""], log.name)
        cls.addClassCleanup(embedded.kill)
        cls.undisturbed = Trainer(embedded.wait_for_line(r"^emberd: ready coordinator=(\S+)")[1])
        cls.addClassCleanup(cls.undisturbed.close)

    def assert_trained_undisturbed(self):
        """All rows are, bit for bit, those of as many steps in one process."""
        self.undisturbed.train(self.trainer.next_step - self.undisturbed.next_step)
        self.assertEqual(self.trainer.sha256(), self.undisturbed.sha256())

    def assert_fails(self, call, codes):
        """With one of the codes, naming the shard, before the deadline of the call."""
        with self.assertRaises(grpc.RpcError) as caught:
            call(timeout=60)
        self.assertIn(caught.exception.code(), codes, caught.exception.details())
        self.assertIn(LOST.replace("-", " "), caught.exception.details())

    def try_for_a_minute(self, call):
        """Until the call gets through, as a trainer does."""
        def answer():
            try:
                return call(timeout=10)
            except grpc.RpcError as error:
                self.assertIn(error.code(), OUT_OF_REACH, error.details())
                return None
        return wait_until("the call gets through", answer)

    def firing(self):
        """(alert, process) of each alert that fires."""
        answer = self.ask_prometheus("alerts")
        return {(alert["labels"]["alertname"], alert["labels"].get("process")) for alert in answer["alerts"]
                if alert["state"] == "firing"} if answer else set()

    def test_1_the_image_is_small_and_its_containers_have_no_rights(self):
        self.assertLess(int(docker("image", "inspect", "--format", "{{.Size}}", engine.EMBERD)), MAX_IMAGE_BYTES)
        for service in EMBERD:
            self.wait_healthy(service)
            container = self.project.container(service)
            lines = docker("exec", container, "cat", "/proc/1/status").splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            self.assertEqual(status["Uid"].split("\t"), [USER] * 4)
            self.assertEqual(int(status["CapEff"], 16), 0)
            self.assertEqual(int(status["NoNewPrivs"]), 1)
            with self.assertRaisesRegex(AssertionError, "[Rr]ead-only"):
                docker("exec", "--user", "0", container, "touch", "/opt/emberd/file")
            self.assertGreater(self.project.inspect(service)["HostConfig"]["Memory"], 0)
        self.assertIn("shard-3:7400", docker("exec", self.project.container("coordinator"), "emberctl", "status"))

    def test_2_prometheus_scrapes_all_processes(self):
        self.wait_all_up()

    def test_3_training_from_outside_gives_the_bits_of_one_process(self):
        self.trainer.train(10)
        self.assert_trained_undisturbed()

    def test_4_a_cut_network_loses_no_update(self):
        shard, network = self.project.container(LOST), f"{self.project.name}_cluster"
        found = self.trainer.lookup()
        docker("network", "disconnect", network, shard)
        self.assert_fails(lambda timeout: self.trainer.apply(found, timeout), OUT_OF_REACH)
        # Somebody else takes the address, so that the shard comes back under another one.
        guest = docker("run", "-d", "--rm", "--label", f"com.docker.compose.project={self.project.name}",
                       "--network", network, "--entrypoint", "sleep", engine.EMBERD, "600")
        docker("network", "connect", "--alias", LOST, network, shard)
        remove_container(guest)
        self.try_for_a_minute(lambda timeout: self.trainer.apply(found, timeout))
        self.trainer.train(5)
        self.assert_trained_undisturbed()

    def assert_nothing_lost(self):
        """All rows come back by themselves, and training goes on from there."""
        self.try_for_a_minute(self.trainer.lookup)
        self.assert_trained_undisturbed()
        self.trainer.train(5)
        self.assert_trained_undisturbed()

    def test_5_a_killed_shard_is_told_of_and_its_rows_come_back(self):
        docker("kill", self.project.container(LOST))
        self.assert_fails(self.trainer.lookup, [grpc.StatusCode.UNAVAILABLE])
        wait_until("the alert fires", lambda: ("ShardDown", LOST) in self.firing())
        docker("start", self.project.container(LOST))
        self.wait_healthy(LOST)
        self.assert_nothing_lost()
        wait_until("the alert is over", lambda: ("ShardDown", LOST) not in self.firing())

    def test_6_the_engine_restarts_a_process_that_dies(self):
        self.kill_process(LOST)
        wait_until("the engine restarts it", lambda: self.project.inspect(LOST)["RestartCount"] > 0)
        self.assert_nothing_lost()

    def test_7_rows_come_back_when_a_container_is_made_anew_with_its_volume(self):
        self.project("rm", "--stop", "--force", LOST)
        self.project("up", "-d", "--no-deps", LOST)
        self.wait_healthy(LOST)
        self.assert_nothing_lost()

    def test_8_asked_to_stop_all_end_in_order(self):
        self.project("stop")
        ended = {service: self.project.inspect(service)["State"] for service in EMBERD + ["prometheus"]}
        for service, state in ended.items():
            self.assertEqual((state["Status"], state["ExitCode"]), ("exited", 0), service)
        self.assertLess(ended["coordinator"]["FinishedAt"], min(ended[shard]["FinishedAt"] for shard in SHARDS))


class OperatorTest(ClusterTest):
    """What an operator sees when a shard is killed under the demo's trainers."""

    def demo(self, *arguments):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        program = Program([os.path.join(BINARIES, "emberd_demo"), "--out", folder.name, "--quick",
                           "--examples", "300000", *arguments], os.path.join(folder.name, "demo.txt"))
        self.addCleanup(program.kill)
        return program

    def log_of_the_lost_shard(self):
        """What the status page says of it; nothing while the shard, or the page, is away."""
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        page = f"http://127.0.0.1:{self.project.variables['EMBERD_HTTP_PORT']}/status.json"
        try:
            with without_proxy.open(page, timeout=5) as response:
                return json.load(response)["stats"]["shards"][SHARDS.index(LOST)].get("log") or {}
        except OSError:
            return {}

    def log_after_recovery(self):
        log = self.log_of_the_lost_shard()
        return {} if log.get("recovering") else log

    def test_the_demo_ends_with_the_tables_of_an_undisturbed_run(self):
        last = r"table_sha256=([0-9a-f]{64})"
        expected = self.demo("--shards", "4", "--sparsecores", "2").wait_for_line(last, 300)[1]

        address = self.bring_up("operator", FILES[:1], {})
        for service in EMBERD:
            self.wait_healthy(service)
        demo = self.demo("--cluster", address)
        demo.wait_for_line(" examples ")  # it trains
        wait_until("the log has updates", lambda: int(self.log_of_the_lost_shard().get("records", 0)) > 50)
        # Where it dies just before it is told to commit, it is told when it is back, and no trainer has to wait. And where a
        # checkpoint has just been saved, or the page shows what it was told before, it shows no bytes.
        for kills in range(1, 4):
            self.kill_process(LOST)
            wait_until("the engine restarts it", lambda: self.project.inspect(LOST)["RestartCount"] >= kills)
            found = wait_until("the page shows the shard again", self.log_after_recovery)
            recovered = int(found["recovered_bytes"])
            if recovered > 0 and "waits: " in demo.output():
                break
        self.assertGreater(recovered, 0, "the page does not show the recovery")

        self.assertEqual(demo.wait_for_line(last, 300)[1], expected)
        for said in ("waits: ", "goes on after ", f"{LOST}:7400) has restarted"):
            self.assertIn(said, demo.output())


class TlsContainerTest(ClusterTest):

    def test_only_those_with_a_certificate_are_served(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        certificates = os.path.join(folder.name, "certificates")
        make_certificates(ROOT, certificates, SHARDS)
        # README.md does so by sudo.
        docker("run", "--rm", "--user", "0", "--volume", f"{certificates}:/certificates", "--entrypoint", "sh",
               engine.EMBERD, "-c", f"chgrp {USER} /certificates/*.pem && chmod g+r /certificates/*.pem")
        address = self.bring_up("tls", FILES, {"EMBERD_CERTS": certificates})
        trainer = Trainer(address, credentials=credentials_of(certificates))
        self.addCleanup(trainer.close)
        trainer.train(3)
        # Only now is it the certificate that they fail for.
        for stranger in (None, credentials_of(certificates, client=False)):
            with self.assertRaises(grpc.RpcError):
                Trainer(address, timeout=3, credentials=stranger)
        for service in EMBERD:
            self.wait_healthy(service)
            self.assertNotIn("insecure", docker("logs", self.project.container(service)))
        self.assertIn("shard-3:7400", docker("exec", self.project.container("coordinator"), "emberctl", "status"))
        self.wait_all_up()


if __name__ == "__main__":
    reason = engine.why_not()
    if reason:
        print(f"SKIP: {reason}; compose_process_test runs the same commands as processes")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
