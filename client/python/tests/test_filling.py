"""Tables that a function of the client fills: nobody sees them half filled, and whoever fills them needs little memory.

What this would catch: a lookup that gives rows of zeros before the function has given them; rows of two clients in one table, and a client that overwrites
trained rows when it wakes up; a fill that goes on after a shard has lost what it was given; and a table that is at the client as a whole.
"""

import os
import signal
import subprocess
import sys
import time
import types
import unittest.mock

from cluster import ClusterTest, counting_model, emberd, has_torch, main

from emberd import _filling, _loading

import numpy as np

ROWS, DIM = 64, 4
NOT_YET = r"model '{}' does not have all its first rows yet: the client that declared it is assigning them \({} assignments so far\)"


def rows_from(offset, shape, factor=1):
    return factor * (offset * DIM + np.arange(shape[0] * shape[1], dtype=np.float64)).reshape(shape)


ALL = rows_from(0, (ROWS, DIM)).astype(np.float32)


def patient(call):
    """On a busy machine a short deadline may end before there is an answer, or leave too little time for the call to begin."""
    while True:
        try:
            return call()
        except (emberd.DeadlineExceeded, emberd.ResourceExhausted):
            pass


class Case(ClusterTest):
    def setUp(self):
        patch = unittest.mock.patch.object(_loading, "STRETCH_BYTES", 10 * 4 * DIM)  # 10 rows
        patch.start()
        self.addCleanup(patch.stop)
        self.name = self.id().split(".")[-1]

    def config(self, initializer, **options):
        return counting_model(self.name, initializer=initializer, **options)

    def other(self):
        """A client that does not wait for long."""
        client = self.cluster.connect(deadline=0.2)
        self.addCleanup(client.close)
        return client

    def check_refused(self, call, said):
        with self.assertRaisesRegex(emberd.Unavailable, said):
            patient(call)


class FillingTest(Case):
    def test_nobody_sees_a_table_before_it_is_filled(self):
        other, calls = self.other(), []
        before = self.client.declare(self.config(rows_from, tables=("t", "u"), optimizer=emberd.Adagrad()))
        known = patient(lambda: other.model(self.name))  # what a client knows of rows that are there no more
        self.client.drop_model(self.name)

        def rows(offset, shape):
            calls.append((offset, shape))
            if len(calls) == 4:
                for call in (lambda: other.model(self.name), lambda: known.lookup({"t": [1], "u": [1]}), lambda: known.read_rows("t", [1]), lambda: known.table("t"),
                             lambda: known.assign_rows("t", [1], [[1] * DIM]), lambda: known.train("run")):
                    self.check_refused(call, NOT_YET.format(self.name, 3))
                self.assertNotIn(self.name, [one.name for one in self.client.models()])
            return rows_from(offset, shape)

        model = self.client.declare(self.config(rows, tables=("t", "u"), optimizer=emberd.Adagrad()))
        stretches = [(begin, (min(10, ROWS - begin), DIM)) for begin in range(0, ROWS, 10)]
        self.assertEqual((calls, model.created, before.created), (stretches * 2, True, True))
        for table in "tu":
            np.testing.assert_array_equal(self.client.model(self.name).table(table), ALL)
        np.testing.assert_array_equal(model.table("u", slot="accumulator"), np.full((ROWS, DIM), 0.1, np.float32))
        again = self.client.declare(self.config(rows, tables=("t", "u"), optimizer=emberd.Adagrad()))
        self.assertEqual((again.created, len(calls)), (False, len(stretches) * 2))
        model.lookup({"t": [1], "u": [1]}, train=True).apply({"t": np.ones((1, DIM), np.float32)})

    def test_arrays_and_tables_of_16_bits(self):
        given = [ALL, ALL.astype(np.float64), ALL.tolist(), np.asfortranarray(ALL)]
        if has_torch():
            import torch
            given += [torch.from_numpy(ALL), torch.nn.Parameter(torch.from_numpy(ALL.copy()))]
        for number, one in enumerate(given):
            self.name = f"array_{number}"
            model = self.client.declare(self.config(one, storage_dtype="bfloat16"))
            np.testing.assert_array_equal(model.table("t"), ALL)
        # Random numbers of a counter, at any place of the table.
        drawn = lambda offset, shape: np.random.Generator(np.random.Philox(7).advance(offset * DIM // 4)).random(shape)  # noqa: E731
        self.name = "drawn"
        np.testing.assert_array_equal(self.client.declare(self.config(drawn)).table("t"), drawn(0, (ROWS, DIM)).astype(np.float32))
        self.assertEqual(self.config(rows_from).tables[0].initializer, rows_from)
        self.assertIn('"initializer": {"assigned": {}}', self.config(rows_from).to_json())

    def test_what_is_refused(self):
        for rows, error, said in ((ALL[:5], ValueError, r"table 't': initializer: the shape \[5, 4\] is not allowed; it must be \[vocabulary_size, embedding_dim\], "
                                   r"\[64, 4\], or that of a function of \(offset, shape\)"),
                                  (lambda offset, shape: ALL, ValueError, r"the shape \[64, 4\] is not allowed; it must be \[10, 4\], for it was called with \(0, \(10, 4\)\)"),
                                  (lambda offset, shape: rows_from(offset, shape, np.nan), ValueError, r"table 't': first rows from row 0 on: values\[0, 0\] is nan; values must be finite"),
                                  (lambda offset, shape: None, TypeError, "table 't': initializer: object is not allowed"),
                                  (lambda shape: ALL, TypeError, r"table 't': initializer: .*positional argument.*; it was called with \(0, \(10, 4\)\), for it must be a function of \(offset"),
                                  (np.zeros, TypeError, "table 't': initializer: Cannot interpret '10' as a data type; it was called with"),
                                  (lambda tensor, gain: tensor.dim(), TypeError, "table 't': initializer: 'int' object has no attribute 'dim'; it was called"), (emberd.Zeros, TypeError, "TableConfig.initializer")):
            with self.assertRaisesRegex(error, said):
                self.client.declare(self.config(rows))
        with self.assertRaisesRegex(ValueError, "has a table whose initializer is `assigned`; give a ModelConfig with a function"):
            self.client.declare(self.config(rows_from).to_json())
        resource = emberd.ModelConfig("shared", [emberd.TableConfig("t", 8, 4, initializer=rows_from, resource=emberd.TableResource("r"))],
                                      [emberd.FeatureConfig("t", "t")], enable_variable_deduplication=True)
        with self.assertRaisesRegex(ValueError, r"incompatible: tables\[0\].initializer assigned and enable_variable_deduplication"):
            self.client.declare(resource)
        self.client.declare(self.config(rows_from))
        with self.assertRaisesRegex(emberd.FailedPrecondition, "got its first rows from a client, so that it cannot be reset: drop it"):
            self.client.reset_model(self.name)
        with self.assertRaisesRegex(emberd.AlreadyExists, r"tables\[0\]\.initializer\.zeros: "):
            self.client.declare(self.config(emberd.Zeros()))

    def test_another_client_begins_anew_where_one_has_died(self):
        def dies(offset, shape):
            if offset > 20:
                raise ZeroDivisionError
            return rows_from(offset, shape, -1)

        with self.assertRaises(ZeroDivisionError):
            self.client.declare(self.config(dies))
        self.check_refused(lambda: self.other().model(self.name), NOT_YET.format(self.name, 3) + ".*if that client has died, declare the model again")
        np.testing.assert_array_equal(self.client.declare(self.config(rows_from)).table("t"), ALL)
        self.client.drop_model(self.name)
        with self.assertRaises(ZeroDivisionError):
            self.client.declare(self.config(dies))
        np.testing.assert_array_equal(self.client.declare(self.config(emberd.Zeros())).table("t"), 0 * ALL)  # another model of its name

    def test_the_last_of_two_clients_fills_and_the_first_waits(self):
        other, first = self.cluster.connect(), []
        self.addCleanup(other.close)

        def begun(offset, shape):
            first.append(offset)
            if offset == 20:
                model = other.declare(self.config(rows_from))
                self.assertTrue(model.created)
                model.assign_rows("t", [30, 40], [[7] * DIM] * 2)  # as training does
            return rows_from(offset, shape, -1)

        model = self.client.declare(self.config(begun))
        self.assertEqual((first, model.created), ([0, 10, 20], False))
        expected = ALL.copy()
        expected[[30, 40]] = 7
        np.testing.assert_array_equal(model.table("t"), expected)

    def test_a_client_that_waits_gives_up_where_nothing_goes_on(self):
        begun = self.client._model(self.client._declare(self.config(rows_from).to_json(), None))
        other, said = self.other(), []

        def model(name):
            try:
                return patient(lambda: other.model(name))
            except emberd.Unavailable as error:
                said.append(str(error))
                if len(said) < 3:  # rows go on coming
                    begun.assign_rows("t", [1], np.ones((1, DIM)))
                raise

        with self.assertRaisesRegex(emberd.Unavailable, NOT_YET.format(self.name, 2)):
            _filling._await(types.SimpleNamespace(model=model), self.name)
        self.assertEqual(len(said), 4)

    def test_who_fills_is_known_by_its_declaration(self):
        text = self.config(rows_from).to_json()
        first, second = (self.client._model(self.client._declare(text, None)) for _ in range(2))
        values = np.ones((1, DIM), np.float32)
        with self.assertRaisesRegex(emberd.Aborted, "another client has declared the model since"):
            first.assign_rows("t", [1], values)
        with self.assertRaisesRegex(emberd.OutOfRange, "ids.0. is 64"):
            second.assign_rows("t", [64], values)
        second.assign_rows("t", [1], values)
        parts = [lambda: iter([("t", "", np.arange(2), 2 * ALL[:2])])]
        model = _filling.fill(self.client, text, second, parts)
        self.assertFalse(model._unfilled)
        np.testing.assert_array_equal(model.read_rows("t", [0, 1]), 2 * ALL[:2])
        with self.assertRaisesRegex(emberd.FailedPrecondition, "has all its first rows, and is served"):
            second.assign_rows("t", [1], values)
        with self.assertRaisesRegex(emberd.Aborted, "another client has declared"):
            first.assign_rows("t", [1], values)
        self.client.drop_model(self.name)
        with self.assertRaisesRegex(emberd.DataLoss, "shard 0 has lost the rows"):
            second.assign_rows("t", [1], values)


def shard_of(cluster, index):
    """The process of a shard."""
    with open(f"/proc/{cluster.pid}/task/{cluster.pid}/children") as file:
        for pid in file.read().split():
            with open(f"/proc/{pid}/cmdline", "rb") as line:
                words = line.read().split(b"\0")
            if b"shard" in words and any(one in (b"--index=%d" % index, b"%d" % index) for one in words):
                return int(pid)
    raise AssertionError(f"shard {index} does not run")


class RestartTest(Case):
    """A shard is killed while its table is filled. With a log it goes on; without, all rows are given anew."""

    @classmethod
    def setUpClass(cls):
        pass

    def fill(self, cluster):
        calls = []

        def rows(offset, shape):
            calls.append(offset)
            if calls.count(40) == 1 and offset == 40:
                os.kill(shard_of(cluster, 1), signal.SIGKILL)
            return rows_from(offset, shape)

        assign = emberd.Model.assign_rows

        def patiently(*arguments, **options):
            """A call is tried again for less than two seconds, and on a busy machine a shard is away for longer."""
            end = time.monotonic() + 240
            while True:
                try:
                    return assign(*arguments, **options)
                except emberd.Unavailable:
                    if time.monotonic() > end:
                        raise

        with cluster, cluster.connect(deadline=60) as client:
            with unittest.mock.patch.object(emberd.Model, "assign_rows", patiently):
                model = client.declare(self.config(rows))
            np.testing.assert_array_equal(model.table("t"), ALL)
            os.kill(shard_of(cluster, 0), signal.SIGKILL)
            end, found = time.monotonic() + 240, None
            while found is None and time.monotonic() < end:
                try:
                    found = client.model(self.name).table("t")
                except (emberd.DataLoss, emberd.Unavailable) as error:
                    if isinstance(error, emberd.DataLoss):
                        break
        return calls, found

    def test_with_a_log_it_goes_on(self):
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            calls, found = self.fill(emberd.local(processes=True, data=folder, durability="log"))
        self.assertEqual(calls, list(range(0, ROWS, 10)))
        np.testing.assert_array_equal(found, ALL)

    def test_without_a_log_it_begins_anew(self):
        calls, found = self.fill(emberd.local(processes=True))
        self.assertEqual(calls, [*range(0, 50, 10), *range(0, ROWS, 10)])
        self.assertIsNone(found)


SCRIPT = """
import resource, sys
import numpy as np
import emberd

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10

address, mib, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = mib << 12
client = emberd.connect(address)
config = lambda name, rows: emberd.ModelConfig(name, [emberd.TableConfig("t", rows, 64, initializer=lambda offset, shape: np.broadcast_to(
    np.arange(offset, offset + shape[0], dtype=np.float32)[:, None], shape))], [emberd.FeatureConfig("t", "t")], optimizer=emberd.NoOptimizer())
client.declare(config("small", 64))
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
before = peak()
model = client.declare(config("large", rows))
grown = peak() - before
ids = np.arange(0, rows, rows // 61)
assert (model.read_rows("t", ids) == ids[:, None]).all()
print(grown)
"""


class MemoryTest(ClusterTest):
    """EMBERD_FILL_MIB=2048 EMBERD_LIMIT_MIB=512 is the long run: the size of the table, and of the address space of who fills it."""

    def test_who_fills_a_table_needs_little_of_its_memory(self):
        mib, limit = int(os.environ.get("EMBERD_FILL_MIB", "256")), os.environ.get("EMBERD_LIMIT_MIB", "0")
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-B", "-c", SCRIPT, self.cluster.address, str(mib), limit], capture_output=True, text=True,
                              # Else OpenBLAS and malloc reserve more addresses than that, for each thread, and do not use them.
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        grown = int(done.stdout) / 2**20
        print(f"{mib} MiB: {grown:.1f} MiB more at the client, {time.monotonic() - begin:.1f} s")
        self.assertLess(grown, 64)


if __name__ == "__main__":
    main()
