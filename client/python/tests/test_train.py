"""Training streams of the Python client on a real cluster: alone, in groups, ahead, and after failures.

What this would catch: an update that is lost or made twice when a stream is opened again, ranks that do not make one
batch, gradients that are copied, or freed while they are sent, and a wait for what cannot come.
"""

import hashlib
import os
import resource
import signal
import threading
import time
import tracemalloc
import unittest.mock

from cluster import ClusterTest, counting_model, emberd, interrupted_sending, main

import numpy as np

from emberd import _records
from emberd.arrays import Ragged
from emberd.compat._in_turn import InTurn
from emberd.steps import Steps
from emberd.trainer import Trainer

ONE = np.ones((1, 4), np.float32)


def shared_bytes():
    """Of memory that this process shares with others, as far as it has been touched."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssShmem:"))


def sha(model):
    digest = hashlib.sha256()
    for table in model.tables:
        digest.update(model.table(table).tobytes())
    return digest.hexdigest()


class StreamTest(ClusterTest):
    def test_steps_are_those_of_numpy(self):
        model = self.declare(tables=("a", "b"))
        random = np.random.default_rng(3)
        tables = {name: np.zeros((64, 4), np.float32) for name in "ab"}
        with model.train("run") as stream:
            for step in range(10):
                ids = {name: random.integers(0, 64, 8) for name in "ab"}
                found = stream.lookup(ids)
                self.assertEqual(found.step, step)
                gradients = {}
                for name in "ab":
                    np.testing.assert_array_equal(found[name], tables[name][ids[name]])
                    gradients[name] = random.integers(-3, 4, (8, 4)).astype(np.float32)
                    np.subtract.at(tables[name], ids[name], gradients[name])
                applied = stream.update(gradients)
                self.assertEqual((applied.step, applied.rows_skipped), (step, 0))
                self.assertEqual(applied.rows_updated, sum(len(set(ids[name])) for name in "ab"))
        for name in "ab":
            np.testing.assert_array_equal(model.table(name), tables[name])

    def test_each_step_may_have_arrays_of_another_kind(self):
        """Records of the step before are filled anew, as long as their arrays are of the same kinds."""
        model = self.declare(tables=("a", "b"))
        random = np.random.default_rng(7)
        numbers = np.repeat(np.arange(64, dtype=np.float32), 4).reshape(64, 4)
        tables = {"a": numbers, "b": numbers + 100}
        for name, table in tables.items():
            model.assign_rows(name, np.arange(64), table)
        self.assertTrue(_records._reads_numpy())  # or every step would be packed from the start
        kinds = [np.asarray, lambda ids: ids.astype(np.int64), lambda ids: np.repeat(ids, 2)[::2], lambda ids: ids[:3],
                 lambda ids: ids.astype(">i4"), lambda ids: ids[:, None],
                 lambda ids: np.frombuffer(ids.tobytes(), np.int32), lambda ids: emberd.Ragged(ids, np.arange(9)), list]
        floats = [np.asarray, lambda one: np.repeat(one, 2, axis=1)[:, ::2], lambda one: np.concatenate([one, one], axis=1)[:, :4],
                  np.float64]
        with model.train("run") as stream:
            for step in range(60):
                ids = {name: random.permutation(64)[:8].astype(np.int32) for name in "ab"}
                given = {name: kinds[random.integers(0, len(kinds)) if step % 3 == 0 else 0](ids[name]) for name in "ab"}
                found = stream.lookup(given)
                gradients = {}
                for name in "ab":
                    rows = ids[name][:len(found[name])]
                    np.testing.assert_array_equal(found[name], tables[name][rows])
                    gradient = random.integers(-3, 4, found[name].shape).astype(np.float32)
                    tables[name][rows] -= gradient
                    gradients[name] = floats[random.integers(0, len(floats)) if step % 4 == 0 else 0](gradient)
                stream.update(gradients)
        for name in "ab":
            np.testing.assert_array_equal(model.table(name), tables[name])

    def test_lookups_may_be_ahead(self):
        model = self.declare()
        with model.train("run") as stream:
            self.assertEqual([stream.send_lookup({"t": [1]}) for _ in range(3)], [0, 1, 2])
            for step in range(3):
                self.assertEqual(stream.receive_lookup()["t"][0, 0], -step)
                stream.send_update({"t": ONE})
            self.assertEqual([stream.receive_update().step for _ in range(3)], [0, 1, 2])

    def test_updates_are_answered_however_far_lookups_are_ahead(self):
        for pipelined in (False, True):
            model = self.client.declare(counting_model(f"far_{pipelined}"))
            with model.train("run", pipelined=pipelined) as stream:
                for _ in range(12):
                    stream.send_lookup({"t": [1]})
                for step in range(11):
                    stream.receive_lookup()
                    stream.send_update({"t": ONE})
                    self.assertEqual(stream.receive_update().step, step)
                stream.receive_lookup()
                stream.send_update({"t": ONE})
            self.assertEqual(model.read_rows("t", [1])[0, 0], -12)

    def test_features_side_by_side_are_no_copies(self):
        names, dim, samples = ("a", "b", "c"), 512, 2048
        model = self.declare(tables=names, dim=dim, rows=8)
        ids = {name: np.full(samples, i, np.int32) for i, name in enumerate(names)}
        gradient = np.zeros((samples, 3 * dim), np.float32)
        gradient[:, dim:2 * dim], gradient[:, 2 * dim:] = 1, 2
        columns = {name: gradient[:, i * dim:(i + 1) * dim] for i, name in enumerate(names)}
        with model.train("run") as stream:
            stream.lookup(ids, concat=True)
            stream.update(columns)
            tracemalloc.start()
            found = stream.lookup(ids, concat=True)
            stream.update(columns)
            whole = found.concat
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.assertLess(peak, gradient.nbytes // 16)
            for i, name in enumerate(names):
                self.assertTrue(np.shares_memory(whole, found[name]))
                self.assertEqual(set(np.unique(whole[:, i * dim:(i + 1) * dim])), {-i * samples})
            with self.assertRaisesRegex(ValueError, '"a" has 2048 samples, and feature "b" has 3'):
                stream.lookup({**ids, "b": [1, 2, 3]}, concat=True)
            stream.lookup(ids)
            stream.update({"a": columns["b"][::2].repeat(2, 0), "b": columns["b"][:, ::-1]})  # these are
        self.assertEqual([model.read_rows(name, [i])[0, 0] for i, name in enumerate(names)],
                         [-samples, -3 * samples, -4 * samples])

    def test_pipelined_lookups_see_one_update_less(self):
        model = self.declare()
        with model.train("run", pipelined=True) as stream:
            stream.send_lookup({"t": [1]})
            seen = []
            for step in range(5):
                seen.append(float(stream.receive_lookup()["t"][0, 0]))
                stream.send_lookup({"t": [1]})
                stream.send_update({"t": ONE})
                self.assertEqual(stream.receive_update().step, step)
            stream.receive_lookup()
            stream.send_update({"t": ONE})
        self.assertEqual(seen, [0, 0, -1, -2, -3])
        self.assertEqual(model.read_rows("t", [1])[0, 0], -6)

    def test_waiting_for_what_cannot_come_is_an_error_at_once(self):
        model = self.declare()
        with model.train("plain") as stream:
            with self.assertRaisesRegex(emberd.FailedPrecondition, "no lookup awaits"):
                stream.receive_lookup()
            stream.send_lookup({"t": [1]})
            stream.send_lookup({"t": [1]})
            stream.receive_lookup()
            with self.assertRaisesRegex(emberd.FailedPrecondition, "update of step 0"):
                stream.receive_lookup()
            with self.assertRaisesRegex(emberd.FailedPrecondition, "no update awaits"):
                stream.receive_update()
            stream.update({"t": ONE})
            self.assertEqual(stream.receive_lookup()["t"][0, 0], -1)
            stream.update({"t": ONE})
        with model.train("ahead", pipelined=True) as stream:
            stream.lookup({"t": [1]})
            stream.send_update({"t": ONE})
            with self.assertRaisesRegex(emberd.FailedPrecondition, "lookup of step 1"):
                stream.receive_update()
            stream.finish()
            self.assertEqual(stream.receive_update().step, 0)

    def test_a_wrong_request_leaves_the_stream_open(self):
        model = self.declare()
        with model.train("run") as stream:
            with self.assertRaises(ValueError):
                stream.send_lookup({"other": [1]})
            stream.lookup({"t": [1]})
            with self.assertRaisesRegex(emberd.InvalidArgument, "gradient"):
                stream.send_update({"t": np.ones((2, 3))})
            self.assertEqual(stream.update({"t": ONE}).step, 0)

    def test_a_skipped_step_is_counted_and_changes_nothing(self):
        model = self.declare()
        with model.train("run") as stream:
            stream.lookup({"t": [1]})
            self.assertEqual(stream.update({"t": ONE}).rows_updated, 1)
            stream.lookup({"t": [1]})
            skipped = stream.skip()
            self.assertEqual((skipped.step, skipped.rows_updated), (1, 0))
            stream.send_lookup({"t": [1]})
            self.assertEqual(stream.send_skip(), 2)
            with self.assertRaisesRegex(emberd.FailedPrecondition, "in progress"):
                stream.skip()
            stream.receive_lookup()
            self.assertEqual(stream.receive_update().step, 2)
        self.assertEqual(model.read_rows("t", [1])[0, 0], -1)
        with model.train("run") as stream:
            self.assertEqual(stream.next_step, 3)

    def test_a_stream_that_failed_is_opened_again_where_it_was(self):
        model = self.declare()
        stream = model.train("run")
        stream.lookup({"t": [1]})
        stream.update({"t": ONE})
        stream.send_lookup({"t": [64]})  # out of range: the server ends the stream
        with self.assertRaisesRegex(IndexError, "64"):
            stream.receive_lookup()
        with self.assertRaises(emberd.OutOfRange):
            stream.send_lookup({"t": [1]})
        stream.close()
        with model.train("run") as stream:
            self.assertEqual(stream.next_step, 1)
            stream.lookup({"t": [1]})
            stream.update({"t": ONE})
        self.assertEqual(model.read_rows("t", [1])[0, 0], -2)

    def test_a_time_out_loses_nothing(self):
        model = self.declare()
        result = []

        def other_rank():
            with self.cluster.connect() as client, client.model(model.name).train("run", 1, 2) as stream:
                go.wait()
                stream.lookup({"t": [1]})
                result.append(stream.update({"t": ONE}))

        go = threading.Event()
        thread = threading.Thread(target=other_rank)
        thread.start()
        with model.train("run", 0, 2) as stream:
            stream.send_lookup({"t": [1]})
            with self.assertRaises(TimeoutError):
                stream.receive_lookup(timeout=0.05)
            go.set()
            stream.receive_lookup()
            stream.update({"t": ONE})
        thread.join()
        self.assertEqual(model.read_rows("t", [1])[0, 0], -2)
        self.assertEqual(len(result), 1)

    def test_gradients_may_be_copied(self):
        model = self.declare()
        gradient = ONE.copy()
        with model.train("run") as stream:
            stream.lookup({"t": [1]})
            stream.send_update({"t": gradient}, copy=True)
            gradient[:] = 100
            stream.receive_update()
        self.assertEqual(model.read_rows("t", [1])[0, 0], -1)

    def test_neither_activations_nor_gradients_are_copied(self):
        model = self.declare(rows=8, dim=1024)
        ids = np.zeros(4096, np.int32)
        gradient = np.zeros((4096, 1024), np.float32)
        with model.train("run") as stream:
            stream.lookup({"t": ids})
            stream.update({"t": gradient})
            tracemalloc.start()
            found = stream.lookup({"t": ids})
            stream.update({"t": gradient})
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.assertEqual(found["t"].nbytes, gradient.nbytes)
            self.assertLess(peak, gradient.nbytes // 16)
            self.assertEqual(found["t"].ctypes.data % 64, 0)

    def test_gradients_are_read_where_empty_gradients_puts_them(self):
        model = self.declare(rows=8, dim=1024)
        ids = np.zeros(4096, np.int32)
        with model.train("run") as stream:
            found = stream.lookup({"t": ids})
            gradients = stream.empty_gradients(found)
            self.assertEqual(gradients["t"].shape, found["t"].shape)
            self.assertEqual(gradients["t"].ctypes.data % 64, 0)
            gradients["t"][:] = 1
            for where, copies in ((gradients, 0), ({"t": gradients["t"].copy()}, 1)):
                before = shared_bytes()
                stream.update(where)
                self.assertEqual(round((shared_bytes() - before) / found["t"].nbytes), copies)
                found = None
                found = stream.lookup({"t": ids})
            stream.send_update(gradients, copy=True)
            gradients["t"][:] = 100
            stream.receive_update()
        self.assertEqual(model.read_rows("t", [0])[0, 0], -3 * 4096)
        self.assertEqual(gradients["t"][0, 0], 100)  # after the stream

    def test_memory_of_messages_is_used_again(self):
        """Not asked of the system in each step, at a page fault for every 4 KiB."""
        model = self.declare(rows=8, dim=1024)
        ids, gradient = np.zeros(4096, np.int32), np.zeros((4096, 1024), np.float32)
        with model.train("run") as stream:
            for step in range(15):
                if step == 5:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                stream.lookup({"t": ids})
                stream.update({"t": gradient})
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        self.assertLess(faults / 10, gradient.nbytes / 4096 / 4)

    def test_memory_of_gradients_is_given_back(self):
        model = self.declare(dim=64)
        with model.train("run") as stream:
            for _ in range(50):
                stream.lookup({"t": np.arange(64)})
                stream.update({"t": np.zeros((64, 64), np.float32)})
        stream.close()
        while emberd._native.held():
            time.sleep(0.01)

    def test_the_handler_of_a_signal_may_call(self):
        """Wherever Python runs it: also where the step looks after its memory, and has the lock."""
        model, said = self.declare(), []
        library = emberd._native.lib()
        released = library.lease_released

        def interrupted(lease):
            signal.raise_signal(signal.SIGUSR1)
            return released(lease)

        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: said.append(self.client.status())))
        with model.train("run") as stream, unittest.mock.patch.object(emberd._native, "_held_lock", ImpatientLock()):
            stream.lookup({"t": [1]})
            with unittest.mock.patch.object(library, "lease_released", interrupted):
                stream.update({"t": ONE})
        self.assertTrue(said)

    def test_an_answer_that_comes_with_ctrl_c_is_given_by_the_next_call(self):
        """It was lost, and the activations of the next step were given as those of this one."""
        model = self.declare(initializer=emberd.RowId())
        library = emberd._native.lib()
        receive = library.stream_receive_lookup

        def interrupted(*arguments):
            if receive(*arguments):
                raise KeyboardInterrupt
            return 0

        stream = model.train("run", pipelined=True)
        self.addCleanup(stream.close)
        for one in (3, 5):
            stream.send_lookup({"t": [one]})
        with unittest.mock.patch.object(library, "stream_receive_lookup", interrupted), self.assertRaises(KeyboardInterrupt):
            stream.receive_lookup()
        for step, one in enumerate((3, 5)):
            found = stream.receive_lookup()
            self.assertEqual((found.step, found["t"].tolist()), (step, [[one] * 4]))

    def test_an_update_whose_answer_comes_with_ctrl_c_counts_as_made(self):
        """The answer was lost: a stream could make no step any more, and a pipelined trainer waited for the answer to the
        update after it, which comes with a lookup that it had not sent."""
        library = emberd._native.lib()
        receive = library.stream_receive_update

        def interrupted(*arguments):
            if receive(*arguments):
                raise KeyboardInterrupt
            return 0

        def interrupt():
            return unittest.mock.patch.object(library, "stream_receive_update", interrupted)

        model = self.declare()
        with model.train("run") as stream:
            stream.lookup({"t": [1]})
            with interrupt(), self.assertRaises(KeyboardInterrupt):
                stream.update({"t": ONE})
            self.assertEqual(stream.receive_update().step, 0)
            stream.lookup({"t": [1]})
            self.assertEqual(stream.update({"t": ONE}).step, 1)
        steps = Steps(model, "pipelined", pipelined=True)
        for number in range(4):
            step = steps.send({"t": [1]})
            steps.receive(step)
            if number == 1:  # the update of step 0 is answered
                with interrupt(), self.assertRaises(KeyboardInterrupt):
                    steps.update(step, {"t": ONE})
                first = steps._stream
                steps.confirm(given=step)
            else:
                steps.update(step, {"t": ONE})
        self.assertIs(steps._stream, first)  # no answer was missed
        steps.finish()
        self.assertEqual(model.read_rows("t", [1])[0, 0], -6)


    def test_ctrl_c_while_a_request_is_sent(self):
        """It had been sent, but nobody had noted it: the next lookup was given its activations, and no step could follow an update."""
        model = self.declare(initializer=emberd.RowId())

        def row():
            return model.read_rows("t", [1])[0, 0]

        def made(send):  # and known to be, so that it is not made once more
            before = row()
            send()
            end = time.monotonic() + 120
            while row() == before and time.monotonic() < end:
                time.sleep(0.01)

        steps = Steps(model, "run")
        with interrupted_sending("lookup"):
            steps.send({"t": [3]})
        step = steps.send({"t": [5]})
        self.assertEqual((step.number, steps.receive(step)["t"].tolist()), (0, [[5] * 4]))
        with interrupted_sending("skip"):
            steps.skip(step)
        self.assertEqual(steps.next_step, 1)
        for after in (made, lambda send: None):
            step = begin_step(steps)
            with interrupted_sending("update_strided", after):
                steps.update(step, {"t": ONE})
            self.assertEqual(steps.next_step, step.number + 1)
        steps.update(begin_step(steps), {"t": ONE})
        steps.finish()
        self.assertEqual((steps.next_step, row()), (4, 1 - 3))
        pipelined = Steps(model, "pipelined", pipelined=True)
        for _ in range(4):
            step = begin_step(pipelined)
            with interrupted_sending("update_strided"):
                pipelined.update(step, {"t": ONE})
        pipelined.finish()
        self.assertEqual((pipelined.next_step, row()), (4, 1 - 7))

    def test_a_stream_is_over_where_ctrl_c_comes_while_a_request_is_sent(self):
        """Memory of gradients that are sent from where they lie stays as long as they are read."""
        model = self.declare()
        for name, call in (("lookup", lambda stream: stream.send_lookup({"t": [1]})), ("skip", lambda stream: stream.send_skip()),
                           ("update_strided", lambda stream: stream.send_update({"t": ONE}))):
            stream = model.train(f"run_{name}")
            stream.lookup({"t": [1]})
            with interrupted_sending(name), unittest.mock.patch("emberd._native.hold", wraps=emberd._native.hold) as hold:
                call(stream)
            self.assertEqual([bool(one.args[0]) for one in hold.call_args_list], [True] * (name == "update_strided"))
            with self.assertRaisesRegex(ValueError, "closed"):
                stream.receive_lookup()


class ImpatientLock:
    """Of one thread: says at once what it would wait for without end."""

    def __init__(self):
        self._taken = False

    def locked(self):
        return self._taken

    def __enter__(self):
        assert not self._taken, "the thread waits for itself"
        self._taken = True

    def __exit__(self, *_):
        self._taken = False


class SentAheadTest(ClusterTest):
    def test_steps_keep_their_order_when_one_before_them_was_refused(self):
        """The refusal arrives before step 0 is received, when step 1 or step 2 is sent."""
        send = emberd.TrainStream.send_lookup
        self.addCleanup(setattr, emberd.TrainStream, "send_lookup", send)
        for refused_at in (1, 2):
            sent = []

            def sends(stream, ids, **options):
                sent.append(ids)
                if len(sent) == refused_at + 1:
                    raise emberd.OutOfRange("t: 64: as a stream says that has ended")
                return send(stream, ids, **options)

            emberd.TrainStream.send_lookup = sends
            model = self.client.declare(counting_model(f"ahead{refused_at}"))
            model.assign_rows("t", [5, 6], np.array([[5.0] * 4, [6.0] * 4], np.float32))
            trainer = Trainer(model, "run")
            self.assertEqual([trainer.send({"t": [row]}) for row in (5, 64, 6)], [0, 1, 2])
            self.assertEqual(trainer.receive(0)["t"][0, 0], 5.0)
            trainer.update(0, {"t": ONE})
            with self.assertRaisesRegex(emberd.OutOfRange, "64"):
                trainer.receive(1)
            with self.assertRaisesRegex(ValueError, "step 2 is not in progress"):
                trainer.receive(2)
            number = trainer.send({"t": [6]})
            self.assertEqual((number, trainer.receive(number)["t"][0, 0]), (1, 6.0))
            trainer.finish()
            self.assertEqual([row[0] for row in model.table("t")[5:7]], [4.0, 6.0])


    def test_gradients_that_are_sent_again_are_those_that_were_given(self):
        """Not what the caller has in their memory by then."""
        model = self.declare()
        trainer = Trainer(model, "run", patience=0.05)
        number, _ = trainer.begin({"t": [1]})
        gradient = ONE.copy()
        with unittest.mock.patch.object(emberd.TrainStream, "send_update"), self.assertRaises(emberd.Unavailable), \
                unittest.mock.patch.object(emberd.TrainStream, "receive_update", side_effect=emberd.Unavailable("gone")):
            trainer.update(number, {"t": gradient}, own=False)
        gradient[:] = 100
        trainer._steps.patience = 120.0
        trainer.begin({"t": [2]})
        trainer.finish()
        self.assertEqual(model.read_rows("t", [1])[0, 0], -1)


    def test_masked_gradients_are_refused(self):
        """They were used whole where they are copied."""
        for pipelined in (False, True):
            trainer = Trainer(self.client.declare(counting_model(f"masked_{pipelined}")), "run", pipelined=pipelined)
            number, _ = trainer.begin({"t": [1]})
            with self.assertRaisesRegex(TypeError, 'gradient of feature "t": a masked array is not allowed'):
                trainer.update(number, {"t": np.ma.array(ONE, mask=ONE > 0)}, own=False)
            trainer.update(number, {"t": ONE}, own=False)
            trainer.finish()


class GroupTest(ClusterTest):
    def train(self, model, rank, size, batches, **options):
        with self.cluster.connect() as client:
            with client.model(model.name).train("run", rank, size, **options) as stream:
                for ids, gradient in batches:
                    stream.lookup({"t": ids})
                    stream.update({"t": gradient})

    def test_two_ranks_are_one_with_both_batches(self):
        random = np.random.default_rng(11)
        steps = [[(random.integers(0, 64, 16), random.standard_normal((16, 4)).astype(np.float32)) for _ in range(2)]
                 for _ in range(8)]
        optimizer = emberd.Adagrad(learning_rate=0.3)
        two = self.client.declare(counting_model("two", optimizer=optimizer))
        one = self.client.declare(counting_model("one", optimizer=optimizer))
        ranks = [threading.Thread(target=self.train, args=(two, rank, 2, [step[rank] for step in steps]))
                 for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        self.train(one, 0, 1, [tuple(np.concatenate(both) for both in zip(*step)) for step in steps])
        self.assertEqual(sha(two), sha(one))
        self.assertNotEqual(one.table("t").any(), False)

    def test_ranks_on_their_own(self):
        for options in ({"consistency": "async"}, {"consistency": "bounded", "staleness_bound": 1}):
            model = self.client.declare(counting_model("own_" + options["consistency"]))
            ranks = [threading.Thread(target=self.train, args=(model, rank, 2, [([rank, 5], np.ones((2, 4)))] * 6),
                                      kwargs=options) for rank in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            self.assertEqual(model.read_rows("t", [0, 1, 5])[:, 0].tolist(), [-6, -6, -12])

    def test_an_async_rank_waits_for_no_other(self):
        """Would catch: a step that waits for the other rank, which makes none: one of a sync or a bounded group ends with DeadlineExceeded."""
        model = self.declare()
        with model.train("run", 0, 2, consistency="async", step_timeout=5.0) as stream, model.train("run", 1, 2, consistency="async", step_timeout=5.0):
            for _ in range(6):
                stream.lookup({"t": [1]})
                stream.update({"t": ONE})
            self.assertEqual(model.read_rows("t", [1])[0, 0], -6)

    def test_a_run_that_is_over_is_forgotten(self):
        model = self.declare()
        client = model.client
        self.assertFalse(client.drop_group(model.name, "run"))
        with model.train("run") as stream:
            stream.lookup({"t": [1]})
            stream.update({"t": ONE})
            with self.assertRaisesRegex(emberd.FailedPrecondition, "are active"):
                client.drop_group(model.name, "run")
        for _ in range(1200):  # it leaves a moment after its end
            try:
                self.assertTrue(client.drop_group(model.name, "run"))
                break
            except emberd.FailedPrecondition:
                time.sleep(0.1)
        with model.train("run") as stream:
            self.assertEqual(stream.next_step, 0)

    def test_wrong_groups_are_refused(self):
        model = self.declare()
        with self.assertRaises(emberd.InvalidArgument):
            model.train("run", 2, 2)
        with self.assertRaises(emberd.InvalidArgument):
            model.train("")
        with self.assertRaisesRegex(ValueError, "consistency"):
            model.train("run", consistency="eventual")


def begin_step(steps):
    step = steps.send({"t": [1]})
    steps.receive(step)
    return step


class WhoseStepTest(ClusterTest):
    """A step that somebody else made must not stand for one's own whose answer was lost."""

    def make_step(self, steps, step):
        steps.update(step, {"t": ONE})
        steps.finish()

    def test_a_step_of_another_trainer_is_not_taken_for_ones_own(self):
        for options in ({}, {"pipelined": True}, {"consistency": "async"}, {"consistency": "bounded", "staleness_bound": 1}):
            with self.subTest(**options):
                model = self.client.declare(counting_model("whose_" + "_".join(map(str, options.values()))))
                mine, other, third = (Steps(model, "run", **options) for _ in range(3))
                step, same = begin_step(mine), begin_step(other)
                self.make_step(mine, step)
                said = "model 'whose_.*', group 'run', are at step 1: another trainer uses this group, and has made step 0; give"
                with self.assertRaisesRegex(emberd.RowsLost, said):
                    self.make_step(other, same)
                self.assertEqual(model.read_rows("t", [1])[0, 0], -1)
                self.make_step(third, begin_step(third))  # one that begins there may
                with self.assertRaisesRegex(emberd.RowsLost, "at step 1, .* at step 2: another trainer .* has made step 1"):
                    begin_step(mine)
                self.assertEqual(model.read_rows("t", [1])[0, 0], -2)


class InTurnTest(ClusterTest):
    def test_a_step_begun_without_weights_is_not_that_of_an_update_with_some(self):
        plain, weighted = Ragged([1, 2, 3], [0, 2, 3]), Ragged([1, 2, 3], [0, 2, 3], np.array([2, 3, 4], np.float32))
        for first, second in ((plain, weighted), (weighted, plain)):
            rows = []
            for lookups in ((first, second), (second,)):
                model = self.client.declare(counting_model(f"{self.id().split('.')[-1]}_{len(lookups)}_{first is plain}"))
                steps = InTurn(Trainer(model, "run"))
                for ids in lookups:
                    steps.look_up({"t": ids})
                steps.update({"t": second}, {"t": np.ones((2, 4), np.float32)})
                rows.append(model.table("t")[:4, 0].tolist())
            self.assertEqual(rows, [[0, -2, -3, -4] if second is weighted else [0, -1, -1, -1]] * 2)

    def test_an_interrupted_update_is_gone_on_from(self):
        model, ids = self.declare(), {"t": Ragged([1], [0, 1])}
        steps = InTurn(Trainer(model, "run"))
        steps.look_up(ids)
        with unittest.mock.patch("emberd.train.TrainStream.receive_update", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            steps.update(ids, {"t": ONE})
        for made in (1, 2):
            self.assertEqual(steps.look_up(ids)["t"][0, 0], -made)
            steps.update(ids, {"t": ONE})
        self.assertEqual(steps.trainer.next_step, 3)
        steps.look_up(ids)
        with self.assertRaises(ValueError):  # one that was refused may be given again
            steps.update(ids, {"t": ONE * np.nan})
        steps.update(ids, {"t": ONE})
        self.assertEqual((steps.trainer.next_step, model.read_rows("t", [1])[0, 0]), (4, -4))
        steps.trainer.finish()


class FailureTest(unittest.TestCase):
    def test_a_step_whose_answer_was_lost_is_known_to_be_ones_own(self):
        with emberd.local(shards=2, processes=True) as cluster, cluster.connect() as client:
            model = client.declare(counting_model("m"))
            steps = Steps(model, "run")
            for number in range(4):
                step = begin_step(steps)

                def lose(receive=steps._stream.receive_update, kill=number % 2):
                    receive()
                    if kill:
                        os.kill(coordinator(cluster), signal.SIGKILL)
                    raise emberd.Unavailable("the answer was lost")

                steps._stream.receive_update = lose
                steps.update(step, {"t": ONE})
                self.assertEqual(steps.next_step, number + 1)
            steps.finish()
            self.assertEqual(model.read_rows("t", [1])[0, 0], -4)

    def test_killing_the_coordinator_neither_loses_nor_doubles_an_update(self):
        with emberd.local(shards=2, processes=True) as cluster, cluster.connect() as client:
            model = client.declare(counting_model("m"))
            done = kills = 0
            stream = model.train("run")
            while done < 60:
                try:
                    stream.lookup({"t": [1]})
                    stream.send_update({"t": ONE})
                    if done % 20 == 10 and kills <= done // 20:
                        os.kill(coordinator(cluster), signal.SIGKILL)
                        kills += 1
                    stream.receive_update()
                    done += 1
                except emberd.Error:
                    stream.close()
                    stream = self.join_again(model)
                    done = stream.next_step
            stream.close()
            self.assertEqual(kills, 3)
            self.assertEqual(model.read_rows("t", [1]).tolist(), [[-60] * 4])

    def join_again(self, model):
        end = time.monotonic() + 120
        while True:
            try:
                return model.train("run")
            except emberd.Error:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


def coordinator(cluster):
    """The process of the coordinator now."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with open(f"/proc/{cluster.pid}/task/{cluster.pid}/children") as file:
            for pid in file.read().split():
                with open(f"/proc/{pid}/cmdline", "rb") as line:
                    if b"coordinator" in line.read().split(b"\0"):
                        return int(pid)
        time.sleep(0.05)
    raise AssertionError("no coordinator runs")


if __name__ == "__main__":
    main()
