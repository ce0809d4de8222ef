"""Trained models that go on with other tables, and tables of checkpoints.

What this would catch: a changed model that is used before it is whole; one that begins anew, and loses what it has learned, where its script is run a
second time; new rows that are zeros; slots or the number of steps that are lost in silence, so that training goes on in another way; and a copy of a whole
table in the client.
"""

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest.mock

from cluster import ClusterTest, emberd, has_torch, main

from emberd import _changing, _loading

import numpy as np

DIM = 8
NORMAL = emberd.Normal(0.0, 0.5)
EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "changed_tables.py")


def config(name, tables, optimizer=emberd.Adagrad(learning_rate=0.5), initializer=NORMAL, **options):
    """tables: rows by name, or rows and columns."""
    sizes = {table: size if isinstance(size, tuple) else (size, DIM) for table, size in tables.items()}
    return emberd.ModelConfig(name, [emberd.TableConfig(table, *size, combiner="sum", initializer=initializer, **options) for table, size in sizes.items()],
                              [emberd.FeatureConfig(table, table) for table in tables], optimizer=optimizer, seed=7)


def step(stream, tables, seed):
    """Rows below 20 of each."""
    random = np.random.default_rng(seed)
    found = stream.lookup({table: random.integers(0, 20, (6, 2)) for table in tables}, partial=True)
    stream.update({table: random.normal(size=found[table].shape) for table in tables})


class Case(ClusterTest):
    def setUp(self):
        patch = unittest.mock.patch.object(_loading, "STRETCH_BYTES", 10 * 4 * DIM)  # 10 rows
        patch.start()
        self.addCleanup(patch.stop)
        self.name = self.id().split(".")[-1][:60]

    def trained(self, tables, steps=3, **options):
        model = self.client.declare(config(self.name, tables, **options))
        with model.train("run") as stream:
            for number in range(steps):
                step(stream, tables, number)
        return model

    def check_same(self, model, other, table, rows):
        for slot in ("", *model.tables[table].slots):
            np.testing.assert_array_equal(model.table(table, slot=slot)[:rows], other.table(table, slot=slot)[:rows])


class ChangingTest(Case):
    TABLES, CHANGED = {"grows": 25, "shrinks": 40, "stays": 33, "goes": 30}, {"grows": 47, "shrinks": 21, "stays": 33, "comes": 26}

    def test_tables_are_added_grown_cut_and_dropped(self):
        source, heard = self.trained(self.TABLES), []
        before = {name: source.table(name) for name in self.TABLES}
        wanted = config(self.name + "_2", self.CHANGED)
        changed = self.client.change_model(source, wanted, groups=["run"], progress=heard.append)
        made = changed.model
        self.assertEqual((changed.created, changed.added, changed.grown, changed.shrunk, changed.kept, changed.dropped, dict(changed.groups)),
                         (True, ("comes",), ("grows",), ("shrinks",), ("stays",), ("goes",), {"run": 3}))
        left = ("table 'goes' of the source", "table 'grows': rows 25 to 46, which the source does not have", "table 'shrinks': rows 21 to 39 of the source",
                "table 'comes': the source has none")
        self.assertEqual(changed.not_taken, left)
        for said in (*left, "'run' goes on at step 3", "grown: grows"):
            self.assertIn(said, str(changed))
        for name, rows in (("grows", 25), ("shrinks", 21), ("stays", 33)):
            self.check_same(made, source, name, rows)
        fresh = self.client.declare(config(self.name + "_fresh", self.CHANGED))  # initial values are of the seed, and of the names of tables and rows
        np.testing.assert_array_equal(made.table("grows")[25:], fresh.table("grows")[25:])
        np.testing.assert_array_equal(made.table("grows", slot="accumulator")[25:], np.full((22, DIM), 0.1, np.float32))
        self.check_same(made, fresh, "comes", 26)
        self.assertGreater(fresh.table("grows")[25:].std(), 0.3)
        for name, values in before.items():
            np.testing.assert_array_equal(source.table(name), values)
        self.assertEqual((heard[-1].bytes, heard[-1].total_bytes), (4 * DIM * (2 * (25 + 21 + 33) + 22),) * 2)
        self.assertEqual({one.name for one in self.client.models()} & {self.name, self.name + "_2"}, {self.name, self.name + "_2"})
        self.assertFalse([one.name for one in self.client.models() if "first_rows" in one.name])

        # Again, as in the next run of the script: it is found as it is, even where the source is there no more.
        made.assign_rows("stays", [1], np.full((1, DIM), 9))
        again = self.client.change_model(self.name, wanted, groups=["run"])
        self.assertEqual((again.created, again.model.id, again.model.read_rows("stays", [1])[0, 0]), (False, made.id, 9))
        self.assertIn("nothing was copied", str(again))
        self.client.drop_model(self.name)
        gone = self.client.change_model(self.name, wanted, groups=["run"])
        self.assertEqual((gone.created, gone.model.id), (False, made.id))
        with self.assertRaisesRegex(emberd.AlreadyExists, "table 'stays' is not that of model"):
            self.client.change_model(self.name, config(self.name + "_2", {**self.CHANGED, "stays": 34}))
        with self.assertRaises(emberd.NotFound):
            self.client.change_model(self.name, config(self.name + "_3", self.CHANGED))

    def test_training_goes_on_as_if_nothing_had_changed(self):
        """With an optimizer that counts steps: those of the group go along."""
        adam, tables = emberd.Adam(learning_rate=0.1, bias_correction=True), {"t": 25, "u": 25}
        source = self.trained(tables, optimizer=adam)
        changed = self.client.change_model(self.name, config(self.name + "_2", {"t": 40, "u": 25, "v": 25}, adam), groups=["run", "never"])
        self.assertEqual(dict(changed.groups), {"run": 3, "never": 0})
        again = self.client.change_model(self.name, config(self.name + "_2", {"t": 40, "u": 25, "v": 25}, adam), groups=["run"])
        self.assertEqual(dict(again.groups), {"run": 3})
        for model in (source, changed.model):
            with model.train("run") as stream:
                self.assertEqual(stream.next_step, 3)
                for number in range(3, 6):
                    step(stream, tables, number)
        for table in tables:
            self.check_same(changed.model, source, table, 25)
        # The new one goes its own way: what the source does later does not move its steps.
        with source.train("run") as stream:
            step(stream, tables, 6)
        again = self.client.change_model(self.name, config(self.name + "_2", {"t": 40, "u": 25, "v": 25}, adam), groups=["run"])
        self.assertEqual(dict(again.groups), {"run": 6})
        forgotten = self.client.change_model(source, config(self.name + "_3", tables, adam))
        self.assertEqual(forgotten.not_taken, tuple(f"table '{name}': the number of steps, which its optimizer counts: no group is named" for name in tables))

    def test_nobody_sees_it_before_it_is_whole_and_a_failure_is_repeated(self):
        source, other = self.trained(self.TABLES), self.cluster.connect(deadline=0.2)
        self.addCleanup(other.close)
        wanted, said = config(self.name + "_2", self.CHANGED), []
        not_whole = emberd.Unavailable, emberd.DeadlineExceeded, emberd.ResourceExhausted  # the last where the server is very busy

        def fails(_):
            try:
                other.model(self.name + "_2")
            except not_whole as error:
                said.append(str(error))
            if len(said) == 18:  # in the middle of the new rows
                raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.client.change_model(source, wanted, progress=fails)
        self.assertEqual(len(said), 18)
        with self.assertRaises(not_whole):
            other.model(self.name + "_2")
        changed = self.client.change_model(source, wanted)
        self.assertTrue(changed.created)
        for name, rows in (("grows", 25), ("shrinks", 21), ("stays", 33)):
            self.check_same(changed.model, source, name, rows)

    def test_what_would_be_lost_is_refused(self):
        source = self.trained({"t": 25, "u": 25})
        names = [one.name for one in self.client.models()]
        for wanted, said in ((config(self.name + "_2", {"t": (25, 16), "u": 25}), "table 't': the source has embedding_dim 8, not 16"),
                             (config(self.name + "_2", {"t": 25, "u": 25}, emberd.SGD()), "table 't': slots, for its optimizer is sgd, and that of the source adagrad"),
                             (config(self.name, {"t": 30}), "the source has it; the changed model needs another one"),
                             (config(self.name + "_2", {"t": 0}), "vocabulary_size: 0"),
                             (config(self.name + "_2", {"t": 30, "u": 25}, initializer=emberd.config.Assigned()), r"table 't': initializer: Assigned\(\) is not allowed for rows"),
                             (config(self.name + "_2", {"t": 25, "v": 25}, initializer=emberd.config.Assigned()), r"table 'v': initializer: Assigned\(\) is not allowed for rows")):
            with self.assertRaisesRegex(ValueError, said):
                self.client.change_model(source, wanted)
        for arguments in ((5, wanted), (source, "x"), (source, wanted, "run")):
            with self.assertRaises(TypeError):
                self.client.change_model(*arguments[:2], groups=arguments[2] if len(arguments) > 2 else ())
        self.assertEqual([one.name for one in self.client.models()], names)
        sgd = self.client.change_model(source, config(self.name + "_2", {"t": 25, "u": (25, 16)}, emberd.SGD()), strict=False)
        self.assertEqual(sgd.not_taken, ("table 't': slots, for its optimizer is sgd, and that of the source adagrad", "table 'u': the source has embedding_dim 8, not 16"))
        np.testing.assert_array_equal(sgd.model.table("t"), source.table("t"))
        self.assertGreater(sgd.model.table("u").std(), 0.3)

    def test_new_rows_of_a_function_and_of_a_table_of_16_bits(self):
        def rows(offset, shape):
            return offset + np.arange(shape[0])[:, None] + np.zeros(shape)

        source = self.trained({"t": 25, "u": 25}, storage_dtype="bfloat16")
        wanted = config(self.name + "_2", {"t": 47, "u": 47}, storage_dtype="bfloat16")
        wanted.tables[0] = emberd.TableConfig("t", 47, DIM, initializer=rows)
        made = self.client.change_model(source, wanted).model
        for table in "tu":
            self.check_same(made, source, table, 25)
        np.testing.assert_array_equal(made.table("t")[25:, 0], np.arange(25, 47))
        fresh = self.client.declare(config(self.name + "_fresh", {"u": 47}, storage_dtype="bfloat16"))
        np.testing.assert_array_equal(made.table("u")[25:], fresh.table("u")[25:])

    def test_several_clients_change_it_at_once(self):
        """As the ranks of a trainer do: one makes it, and the others wait."""
        source, wanted, made = self.trained({"grows": 25, "stays": 33}), config(self.name + "_2", {"grows": 147, "stays": 33, "comes": 26}), []

        def change():
            with self.cluster.connect() as client:
                changed = client.change_model(self.name, wanted)
                made.append((changed.created, changed.model.table("grows")))

        threads = [threading.Thread(target=change) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fresh = self.client.declare(config(self.name + "_fresh", {"grows": 147})).table("grows")
        self.assertEqual(sorted(created for created, _ in made), [False, False, True])
        for _, rows in made:
            np.testing.assert_array_equal(rows, np.concatenate([source.table("grows"), fresh[25:]]))
        self.assertFalse([one.name for one in self.client.models() if "first_rows" in one.name])

    def test_it_is_made_in_parts(self):
        source, largest = self.trained(self.TABLES), []
        assign = emberd.Model.assign_rows

        def assigned(model, table, ids, values, *, slot=""):
            largest.append(values.nbytes)
            return assign(model, table, ids, values, slot=slot)

        with unittest.mock.patch.object(emberd.Model, "assign_rows", assigned):
            self.client.change_model(source, config(self.name + "_2", self.CHANGED))
        self.assertEqual(max(largest), 10 * 4 * DIM)

    def test_what_a_process_left_that_was_killed(self):
        """A model that makes first rows, of another size; and one of somebody else that has its name, and stays."""
        source, wanted = self.trained({"t": 25}), config(self.name + "_2", {"t": 47})
        alone = f"{self.name}_2"[:60] + ".t.first_rows"
        self.client.declare(emberd.ModelConfig(alone, [emberd.TableConfig("t", 9, DIM, optimizer="none")], [emberd.FeatureConfig("rows", "t")]))
        self.assertTrue(self.client.change_model(source, wanted).created)
        self.assertNotIn(alone, [one.name for one in self.client.models()])
        self.client.drop_model(wanted.name)
        self.client.declare(config(alone, {"t": 9}))
        with contextlib.suppress(emberd.AlreadyExists):
            self.client.change_model(source, wanted)
            self.fail("it has taken somebody's model")
        self.assertEqual(self.client.model(alone).tables["t"].vocabulary_size, 9)

    def test_a_model_of_another_cluster(self):
        source = self.trained({"t": 25})
        with emberd.local(new=True) as cluster, cluster.connect() as client:
            made = client.change_model(source, config(self.name, {"t": 30})).model
            self.check_same(made, source, "t", 25)

    def test_a_changed_model_is_saved_and_restored(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder, new=True) as cluster, cluster.connect() as client:
            source = client.declare(config("old", {"t": 25}))
            source.load_table("t", np.full((25, DIM), 3))
            made = client.change_model(source, config("new", {"t": 30, "u": 25})).model
            rows = made.table("t")
            made.save_checkpoint("whole")
            made.load_table("t", np.zeros((30, DIM)))
            client.drop_model("new")
            client.drop_model("old")
            np.testing.assert_array_equal(client.restore("new", "whole").table("t"), rows)
            self.assertFalse(client.change_model("old", config("new", {"t": 30, "u": 25})).created)

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
    def test_modules_go_on(self):
        import torch

        import emberd.torch

        def make(tables, model, **options):
            made = emberd.torch.EmbeddingBagCollection([emberd.TableConfig(name, rows, DIM, initializer=NORMAL) for name, rows in tables.items()],
                                                       model=model, group="run", optimizer=emberd.Adam(learning_rate=0.1, bias_correction=True), **options)
            self.addCleanup(made.finish)
            return made

        def train(module, numbers):
            optimizer = module.optimizer()
            for number in numbers:
                ids = {name: torch.randint(0, 20, (4, 2), generator=torch.Generator().manual_seed(number)) for name in module.model.features}
                sum(one.square().sum() for one in module(ids).values()).backward()
                optimizer.step()
                optimizer.zero_grad()
            module.finish()

        old = make({"t": 25}, self.name, client=self.client)
        train(old, range(3))
        new = make({"t": 40, "u": 25}, self.name + "_other", client=self.client)  # for its config
        changed = self.client.change_model(old.model, emberd.ModelConfig(self.name + "_2", new.config.tables, new.config.features, new.config.optimizer), groups=["run"])
        new = make({"t": 40, "u": 25}, changed.model)
        self.assertEqual(new.next_step, 3)
        for module in (old, new):
            train(module, range(3, 6))
        self.check_same(new.model, old.model, "t", 25)

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
    def test_states_of_before_the_change_are_loaded(self):
        """As they are, where the tables go on from that step; else the error says what to write."""
        import torch

        import emberd.torch

        def make(tables, model, group="run", **options):
            made = emberd.torch.EmbeddingBagCollection([emberd.TableConfig(name, rows, DIM, initializer=NORMAL) for name, rows in tables.items()],
                                                       model=model, group=group, optimizer=emberd.SGD(learning_rate=0.5), **options)
            self.addCleanup(made.finish)
            return torch.nn.ModuleDict({"rows": made, "dense": torch.nn.Linear(DIM, 1)}), made.optimizer(lr=0.5)

        net, sparse = make({"t": 25, "gone": 5}, self.name, client=self.client)
        for group in sparse.param_groups:
            group["lr"] = 0.25
        net["rows"]({"t": torch.tensor([1]), "gone": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        state, rates = net.state_dict(), sparse.state_dict()
        wanted = config(self.name + "_2", {"t": 40, "u": 25}, emberd.SGD(learning_rate=0.5))
        self.client.change_model(self.name, wanted)
        with self.assertRaisesRegex(ValueError, f"of model '{self.name}', but this is model '{self.name}_2'.*client.change_model\\('{self.name}', config, groups=\\['run'\\]"):
            make({"t": 40, "u": 25}, self.client.model(self.name + "_2"))[0].load_state_dict(state)
        model = self.client.change_model(self.name, wanted).model
        forgotten, _ = make({"t": 40, "u": 25}, model)
        forgotten.load_state_dict(state)
        with self.assertRaisesRegex(emberd.RowsLost, f"is at step 1.* are at step 0.*client.change_model\\('{self.name}', config, groups=\\['run'\\]"):
            forgotten["rows"].next_step
        model = self.client.change_model(self.name, wanted, groups=["run"]).model
        net, sparse = make({"t": 40, "u": 25}, model)
        self.assertEqual(str(net.load_state_dict(state)), "<All keys matched successfully>")
        sparse.load_state_dict(rates)
        self.assertEqual([(one["table"], one["lr"]) for one in sparse.param_groups], [("t", 0.25), ("u", 0.25)])  # they are stacked
        for again in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            copied = again(make({"t": 40, "u": 25}, model)[0])
            self.addCleanup(copied["rows"].finish)
            self.assertEqual(copied["rows"].model._source, self.name)
            self.assertEqual(str(copied.load_state_dict(state)), "<All keys matched successfully>")
            copied["rows"].optimizer().load_state_dict(rates)
        self.assertEqual(net["rows"].next_step, 1)
        net["rows"]({"t": torch.tensor([1]), "u": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        for late in (net, make({"t": 40, "u": 25}, model)[0]):
            with self.assertRaisesRegex((RuntimeError, emberd.RowsLost), "is at step 1.* are at step 2"):
                late.load_state_dict(state)
                late["rows"].next_step
        with self.assertRaisesRegex(ValueError, "of group 'run', but this is group 'other'"):
            make({"t": 40, "u": 25}, model, group="other")[0].load_state_dict(state)
        with self.assertRaisesRegex(ValueError, r"tables \['t', 'gone'\], but these are \['t'\].*client.change_model"):
            make({"t": 25}, self.name + "_3", client=self.client)[1].load_state_dict(rates)
        self.client.drop_model(self.name)
        net, _ = make({"t": 40, "u": 25}, self.client.change_model(self.name, wanted).model)  # in a later run, where the source is gone
        self.assertEqual(net["rows"].model._source, self.name)

    @unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
    def test_the_example(self):
        done = subprocess.run([sys.executable, "-B", EXAMPLE], capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        self.assertRegex(done.stdout, r"grown: items\n +added: shops")
        first, goes_on, last, anew = (float(number) for number in done.stdout.split("losses: ")[1].split())
        self.assertTrue(goes_on < first and last <= goes_on < anew, done.stdout)


class CheckpointTest(Case):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        cluster = emberd.local(data=folder.name, new=True)
        self.addCleanup(cluster.close)
        self.client = cluster.connect()
        self.addCleanup(self.client.close)
        self.saved = self.client.declare(config("run", {"t": 25, "u": 30, "v": 25, "wide": 25}))
        for table in self.saved.tables.values():
            shape = table.vocabulary_size, DIM
            self.saved.load_table(table.name, np.full(shape, 3), {"accumulator": np.full(shape, 5)})
        self.saved.save_checkpoint("three")

    def test_the_tables_that_fit(self):
        new = self.client.declare(config("new", {"t": 47, "u": 21, "x": 25, "wide": (25, 16)}))
        first = {name: new.table(name) for name in new.tables}
        left = ["table 'v' of the source", "table 't': rows 25 to 46, which the source does not have", "table 't': slots, for its optimizer is adagrad, and that of the source none",
                "table 'u': rows 21 to 29 of the source", "table 'u': slots, for its optimizer is adagrad, and that of the source none", "table 'x': the source has none",
                "table 'wide': the source has embedding_dim 8, not 16"]
        with self.assertRaisesRegex(ValueError, "tables: x, v, t, u, wide: not allowed with strict"):
            new.restore_tables("three", of="run", strict=True)
        np.testing.assert_array_equal(new.table("t"), first["t"])
        self.assertEqual(new.restore_tables("three", of="run"), left)
        self.assertEqual((new.table("t")[:25].min(), new.table("t")[:25].max(), new.table("u").min()), (3, 3, 3))
        for name, rows in (("t", slice(25, None)), ("x", slice(None)), ("wide", slice(None))):
            np.testing.assert_array_equal(new.table(name)[rows], first[name][rows])
        self.assertEqual(new.table("t", slot="accumulator").max(), np.float32(0.1))
        self.assertEqual(sorted(one.name for one in self.client.models()), ["new", "run"])

    def test_some_tables_of_the_model_itself(self):
        for name in self.saved.tables:
            self.saved.load_table(name, np.zeros((self.saved.tables[name].vocabulary_size, DIM)))
        self.assertEqual(self.saved.restore_tables(tables=["u"], strict=True), ["table 'u': slots, for its optimizer is adagrad, and that of the source none"])
        self.assertEqual([self.saved.table(name).max() for name in self.saved.tables], [0, 3, 0, 0])
        self.assertEqual(self.saved.table("u", slot="accumulator").min(), 5)
        for arguments, error in (({"tables": ["x"]}, emberd.NotFound), ({"tables": [""]}, emberd.NotFound),
                                 ({"tables": "u"}, TypeError), ({"name": "none"}, emberd.NotFound), ({"of": "none"}, emberd.NotFound)):
            with self.assertRaises(error):
                self.saved.restore_tables(**arguments)
        self.assertEqual([one.name for one in self.client.models()], ["run"])

    def test_with_slots_by_a_model_that_is_changed(self):
        """As the text of restore_tables says."""
        self.client.drop_model("run")
        changed = self.client.change_model(self.client.restore("run", "three"), config("new", {"t": 47}))
        self.assertEqual((changed.model.table("t")[:25].min(), changed.model.table("t", slot="accumulator")[:25].min()), (3, 5))
        self.assertIs(type(changed), _changing.ChangedModel)


if __name__ == "__main__":
    main()
