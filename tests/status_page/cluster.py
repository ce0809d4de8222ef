"""A coordinator and its shards as processes, each of which can be killed and started again where it was."""

import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "testing"))

from processes import WITH_PARENT, free_ports  # noqa: E402


class Member:
    """One process."""

    def __init__(self, folder, name, command):
        self.folder = folder
        self.name = name
        self.command = command
        self.grpc, self.http = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.process = None

    def start(self):
        """Returns when it serves, each time on the same ports."""
        with open(os.path.join(self.folder, f"{self.name}.log"), "a") as log:
            self.process = subprocess.Popen(
                [*WITH_PARENT, *self.command, "--address", self.grpc, "--http-address", self.http],
                stdout=subprocess.PIPE, stderr=log, text=True)
        for line in self.process.stdout:
            if line.startswith("emberd: ready "):
                return
        with open(os.path.join(self.folder, f"{self.name}.log")) as log:
            raise RuntimeError(f"{self.name} did not get ready:\n{log.read()}")

    def end(self, signal_number):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal_number)
        if self.process:
            self.process.wait(120)
            self.process.stdout.close()
            self.process = None

    def kill(self):
        self.end(signal.SIGKILL)


class Cluster:
    """`tokens`: asks everybody for one; `reader_token` is one that may look. `tls`: text of security.tls. `eviction`: text of
    the field; `sparsecore_bytes`: of each one."""

    def __init__(self, emberd, folder, shards=4, tokens=False, coordinators=1, tls="", eviction="", sparsecore_bytes=1 << 25):
        self.memory = f"eviction {{ {eviction} }}" if eviction else ""
        self.sparsecore_bytes = sparsecore_bytes
        self.security = f"security {{ tls {{ {tls} }} }}" if tls else ""
        if tokens:
            self.make_tokens(emberd, folder)
        self.config = os.path.join(folder, "cluster.textproto")
        self.shards = [Member(folder, f"shard-{i}", self.command(emberd, "shard", i)) for i in range(shards)]
        self.coordinators = [Member(folder, f"coordinator-{i}", self.command(emberd, "coordinator", i))
                             for i in range(coordinators)]
        self.coordinator = self.coordinators[0]
        self.write_config()
        try:
            for member in (*self.shards, *self.coordinators):
                member.start()
        except BaseException:
            self.stop()
            raise

    def make_tokens(self, emberd, folder):
        table, cluster_token = os.path.join(folder, "tokens.textproto"), os.path.join(folder, "cluster.token")
        made = {role: subprocess.run([emberd, "token", role, role, "--file", table], check=True, text=True,
                                     stdout=subprocess.PIPE).stdout for role in ("cluster", "reader")}
        self.reader_token = made["reader"].strip()
        with open(cluster_token, "w") as file:
            file.write(made["cluster"])
        self.security = f'security {{ tokens_file: "{table}" cluster_token_file: "{cluster_token}" }}'

    def command(self, emberd, role, index):
        return [emberd, role, "--config", self.config, "--index", str(index), "--threads", "2"]

    def write_config(self):
        lines = [f'shards {{ address: "{shard.grpc}" http_address: "{shard.http}" }}' for shard in self.shards]
        lines += [f'coordinators {{ address: "{one.grpc}" http_address: "{one.http}" }}' for one in self.coordinators]
        lines += ["sparsecores_per_shard: 4",
                  f"budgets {{ bytes_per_sparsecore: {self.sparsecore_bytes} batch_bytes: 67108864 in_flight_bytes: 67108864 }}",
                  "timeouts { shard_call_ms: 20000 }", self.security, self.memory]
        with open(self.config, "w") as file:
            file.write("\n".join(lines) + "\n")

    @property
    def url(self):
        return f"http://{self.coordinator.http}/"

    def stop(self):
        for member in (*self.coordinators, *self.shards):
            member.end(signal.SIGTERM)
