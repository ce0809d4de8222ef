"""What operators see, from Python: statistics, hot rows, memory, limits, what is served; dropping and resetting; the live table; and the
client for asyncio.

What this would catch: a count of another model, a hot row that is none, a limit that is set beside the one that was named, a table that
goes on after its block, and a call that blocks the loop of asyncio.
"""

import asyncio
import fcntl
import inspect
import io
import os
import re
import struct
import sys
import tempfile
import termios
import threading
import time
import types
import unittest
import unittest.mock

from cluster import ClusterTest, counting_model, emberd, main

import emberd.aio  # noqa: E402
import emberd.trainer  # noqa: E402

import numpy as np


def train(model, steps=40, group="run"):
    """Row 7 of "a" is half of what is looked up."""
    random = np.random.default_rng(1)
    with model.train(group) as stream:
        for _ in range(steps):
            hot = np.where(random.random(128) < 0.5, 7, random.integers(0, 64, 128))
            found = stream.lookup({"a": hot, "b": np.arange(48).reshape(16, 3)})
            stream.update({"a": found["a"]})


class StatisticsTest(ClusterTest):
    def test_counts_and_hot_rows_are_those_of_the_model(self):
        model, other = (self.client.declare(counting_model(name, ("a", "b"))) for name in ("counted", "idle"))
        before = model.statistics()
        train(model)
        now = model.statistics(hot_rows=2)
        self.assertEqual([getattr(now, name) - getattr(before, name) for name in ("examples", "batches", "ids", "updates", "failures", "dropped_ids")],
                         [40 * 128, 40, 40 * (128 + 48), 40, 0, 0])
        self.assertGreater(now.time, before.time)
        self.assertEqual((now.table_bytes, now.serves, now.lost), (2 * 64 * 8 * 4, "", ""))
        hot = model.hot_rows("a", 3)
        self.assertEqual((hot[0].table, hot[0].id), ("a", 7))
        self.assertTrue(0.3 < hot[0].share < 0.8, hot)
        self.assertEqual([one.lookups for one in hot], sorted((one.lookups for one in hot), reverse=True))
        self.assertEqual(now.hot_rows[0], model.hot_rows("a", 2)[0])
        self.assertTrue(all(sum(one.table == table for one in now.hot_rows) <= 2 for table in ("a", "b")))
        self.assertEqual((other.statistics(5).examples, other.statistics(5).hot_rows), (0, ()))
        for call, kind, said in ((lambda: model.statistics(101), ValueError, r"hot_rows: 101 .* \[0, 100\]"), (lambda: model.hot_rows("a", 0), ValueError, "count: 0"),
                                 (lambda: model.hot_rows("c"), LookupError, "no table 'c'; it has a, b"),
                                 (lambda: model.hot_rows(""), LookupError, "no table ''; it has"),
                                 (lambda: model.statistics(1.5), TypeError, "hot_rows")):
            with self.assertRaisesRegex(kind, said):
                call()

    def test_a_trainer_that_has_finished_has_not_failed(self):
        for options in ({}, {"pipelined": True}):
            model = self.client.declare(counting_model(f"finished_{len(options)}"))
            for first in (0, 3):  # finish leaves the group, and the next step joins again
                trainer = emberd.trainer.Trainer(model, "run", **options)
                for step in range(first, first + 3):
                    trainer.send({"t": [step]})
                    trainer.receive(step)
                    trainer.update(step, {"t": np.ones((1, 4), np.float32)})
                trainer.finish()
            now = model.statistics()
            self.assertEqual((now.updates, now.failures), (6, 0))
            trainer.send({"t": [1]})
            trainer.receive(6)
            trainer.finish()  # a lookup without its update
            self.assertEqual((model.statistics().updates, trainer.next_step), (6, 6))
            trainer.finish()

    def test_memory_of_the_shards(self):
        model = self.declare(rows=1024)
        shards = self.client.memory()
        self.assertEqual([(one.shard, one.error) for one in shards], [(0, ""), (1, "")])
        self.assertGreaterEqual(sum(one.table_bytes for one in shards), model.statistics().table_bytes)
        for one in shards:
            self.assertTrue(0 < one.table_bytes < one.table_budget_bytes < one.memory_bytes, one)
            self.assertLess(1 << 20, one.resident_bytes)

    def test_no_limits_are_needed(self):
        """Would catch: a limit that holds where none is set: an id that is dropped, or a batch that is refused. The default of keras-rs is 256 ids in a
        partition."""
        model = self.declare(rows=8192)
        ids = np.concatenate([np.arange(8192), np.full(8192, 7)])
        with model.train("run") as stream:
            stream.lookup({"t": ids})
            stream.update({"t": np.ones((len(ids), 4), np.float32)})
        np.testing.assert_array_equal(model.table("t")[:, 0], -np.bincount(ids))
        limits = model.limits()[model.tables["t"].stack]
        self.assertEqual((limits.max_ids_per_partition, limits.max_unique_ids_per_partition), (0, 0))
        self.assertGreater(limits.largest_unique_ids_per_partition, 256)
        self.assertEqual(model.statistics().dropped_ids, 0)

    def test_limits_of_the_live_model(self):
        model = self.declare(tables=("a", "b"), max_ids_per_partition=96, max_unique_ids_per_partition=80)
        train(model, 5)
        stack = model.tables["a"].stack
        now = model.limits()[stack]
        self.assertEqual((now.stack, now.max_ids_per_partition, now.max_unique_ids_per_partition), (stack, 96, 80))
        self.assertTrue(0 < now.largest_unique_ids_per_partition <= now.largest_ids_per_partition)
        model.set_limits(stack, max_ids_per_partition=40)
        self.assertEqual([model.limits()[stack].max_ids_per_partition, model.limits()[stack].max_unique_ids_per_partition], [40, 80])
        rows = model.table("a").tobytes()
        model.set_limits(stack, max_unique_ids_per_partition=0)
        self.assertEqual([model.limits()[stack].max_ids_per_partition, model.limits()[stack].max_unique_ids_per_partition], [40, 0])
        model.set_limits(stack, max_ids_per_chip_per_sample=3000, max_minibatches_per_sparsecore=7)
        capacity = model.limits()[stack]
        self.assertEqual([capacity.max_ids_per_partition, capacity.max_ids_per_chip_per_sample, capacity.max_minibatches_per_sparsecore], [40, 3000, 7])
        self.assertTrue(0 < capacity.largest_ids_per_chip_per_sample and 0 < capacity.largest_minibatches <= 64, capacity)
        model.reset_limits()
        self.assertEqual(model.limits()[stack].max_ids_per_partition, 96)
        self.assertEqual(model.limits()[stack].max_ids_per_chip_per_sample, 0)
        self.assertEqual(model.table("a").tobytes(), rows)
        for options, kind, said in (({"stack": "c", "max_ids_per_partition": 1}, LookupError, f"no stack 'c'; it has {stack}"),
                                    ({"stack": "", "max_ids_per_partition": 1}, LookupError, f"no stack ''; it has {stack}"),
                                    ({"stack": stack, "max_ids_per_partition": -1}, ValueError, r"max_ids_per_partition: -1 .*\[0, 2147483647\]"),
                                    ({"stack": stack, "max_minibatches_per_sparsecore": 65}, ValueError, r"max_minibatches_per_sparsecore: 65 .*\[0, 64\]"),
                                    ({"stack": stack, "max_unique_ids_per_partition": 2**31}, ValueError, "max_unique_ids_per_partition: 2147483648")):
            with self.assertRaisesRegex(kind, said):
                model.set_limits(**options)
        self.assertEqual(model.limits()[stack].max_ids_per_partition, 96)

    def test_models_are_dropped_and_reset(self):
        model = self.declare(tables=("a", "b"), initializer=emberd.RowId())
        train(model, 2)
        with self.assertRaises(emberd.Aborted), model.train("open") as stream:
            stream.lookup({"a": [1], "b": [1]})
            again = self.client.reset_model(model.name)
            stream.update({"a": np.ones((1, 4))})
        self.assertEqual(again.table("a")[:, 0].tolist(), list(range(64)))
        with again.train("run") as stream:
            self.assertEqual(stream.next_step, 0)
        self.assertTrue(self.client.drop_model(model.name))
        self.assertFalse(self.client.drop_model(model.name))
        self.assertNotIn(model.name, [one.name for one in self.client.models()])
        for call in (lambda: self.client.reset_model(model.name), model.statistics, lambda: model.limits(), lambda: model.lookup({"a": [1], "b": [1]})):
            with self.assertRaises(LookupError):
                call()
        self.assertTrue(self.declare(tables=("c",)).created)  # another model of the name

    def test_the_checkpoint_that_is_served(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            model = client.declare(counting_model("m"))
            for name in ("first", "second"):
                model.save_checkpoint(name)
                live = client.serve("m", name, serve_as="live")
                self.assertEqual({one.name: one.serves for one in client.models()}, {"live": f"m/{name}", "m": ""})
                self.assertEqual(live.statistics().serves, f"m/{name}")


class ShownTest(ClusterTest):
    def test_objects_say_what_they_are(self):
        model = self.declare(tables=("a", "b"))
        found = model.lookup({"a": [1, 2], "b": [[1, 2]]})
        self.assertEqual(repr(found), "emberd.Lookup(a: [2, 4], b: [1, 4])")
        with model.train("run") as stream:
            self.assertEqual(repr(stream), f"emberd.TrainStream({model.name!r}, group='run', next step 0)")
        self.assertEqual(repr(self.cluster), f"emberd.LocalCluster({self.cluster.address}; pid {self.cluster.pid})")
        for one in (self.client, model, emberd.Checkpoints([], ["m/b: <cut> off"]), model.statistics(1), emberd.watch(model)):
            page = one._repr_html_()
            self.assertNotIn(" object at 0x", repr(one))
            self.assertRegex(page, "^<b>.*</table>$")
            self.assertNotIn("<cut>", page)
        self.assertIn("&lt;cut&gt;", emberd.Checkpoints([], ["m/b: <cut> off"])._repr_html_())
        client = self.cluster.connect()
        client.close()
        self.assertIn("has been closed", client._repr_html_())


class Terminal(io.StringIO):
    """number: of a terminal whose width this one has."""

    def __init__(self, number=-1):
        super().__init__()
        self.number = number

    def fileno(self):
        return self.number

    def isatty(self):
        return True


@unittest.mock.patch.dict(os.environ, COLUMNS="200")
class WatchTest(ClusterTest):
    def wait(self, shown, count):
        """Until so many tables have been shown."""
        self.until(lambda: shown() >= count or train(self.model, 1))

    def until(self, done):
        end = time.monotonic() + 120
        while not done():
            self.assertLess(time.monotonic(), end, "it was never shown")

    def setUp(self):
        self.model = self.declare(tables=("a", "b"))

    def test_figures_and_tensorboard(self):
        watch = emberd.watch(self.model)
        train(self.model, 20)
        written = {}
        watch.write(types.SimpleNamespace(add_scalar=lambda tag, value, step: written.update({tag: (value, step)})), 7)
        self.assertEqual({step for _, step in written.values()}, {7})
        found = {tag.split("/")[1]: value for tag, (value, _) in written.items()}
        self.assertEqual(found, watch.scalars())
        self.assertAlmostEqual(found["examples_per_second"] / found["updates_per_second"], 128)
        self.assertGreater(found["hottest_share"], 0.3)
        self.assertEqual((found["dropped_ids"], found["table_bytes"]), (0, self.model.statistics().table_bytes))
        watch = emberd.watch(self.model, interval=0.2)
        for show in (str, emberd.watching.Watch._repr_html_):
            train(self.model, 1)
            shown = show(watch)
            self.assertGreaterEqual(watch._now[0] - watch._before[0], watch.interval, "rates of a shorter time are chance")
            self.assertGreater(watch.scalars()["updates_per_second"], 0)
            self.assertEqual(shown.startswith(self.model.name), show is str)
        self.assertRegex(str(watch), rf"^{self.model.name}\nexamples / s +[\d,.]+\nids / s .*\n(.*\n)*hot rows of a +7 \(")
        for call, said in ((lambda: watch.write(None, 1), "writer: a NoneType"), (lambda: emberd.watch("m"), "model: a str"), (lambda: emberd.watch(self.model, file=1), "file: a int")):
            with self.assertRaisesRegex(TypeError, said):
                call()

    def test_what_the_program_prints_stays_on_a_terminal(self):
        controller, screen = os.openpty()
        self.addCleanup(os.close, controller)
        self.addCleanup(os.close, screen)
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 130, 0, 0))
        screen = Terminal(screen)
        train(self.model, 20)  # of about a thousand lookups one counts among the hot rows
        with emberd.watch(self.model, interval=0.01, file=screen):
            for number in range(3):
                self.wait(lambda: screen.getvalue().count("examples/s"), 3 * number + 1)
                screen.write(f"loss {number}\n")
        self.assertNotRegex(screen.getvalue(), "\x1b\\[[0-9]*[A-JL-Z]")  # the cursor moves within its line
        shown = [re.split("\r\x1b\\[K", line)[-1] for line in screen.getvalue().split("\n")]
        self.assertEqual([line[line.index(" | loss"):] for line in shown if "loss" in line], [" | loss 0", " | loss 1", " | loss 2"])
        self.assertTrue(all(re.match(r".*: 0 ids lost; [\d,.]+ examples/s; [\d,.]+ ids/s; [\d,.]+ updates/s", line) for line in shown if "loss" in line), shown)
        self.assertEqual({len(line[:line.index("loss")]) for line in shown if "loss" in line}, {129})
        self.assertRegex("\n".join(shown), rf"\n{self.model.name}\nexamples / s +[\d,.]+\nids / s .*\n(.*\n)*hot rows of a ")

    def test_a_terminal_is_written_over_and_a_file_is_not(self):
        for file in (Terminal(), io.StringIO()):
            with emberd.watch(self.model, interval=0.01, file=file) as watch:
                self.wait(lambda: len(re.findall("examples ?/ ?s", file.getvalue())), 3)
                with self.assertRaisesRegex(RuntimeError, "already"):
                    watch.__enter__()
            said = file.getvalue()
            watch.close()
            train(self.model, 3)
            self.assertEqual(file.getvalue(), said)
            self.assertEqual("\x1b[" in said, file.isatty())
            self.assertNotIn("emberd.watch", [one.name for one in threading.enumerate()])
        lines = [line for line in said.splitlines() if line]
        self.assertTrue(all(line.startswith(f"{self.model.name}: examples / s: ") for line in lines), lines)

    def test_a_notebook_shows_one_table(self):
        shown = []
        display = types.SimpleNamespace(update=lambda one: shown.append(one._repr_html_()))
        module = types.ModuleType("IPython")
        module.get_ipython = lambda: types.SimpleNamespace(kernel=1)
        page = types.ModuleType("IPython.display")
        page.display = lambda one, display_id: shown.append(one._repr_html_()) or display
        with unittest.mock.patch.dict(sys.modules, {"IPython": module, "IPython.display": page}):
            with emberd.watch(self.model, interval=0.01):
                self.wait(lambda: len(shown), 3)
        self.assertTrue(all("examples / s" in one for one in shown))

    def test_failures_are_shown_and_end_nothing(self):
        file = Terminal()
        with emberd.watch(self.model, interval=0.01, file=file):
            self.client.drop_model(self.model.name)
            self.until(lambda: file.getvalue().count("there is no model") >= 3)
        self.assertEqual(file.getvalue().count("\n"), 1)  # of the last one
        client = self.cluster.connect()
        self.declare(tables=("a", "b"))
        watch = emberd.watch(client.model(self.model.name), interval=0.01, file=file)
        with watch:
            client.close()
            self.until(lambda: "has been closed" in file.getvalue())
        self.assertIn("has been closed", watch._repr_html_())
        with self.assertRaisesRegex(ValueError, "has been closed"):
            str(watch)


class AsyncioTest(ClusterTest):
    def test_many_calls_wait_at_a_time(self):
        name = self.declare(tables=("a", "b"), initializer=emberd.RowId()).name

        async def run():
            async with await emberd.aio.connect(self.cluster.address) as client:
                model = await client.model(name)
                beats = 0

                async def beat():
                    nonlocal beats
                    while True:
                        beats += 1
                        await asyncio.sleep(0)

                other = asyncio.create_task(beat())
                found = await asyncio.gather(*(model.lookup({"a": np.array([one % 64])}, partial=True) for one in range(200)))
                self.assertEqual([one["a"][0, 0] for one in found], [one % 64 for one in range(200)])
                self.assertGreater(beats, 1)
                other.cancel()
                found = await model.lookup({"a": [1], "b": [2]}, train=True)
                applied = await model.apply(found, {"a": np.ones((1, 4))})
                self.assertEqual(applied.rows_updated, 2)
                self.assertEqual((await model.read_rows("a", [1]))[0, 0], 0)
                await model.assign_rows("a", [1], np.full((1, 4), 5))
                rows = [(first, len(values)) async for first, values in model.export("a", rows_at_a_time=50)]
                self.assertEqual(rows, [(0, 50), (50, 14)])
                self.assertGreaterEqual((await model.statistics()).examples, 200)
                self.assertIsInstance(await model.hot_rows("a"), list)
                self.assertIn(name, [one.name for one in await client.models()])
                self.assertEqual(len(await client.memory()), 2)
                self.assertFalse((await client.declare(counting_model(name, ("a", "b"), initializer=emberd.RowId()))).blocking.created)
                with self.assertRaisesRegex(IndexError, "64"):
                    await model.lookup({"a": [64], "b": [1]})
                with self.assertRaisesRegex(TypeError, "lookup: a dict"):
                    await model.apply({}, {})
                return client, model

        client, model = asyncio.run(run())
        with self.assertRaisesRegex(ValueError, "has been closed"):
            asyncio.run(model.lookup({"a": [1]}, partial=True))
        for threads in (0, 4097):
            with self.assertRaisesRegex(ValueError, rf"threads: {threads} .*\[1, 4096\]"):
                asyncio.run(emberd.aio.connect(self.cluster.address, threads=threads))

    def test_checkpoints_are_saved_restored_and_served(self):
        async def run(address):
            async with await emberd.aio.connect(address) as client:
                model = await client.declare(counting_model("m"))
                saved = await model.save_checkpoint("one")
                await model.assign_rows("t", [1], np.ones((1, 4)))
                model = await client.restore("m", "one")
                self.assertEqual((await model.read_rows("t", [1])).tolist(), [[0] * 4])
                live = await client.serve("m", serve_as="live")
                return saved.name, (await live.lookup({"t": [1]}))["t"].shape, [one.name for one in await client.checkpoints("m") if not one.automatic]

        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster:
            self.assertEqual(asyncio.run(run(cluster.address)), ("one", (1, 4), ["one"]))

    def test_every_method_that_waits_can_be_awaited(self):
        """What this would catch: a method that is added to the blocking client, and not here."""
        def methods_of(*kinds):
            return {name: inspect.signature(one) for kind in kinds for name, one in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

        own = {"Client": {"close", "cancel", "prepare", "execute", "run", "read"}, "Model": {"apply", "release", "export"}, "TrainStream": {"close"}}
        for name, others in own.items():
            here, there = methods_of(getattr(emberd.aio, name)), methods_of(getattr(emberd, name))
            self.assertEqual(here.keys() - others, there.keys() - others, name)
            for method in there.keys() - others:
                self.assertEqual(here[method], there[method], method)
                self.assertEqual(getattr(getattr(emberd.aio, name), method).__doc__, getattr(getattr(emberd, name), method).__doc__)
        of_what_is_made = methods_of(emberd.Lookup, emberd.Program, emberd.PreparedBatch, emberd.ProgramResult, emberd.Bundle, emberd.Chain).keys()
        still = {"add", "close", "get", "items", "keys", "values"}  # they do not wait
        self.assertEqual(of_what_is_made - still, own["Client"] - {"close", "cancel", "execute"} | own["Model"] - {"export"})

    def test_models_are_changed_limited_and_dropped(self):
        name = self.declare(tables=("a", "b"), initializer=emberd.RowId()).name

        async def run():
            async with await emberd.aio.connect(self.cluster.address, threads=2) as client:
                model = await client.model(name)
                await model.load_table("a", np.full((64, 4), 3.0))
                self.assertEqual((await model.table("a")).tolist(), np.full((64, 4), 3.0).tolist())
                stack = model.blocking.tables["a"].stack
                await model.set_limits(stack, max_ids_per_partition=7)
                self.assertEqual((await model.limits())[stack].max_ids_per_partition, 7)
                await model.reset_limits()
                changed = await client.change_model(name, counting_model(f"{name}-2", ("a",), initializer=emberd.RowId()))
                other = emberd.aio.Model(client, changed.model)
                self.assertEqual((await other.read_rows("a", [5]))[0, 0], 3)
                self.assertRegex(str(await other.copy_from(model.blocking, strict=False)), "b")
                await model.release(await model.lookup({"a": [1], "b": [2]}, train=True))
                self.assertEqual((await client.status())["version"], emberd.__version__)
                self.assertEqual(await client.call_statistics("none"), {})
                model = await client.reset_model(name)
                self.assertEqual((await model.read_rows("a", [5]))[0, 0], 5)
                found = await client.execute(await model.compile(samples=1), {"a": [5], "b": [6]})
                self.assertEqual((await client.read(found)), {})
                self.assertEqual(len(await client.read(await client.bundle(found))), 1)
                with self.assertRaisesRegex(ValueError, "csr: True is not allowed for a ProgramResult"):
                    await client.read(found, csr=True)
                self.assertTrue(await client.drop_model(f"{name}-2"))
                self.assertFalse(await client.drop_model(f"{name}-2"))
                self.assertFalse(await client.drop_group(name, "none"))

        asyncio.run(run())

    def test_two_ranks_train_on_streams(self):
        model = self.declare()

        async def rank(client, place):
            async with await (await client.model(model.name)).train("run", place, 2) as stream:
                for step in range(3):
                    found = await stream.lookup({"t": [1]})
                    self.assertEqual(found["t"][0, 0], -2 * step)
                    applied = await stream.update({"t": np.ones((1, 4))})
                await stream.lookup({"t": [1]})
                self.assertEqual((await stream.skip()).step, 3)
                return stream.next_step, applied.step

        async def run():
            async with await emberd.aio.connect(self.cluster.address) as client:
                self.assertEqual(await asyncio.gather(rank(client, 0), rank(client, 1)), [(0, 2)] * 2)
                with self.assertRaisesRegex(ZeroDivisionError, "mine"):
                    async with await (await client.model(model.name)).train("other") as stream:
                        self.assertIn("aio.TrainStream", repr(stream))
                        raise ZeroDivisionError("mine")

        asyncio.run(run())
        self.assertEqual(model.read_rows("t", [1])[0, 0], -6)

    def test_a_cancelled_call_closes_its_stream(self):
        """Another call would get the answer that the cancelled one waits for, or none."""
        model = self.declare()

        async def run():
            async with await emberd.aio.connect(self.cluster.address) as client:
                found = await client.model(model.name)
                ranks = await asyncio.gather(*(found.train("run", place, 2) for place in range(2)))
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(ranks[0].lookup({"t": [1]}), 0.05)  # the other rank sends none
                with self.assertRaisesRegex(ValueError, "has been closed"):
                    await ranks[0].receive_lookup()
                await ranks[1].close()
                async with await found.train("alone") as stream:
                    await stream.lookup({"t": [1]})
                    await stream.update({"t": np.ones((1, 4))})
                waiting = asyncio.create_task(found.train("two", 0, 2))  # for a rank that does not come
                await asyncio.sleep(0)
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
                self.assertEqual((await found.read_rows("t", [1]))[0, 0], -1)

        asyncio.run(run())

    def test_calls_that_wait_for_a_thread_are_cancelled_by_close(self):
        name = self.declare().name

        async def run():
            client = await emberd.aio.connect(self.cluster.address, threads=1)
            model = await client.model(name)
            hold = threading.Event()
            client._threads._pool.submit(hold.wait)
            waiting = [asyncio.create_task(model.lookup({"t": [1]})) for _ in range(3)]
            await asyncio.sleep(0.05)
            await client.close()
            hold.set()
            for one in await asyncio.gather(*waiting, return_exceptions=True):
                self.assertIsInstance(one, emberd.Cancelled)
            with self.assertRaisesRegex(ValueError, "has been closed"):
                await model.lookup({"t": [1]})

        asyncio.run(run())

    def test_a_cancelled_task_no_longer_waits(self):
        name = self.declare().name

        async def run():
            async with await emberd.aio.connect(self.cluster.address, threads=1) as client:
                model = await client.model(name)
                hold = threading.Event()
                client._threads._pool.submit(hold.wait)  # so that what follows waits its turn
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(model.lookup({"t": [1]}), 0.05)
                hold.set()
                self.assertEqual((await model.lookup({"t": [1]}))["t"].shape, (1, 4))

        asyncio.run(run())


if __name__ == "__main__":
    main()
