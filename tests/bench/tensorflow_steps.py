"""The peer of step_bench: TensorFlow's ParameterServerStrategy, with two parameter servers and two workers as the trainers.

usage: tensorflow_steps.py ROWS WIDTH TABLES THREADS (NAME BAG IDS_FILE)...

Arguments and output are as those of torch_steps.py, but that each worker makes steps of half the samples, with Adagrad, and does not wait
for the other one; so the time of a step is that of two of these, one on each worker. Each process has so many threads. Tables lie as a
whole on one parameter server, or half of each on either: the faster way counts. Exits with status 3 where TensorFlow is not
installed.
"""

import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
WORKERS, SERVERS, REPEATS, STEPS = 2, 2, 5, 4

try:
    import numpy
    import tensorflow as tf
except ImportError:
    sys.exit(3)


def cluster_of(ports):
    names = ["chief:0", *(f"worker:{w}" for w in range(WORKERS)), *(f"ps:{s}" for s in range(SERVERS))]
    jobs = {}
    for name, port in zip(names, ports):
        jobs.setdefault(name.partition(":")[0], []).append(f"127.0.0.1:{port}")
    return jobs


def serve(job, index, threads, ports):
    options = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=int(threads))
    tf.distribute.Server(cluster_of(ports.split(",")), job_name=job, task_index=int(index), protocol="grpc", config=options).join()


class Bags:
    """Tables on the parameter servers; each is a list of parts, with a slot for each."""

    def __init__(self, strategy, rows, width, tables, partitioned):
        self.width, self.part_rows = width, rows // tables // (SERVERS if partitioned else 1)
        with strategy.scope():
            self.tables = [[self._part(0.01) for _ in range(SERVERS if partitioned else 1)] for _ in range(tables)]
            self.slots = [[self._part(0.1) for _ in parts] for parts in self.tables]

    def _part(self, value):
        return tf.Variable(lambda: tf.fill((self.part_rows, self.width), value), trainable=False)

    def rows_of(self, parts, ids):
        """And how to find the part of each: ids modulo their number."""
        if len(parts) == 1:
            return tf.gather(parts[0], ids)
        which = ids % len(parts)
        split = tf.dynamic_partition(ids // len(parts), tf.cast(which, tf.int32), len(parts))
        places = tf.dynamic_partition(tf.range(tf.size(ids)), tf.cast(which, tf.int32), len(parts))
        return tf.dynamic_stitch(places, [tf.gather(part, some) for part, some in zip(parts, split)])

    def look_up(self, table, ids):
        """[samples, width] for ids [samples, bag]; and which rows these are, and the place of each id among them."""
        unique, places = tf.unique(tf.reshape(ids, [-1]))  # a row goes over the network once
        rows = tf.gather(self.rows_of(self.tables[table], unique), places)
        return tf.reduce_sum(tf.reshape(rows, [*ids.shape, self.width]), axis=1), unique, places

    def update(self, table, unique, gradients):
        parts = self.tables[table]
        which = tf.cast(unique % len(parts), tf.int32)
        for part, slot, some, values in zip(parts, self.slots[table], tf.dynamic_partition(unique // len(parts), which, len(parts)),
                                            tf.dynamic_partition(gradients, which, len(parts))):
            with tf.device(part.device):
                tf.raw_ops.ResourceSparseApplyAdagradV2(var=part.handle, accum=slot.handle, lr=0.01, epsilon=1e-10, grad=values, indices=some)

    def forward(self, batch):
        """batch: [tables, samples, bag]."""
        return [self.look_up(table, batch[table])[0] for table in range(len(self.tables))]

    def step(self, batch):
        _, samples, bag = batch.shape
        given = tf.fill((samples, self.width), 1e-3)
        for table in range(len(self.tables)):
            found, unique, places = self.look_up(table, batch[table])
            with tf.control_dependencies([found]):
                self.update(table, unique, tf.math.unsorted_segment_sum(tf.repeat(given, bag, axis=0), places, tf.size(unique)))


def halves(path, rows, tables, bag):
    """Ids of each half of the samples: [halves, tables, samples, bag]."""
    ids = numpy.fromfile(path, numpy.int64).reshape(tables, WORKERS, -1, bag) - rows * numpy.arange(tables).reshape(-1, 1, 1, 1)
    return numpy.ascontiguousarray(ids.swapaxes(0, 1))


def seconds_of(coordinator, bags, batches):
    """(step, forward)"""
    data = iter(coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.from_tensor_slices(batches).repeat()))

    def next_of(given):
        return tf.ensure_shape(next(given), batches.shape[1:])

    @tf.function
    def step(given):
        bags.step(next_of(given))

    @tf.function
    def forward(given):  # some of it, for what nobody takes is not computed
        return tf.add_n([tf.reduce_sum(one[:1]) for one in bags.forward(next_of(given))])

    return median_seconds(coordinator, step, data), median_seconds(coordinator, forward, data)


def median_seconds(coordinator, work, data):
    """Of a step of all samples."""
    def some():
        start = time.perf_counter()
        for _ in range(STEPS * WORKERS):
            coordinator.schedule(work, args=(data,))
        coordinator.join()
        return (time.perf_counter() - start) / STEPS

    some()
    return statistics.median(some() for _ in range(REPEATS))


def measure(ports, rows, width, tables, batches):
    """(step, forward) of each batch, the faster way."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster_of(ports)), rpc_layer="grpc", task_type="chief", task_id=0))
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    found = [[] for _ in batches]
    for partitioned in (False, True):
        bags = Bags(strategy, rows, width, tables, partitioned)
        for place, (bag, path) in enumerate(batches):
            found[place].append(seconds_of(coordinator, bags, halves(path, rows // tables, tables, bag)))
        del bags  # before the next ones
    return [min(ways) for ways in found]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def one_way(rows, width, tables, threads, *batches):
    """In a process of its own, for TensorFlow has one cluster in its life."""
    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    ports = free_ports(1 + WORKERS + SERVERS)
    servers = [subprocess.Popen([sys.executable, "-B", __file__, "--serve", job, str(index), threads, ",".join(ports)])
               for job, count in (("worker", WORKERS), ("ps", SERVERS)) for index in range(count)]
    try:
        names = batches[::3]
        for name, (step, forward) in zip(names, measure(ports, int(rows), int(width), int(tables), [(int(bag), path) for bag, path in zip(batches[1::3], batches[2::3])])):
            print(name, forward, step, threads, tables, flush=True)
    finally:
        for one in servers:
            one.kill()
            one.wait()
    os._exit(0)  # the chief waits for its servers otherwise


def main():
    rows, width, tables, threads, *batches = sys.argv[1:]
    found = {}
    for table_count, thread_count in itertools.product(tables.split(","), threads.split(",")):
        with tempfile.TemporaryDirectory() as folder:  # for what TensorFlow generates, and leaves when it is killed
            done = subprocess.run([sys.executable, "-B", __file__, "--one", rows, width, table_count, thread_count, *batches],
                                  stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "TMPDIR": folder})
        for line in done.stdout.splitlines():
            name, forward, step, *way = line.split()
            found.setdefault(name, []).append((float(step), forward, *way))
    for name, ways in found.items():
        step, forward, *way = min(ways)
        print(name, forward, step, *way, flush=True)


if __name__ == "__main__":
    {"--serve": serve, "--one": one_way}.get(sys.argv[1], lambda *_: main())(*sys.argv[2:])
