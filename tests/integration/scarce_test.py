"""What there is little of: descriptors, memory, threads, and a clock that stays right; by a coordinator and a shard as
processes, and callers who ask for much or take nothing.

What this would catch: a port that takes no connection any more once descriptors were out; strangers who keep connections
for nothing; an answer that takes several times the memory that budgets allow, or is made before it is refused; streams that
nobody reads and that keep others from being served; a step that is lost because somebody set the clock.

Usage: scarce_test.py PATH_OF_EMBERD PATH_OF_EMBERD_WITH_A_CLOCK_TO_SET PATH_OF_REPOSITORY
"""

import array
import importlib
import os
import re
import socket
import struct
import sys
import tempfile
import time
import unittest
import urllib.request

import grpc

EMBERD, CLOCKED, REPOSITORY = sys.argv[1:4]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "testing"))

import processes  # noqa: E402
from stubs import generate_stubs  # noqa: E402

ROWS = 400_000
MODEL = f"""name: "m"
  tables {{ name: "t" vocabulary_size: {ROWS} embedding_dim: 1 optimizer {{ sgd {{}} }} }}
  tables {{ name: "wide" vocabulary_size: 100000 embedding_dim: 64 optimizer {{ sgd {{}} }} }}
  features {{ name: "f" table: "t" batch_size: 4 }}
  features {{ name: "w" table: "wide" batch_size: 4 }}"""
MIB = 1 << 20
BUDGET = 256 * MIB
SILENCE_MS = 3000
# Windows that do not grow: what nobody reads stays with the server.
CALLS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]


class Cluster:
    """One shard and one coordinator. `prefix`: what starts each of them."""

    def __init__(self, test, config="", program=EMBERD, prefix=()):
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.folder = folder.name
        shard, shard_http, address, http = (f"127.0.0.1:{port}" for port in processes.free_ports(4))
        self.address, self.http, self.shard_address, self.shard_http = address, http, shard, shard_http
        path = os.path.join(self.folder, "cluster.textproto")
        with open(path, "w") as file:
            file.write(f'shards {{ address: "{shard}" http_address: "{shard_http}" }} '
                       f'coordinators {{ address: "{address}" http_address: "{http}" }} {config}')
        self.programs = [processes.Program([*prefix, program, role, "--config", path], os.path.join(self.folder, role + ".log"))
                         for role in ("shard", "coordinator")]
        self.shard, self.coordinator = self.programs
        for one in self.programs:
            test.addCleanup(one.stop)
        for one in self.programs:
            one.wait_for_line("emberd: ready ")
        self.channel = grpc.insecure_channel(address, options=CALLS)
        test.addCleanup(self.channel.close)
        self.embedding = module("embedding_service_pb2_grpc").EmbeddingServiceStub(self.channel)
        self.admin = module("admin_service_pb2_grpc").AdminServiceStub(self.channel)

    def declare(self):
        request = module("embedding_service_pb2").DeclareModelRequest()
        importlib.import_module("google.protobuf.text_format").Parse(MODEL, request.config)
        end = time.monotonic() + 120
        while True:
            try:
                return self.embedding.DeclareModel(request, timeout=120).model_id
            except grpc.RpcError as error:
                # The coordinator may have been there before the shard.
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise
                time.sleep(0.05)


def module(name):
    return importlib.import_module("emberd.v1." + name)


def peak_from_now(program):
    """Gives a function that says by how many bytes the process has grown at most since now."""
    def read(field):
        with open(f"/proc/{program.process.pid}/status") as file:
            return int(re.search(field + r":\s+(\d+) kB", file.read()).group(1)) * 1024
    with open(f"/proc/{program.process.pid}/clear_refs", "w") as file:
        file.write("5")
    before = read("VmRSS")
    return lambda: read("VmHWM") - before


def http_get(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=120) as answer:
        return answer.read().decode()


class ScarceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        generate_stubs(os.path.join(REPOSITORY, "proto"), folder.name)

    def connect(self, address, count):
        host, port = address.split(":")
        sockets = [socket.create_connection((host, int(port)), timeout=120) for _ in range(count)]
        for one in sockets:
            self.addCleanup(one.close)
        return sockets

    def serves(self, address):
        """Whether a new connection is served."""
        with grpc.insecure_channel(address, options=CALLS) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=5)
            except grpc.FutureTimeoutError:
                return False
            return True

    def test_connections_are_taken_again_when_there_are_descriptors(self):
        cluster = Cluster(self, prefix=("prlimit", "--nofile=64:64"))
        for program, address, http in ((cluster.shard, cluster.shard_address, cluster.shard_http),
                                       (cluster.coordinator, cluster.address, cluster.http)):
            strangers = self.connect(address, 80)
            program.wait_for_line("connections wait: no file descriptors are left")
            # The last descriptors are for the process's own files.
            self.assertIn("serving", http_get(http, "/healthz"))
            self.assertLess(len(os.listdir(f"/proc/{program.process.pid}/fd")), 62)
            for stranger in strangers:
                stranger.close()
            processes.wait_until("a new connection", lambda at=address: self.serves(at))
            self.assertEqual(program.output().count("connections wait: "), 1, "one line a minute")
            for stranger in self.connect(http, 80):
                stranger.close()
            processes.wait_until("an answer", lambda at=http: "serving" in http_get(at, "/healthz"))
        self.assertTrue(cluster.declare())

    def test_strangers_end(self):
        cluster = Cluster(self)
        silent, half = self.connect(cluster.address, 2)
        half.sendall(b"PRI * HTTP/2.0\r\n")
        for stranger in (silent, half):
            stranger.settimeout(60)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass

    def read_rows(self, cluster, model, ids):
        request = module("embedding_service_pb2").ReadRowsRequest(model_id=model, table="t")
        request.ids.dtype = module("types_pb2").INT64
        request.ids.shape.append(len(ids))
        request.ids.data = ids.tobytes()
        answer = cluster.embedding.ReadRows(request, timeout=120)
        return array.array("f", answer.values.data)

    def test_rows_that_are_read_take_what_budgets_allow(self):
        cluster = Cluster(self, config=f"budgets {{ in_flight_bytes: {BUDGET} }}")
        model = cluster.declare()
        few = array.array("q", range(1000))
        expected = self.read_rows(cluster, model, few)
        peaks = [peak_from_now(program) for program in cluster.programs]
        many = few * 5898  # 45 MiB
        self.assertEqual(self.read_rows(cluster, model, many), expected * 5898)
        for peak in peaks:
            self.assertLess(peak(), BUDGET)
        with self.assertRaises(grpc.RpcError) as refused:
            self.read_rows(cluster, model, many * 3)
        self.assertEqual(refused.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, refused.exception.details())
        self.assertRegex(refused.exception.details(), r"needs \d+ bytes; \d+ of budgets.in_flight_bytes = \d+ are free")
        for peak in peaks:
            self.assertLess(peak(), BUDGET + len(many) * 3 * 8)
        processes.wait_until("all is given back", lambda: re.search(
            r"^emberd_in_flight_bytes\S* 0$", http_get(cluster.http, "/metrics"), re.MULTILINE))

    def test_what_programs_would_make_is_known_before(self):
        cluster = Cluster(self)
        api = module("program_service_pb2")
        programs = module("program_service_pb2_grpc").ProgramServiceStub(cluster.channel)
        spec = api.ProgramSpec(kind=api.ProgramSpec.ELEMENTWISE, inputs=[api.ProgramInput(feature="x", dynamic=True)])
        for _ in range(64):
            spec.outputs.add(operation=api.ElementwiseOutput.COPY)
        program = programs.Compile(api.CompileRequest(spec=spec), timeout=120).program_handle

        def run(length, floats):
            tensor = module("types_pb2").Tensor(dtype=module("types_pb2").FLOAT32, shape=[floats],
                                                data=struct.pack(f"{floats}f", *([1.0] * floats)))
            chain = api.ExecuteChainedRequest()
            chain.ops.add(literal=api.Literal(tensors=[api.NamedTensor(name="x", tensor=tensor)]))
            for i in range(length):
                chain.ops.add(program_handle=program, inputs=[api.ChainedInput(op_index=i)])
            chain.ops[length].outputs.add(output_index=1)
            chain.config.return_values = True
            return programs.ExecuteChained(chain, timeout=120)

        self.assertEqual(len(run(2, 16).results[0].values), 1)
        for length, floats, code in ((4, 16, grpc.StatusCode.INVALID_ARGUMENT), (7, 16, grpc.StatusCode.INVALID_ARGUMENT),
                                     (2, 256 << 10, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            peak = peak_from_now(cluster.coordinator)
            with self.assertRaises(grpc.RpcError) as refused:
                run(length, floats)
            self.assertEqual(refused.exception.code(), code, refused.exception.details())
            # The first operation of the last chain, 64 MiB, is made.
            self.assertLess(peak(), 150 * MIB, refused.exception.details())

    def test_streams_that_nobody_reads_keep_nobody_from_anything(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        cluster = Cluster(self, config=f'storage {{ directory: "{folder.name}" durability: MEMORY }} '
                                       f"timeouts {{ silent_stream_ms: {SILENCE_MS} }}")
        cluster.declare()
        api = module("checkpoint_service_pb2")
        stub = module("checkpoint_service_pb2_grpc").CheckpointServiceStub(cluster.channel)
        for _ in stub.SaveCheckpoint(api.SaveCheckpointRequest(model="m", name="one"), timeout=120):
            pass
        unread = [stub.ExportCheckpoint(api.ExportCheckpointRequest(model="m", name="one", table="wide")) for _ in range(40)]
        listed = stub.ListCheckpoints(api.ListCheckpointsRequest(model="m"), timeout=120)
        self.assertEqual([one.name for one in listed.checkpoints], ["one"])
        for _ in stub.VerifyCheckpoint(api.VerifyCheckpointRequest(model="m", name="one"), timeout=120):
            pass

        def read():
            """None where this process itself stood still for as long as one that does not read."""
            try:
                parts = stub.ExportCheckpoint(api.ExportCheckpointRequest(model="m", name="one", table="wide"), timeout=120)
                return sum(len(part.values) for part in parts)
            except grpc.RpcError as error:
                self.assertEqual(error.code(), grpc.StatusCode.CANCELLED, error.details())
        self.assertEqual(processes.wait_until("it is read", read), 100_000 * 64 * 4)
        processes.wait_until("they end, for nobody reads them", lambda: re.search(
            r'^emberd_rpcs_total\{code="CANCELLED",method="CheckpointService/ExportCheckpoint"\S* 4\d$',
            http_get(cluster.http, "/metrics"), re.MULTILINE))
        for stream in unread:
            stream.cancel()

    def test_no_step_is_lost_when_somebody_sets_the_clock(self):
        with tempfile.NamedTemporaryFile() as ahead:
            ahead.write(bytes(8))
            ahead.flush()
            os.environ["EMBERD_CLOCK"] = ahead.name
            self.addCleanup(os.environ.pop, "EMBERD_CLOCK")
            cluster = Cluster(self, config="timeouts { batch_ttl_ms: 300000 }", program=CLOCKED)

            def set_clock(seconds):
                with open(ahead.name, "r+b") as file:
                    file.write(struct.pack("q", seconds * 10 ** 9))
                processes.wait_until("the clock is set", lambda: abs(self.date(cluster) - time.time() - seconds) < 30)

            model = cluster.declare()
            api, types = module("embedding_service_pb2"), module("types_pb2")
            lookup = api.LookupRequest(model_id=model)
            ids = types.Tensor(dtype=types.INT64, shape=[4, 1], data=struct.pack("4q", 1, 2, 3, 4))
            for feature in ("f", "w"):
                lookup.features.add(feature=feature).dense.ids.CopyFrom(ids)
            for sequence, ahead_by in enumerate((600, -600), start=1):
                found = cluster.embedding.Lookup(lookup, timeout=120).batch_handle
                set_clock(ahead_by)
                # What has expired is swept once a second, and then counted.
                cluster.embedding.Lookup(lookup, timeout=120)
                for http in (cluster.http, cluster.shard_http):
                    processes.wait_until("all batches are kept", lambda at=http: re.search(
                        f"^emberd_batches\\S* {sequence + 1}$", http_get(at, "/metrics"), re.MULTILINE))
                update = api.ApplyGradientsRequest(model_id=model, batch_handle=found)
                update.mutation.client_id, update.mutation.sequence = "c", sequence
                cluster.embedding.ApplyGradients(update, timeout=120)

    @staticmethod
    def date(cluster):
        return cluster.admin.GetStats(module("admin_service_pb2").GetStatsRequest(), timeout=120).time_ms / 1000


if __name__ == "__main__":
    unittest.main(verbosity=2)
