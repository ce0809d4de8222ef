"""A script for torchrec runs on a cluster by changed imports only, and computes what it computed.

What this would catch: ids of one key read for another, pooling or an optimizer that is not torchrec's, and an update that is
made twice or not at all.
"""

import copy
import enum
import os
import pickle
import re
import subprocess
import sys
import tempfile
import unittest.mock
import warnings

import numpy as np

from cluster import ClusterTest, emberd, main

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed (deploy/packages.txt: python3-torch)")
    sys.exit(77)

import emberd.compat.torchrec as compat  # noqa: E402
import emberd.torch  # noqa: E402

warnings.filterwarnings("ignore", category=UserWarning, module="torch")
HERE = os.path.dirname(os.path.abspath(__file__))
FORWARD, TEN_UPDATES = 1e-6, 1e-5  # what client/python/README.md says


def script(module):
    """The script with the imports of another module, and nothing else changed."""
    with open(os.path.join(HERE, "torchrec_script.py"), encoding="utf-8") as file:
        source = re.sub(r"^from torchrec[\w.]* import", f"from {module} import", file.read(), flags=re.MULTILINE)
    names = {"__name__": "script"}
    exec(compile(source, "torchrec_script.py", "exec"), names)
    return names


class ScriptTest(ClusterTest):
    def test_it_computes_the_same(self):
        try:
            import torchrec  # noqa: F401
            other = "torchrec"
        except ImportError:
            other = "plain_torchrec"
        for name in script(other)["OPTIMIZERS"]:
            compat.use(self.client, model="script_" + re.sub(r"\W", "_", name))
            ours, theirs = script("emberd.compat.torchrec")["main"](name), script(other)["main"](name)
            for key, values in theirs[0].items():
                torch.testing.assert_close(ours[0][key], values, atol=FORWARD, rtol=0, msg=f"{name}: {key}")
            for mine, loss in zip(ours[1], theirs[1]):
                self.assertAlmostEqual(mine, loss, delta=TEN_UPDATES, msg=name)
            self.assertEqual(list(ours[2]), list(theirs[2]))
            for key, values in theirs[2].items():
                torch.testing.assert_close(ours[2][key], values, atol=TEN_UPDATES, rtol=TEN_UPDATES,
                                           msg=lambda text: f"{name}: {key}: {text}")  # noqa: B023
            torch.testing.assert_close(ours[3], theirs[3], atol=TEN_UPDATES, rtol=TEN_UPDATES)

    def test_a_cluster_by_the_environment(self):
        code = ("import torch; from emberd.compat.torchrec import *\n"
                "ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name='t', embedding_dim=2, num_embeddings=4,\n"
                "    init_fn=torch.nn.init.ones_)])\n"
                "found = ebc(KeyedJaggedTensor(['t'], torch.tensor([1, 2]), lengths=torch.tensor([2])))\n"
                "print(found['t'].tolist())")
        for address in (self.cluster.address, ""):  # or a cluster of its own
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "EMBERD_ADDRESS": address}
            done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=600,
                                  env=environment)
            self.assertEqual(done.stdout, "[[2.0, 2.0]]\n", done.stderr)


class CollectionTest(ClusterTest):
    def make(self, **options):
        compat.use(self.client, model=self.id().split(".")[-1])
        table = {"name": "t", "embedding_dim": 2, "num_embeddings": 8, "init_fn": torch.nn.init.zeros_, **options}
        return compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(**table)])

    def look_up(self, ebc, *ids, weights=None):
        return ebc(compat.KeyedJaggedTensor(["t"], torch.tensor(ids), weights, lengths=torch.tensor([len(ids)])))["t"]

    def test_what_would_not_train_is_refused(self):
        ebc = self.make()
        with self.assertRaisesRegex(RuntimeError, "'t' has no optimizer"):
            self.look_up(ebc, 1).sum().backward()
        with self.assertRaisesRegex(RuntimeError, "used already"):
            compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        for kind, options in ((torch.optim.LBFGS, {}), (torch.optim.SGD, {"lr": 1.0, "momentum": 0.5}), (torch.optim.SGD, {"lr": -1.0}),
                              (torch.optim.Adagrad, {"eps": -1.0}), (torch.optim.Adagrad, {"initial_accumulator_value": -1.0})):
            with self.assertRaisesRegex(ValueError, "not allowed"):
                compat.apply_optimizer_in_backward(kind, ebc.parameters(), options)
        with self.assertRaisesRegex(ValueError, "EmbeddingBagCollection"):
            compat.apply_optimizer_in_backward(torch.optim.SGD, [torch.nn.Parameter(torch.ones(1))], {"lr": 1.0})

    def test_one_backward_is_one_update(self):
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        found = self.look_up(ebc, 1, 1)
        found.sum().backward(retain_graph=True)
        with self.assertRaisesRegex(RuntimeError, "already"):
            found.sum().backward()
        self.look_up(ebc, 1)  # without its backward: skipped
        self.look_up(ebc, 1).sum().backward()
        self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][1].tolist(), [-3, -3])
        ebc.finish()

    def test_a_collection_that_is_called_twice_says_so(self):
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        first, second = self.look_up(ebc, 1), self.look_up(ebc, 2)
        with self.assertRaisesRegex(RuntimeError, "updated or skipped already: each call allows one backward"):
            (first + second).sum().backward()
        self.look_up(ebc, 3).sum().backward()
        self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][:, 0].tolist()[3:], [-1, 0, 0, 0, 0])
        ebc.finish()

    def test_a_refused_update_is_skipped(self):
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        for k in range(5):
            found = self.look_up(ebc, 1)
            if k in (2, 4):
                with self.assertRaisesRegex(ValueError, "finite"):
                    (found.sum() * float("nan")).backward()
            else:
                found.sum().backward()
            if k == 3:
                with self.assertRaisesRegex(IndexError, "8"):
                    self.look_up(ebc, 8)
        ebc.finish()
        self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][1].tolist(), [-3, -3])
        self.look_up(ebc, 1).sum().backward()
        self.assertEqual(ebc._steps.next_step, 5)  # that of the last refused update was left

    def test_an_interrupted_backward_is_gone_on_from(self):
        for again in (False, True):
            compat.use(self.client, model=f"interrupted_{again}")
            ebc = compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=8, init_fn=torch.nn.init.zeros_)])
            compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
            found = self.look_up(ebc, 1)
            with unittest.mock.patch("emberd.train.TrainStream.receive_update", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
                found.sum().backward(retain_graph=True)
            if again:
                found.sum().backward()
            self.look_up(ebc, 1).sum().backward()
            self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][1].tolist(), [-2, -2])
            self.assertEqual(ebc._steps.next_step, 2)
            ebc.finish()

    def test_a_call_behind_one_that_was_interrupted(self):
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        receive = unittest.mock.patch("emberd.train.TrainStream.receive_lookup", side_effect=KeyboardInterrupt)
        with receive, self.assertRaises(KeyboardInterrupt):
            self.look_up(ebc, 1)
        for _ in range(2):
            self.look_up(ebc, 2).sum().backward()
        ebc.finish()
        self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][:3, 0].tolist(), [0, 0, -2])

    def test_an_init_fn_that_fails_leaves_no_table_of_other_rows(self):
        calls = []

        def init_fn(weight):
            calls.append(weight)
            if len(calls) == 1:
                raise OSError("no such file")
            return torch.ones(8, 3) if len(calls) == 2 else weight.fill_(7)

        ebc = self.make(init_fn=init_fn)
        with self.assertRaisesRegex(OSError, "no such file"):
            self.look_up(ebc, 1)
        with self.assertRaisesRegex(ValueError, r"table 't': init_fn: the shape \[8, 3\] is not allowed; it must be \[8, 2\]"):
            self.look_up(ebc.eval(), 1)
        for _ in range(2):
            self.assertEqual(self.look_up(ebc, 1).tolist(), [[7, 7]])
            ebc = self.make(init_fn=init_fn).eval()
        self.assertEqual(len(calls), 3)

    def test_a_model_of_before_goes_on(self):
        """Its description had no rows of its own, which were assigned after it was declared."""
        before = self.make(init_fn=None).eval()
        before._declared().assign_rows("t", [1], np.ones((1, 2)))
        self.assertEqual(self.look_up(self.make().eval(), 1).tolist(), [[1, 1]])
        with self.assertRaises(emberd.AlreadyExists):
            self.look_up(self.make(num_embeddings=9), 1)

    def test_ddp_goes_around_the_dense_part(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
            try:
                ebc = self.make()
                compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
                dense = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
                dense(self.look_up(ebc, 1)).sum().backward()
                self.assertEqual(ebc._steps.next_step, 1)
                ebc.finish()
            finally:
                torch.distributed.destroy_process_group()

    def test_what_is_missing_is_named(self):
        with self.assertRaisesRegex(ValueError, "feature 't' is missing; there are ids of u"):
            self.make()(compat.KeyedJaggedTensor(["u"], torch.tensor([1]), lengths=torch.tensor([1])))
        with self.assertRaisesRegex(TypeError, "features: a dict is not allowed; give a KeyedJaggedTensor"):
            self.make()({"t": torch.tensor([1])})
        with self.assertRaisesRegex(ValueError, r"tables\[0\]: an EmbeddingConfig is not allowed.*give an EmbeddingBagConfig"):
            compat.EmbeddingBagCollection([compat.EmbeddingConfig(8, 2, "t")])
        bags = compat.EmbeddingBagCollection(iter([compat.EmbeddingBagConfig(8, 2, "t")]))
        self.assertEqual(self.look_up(bags.eval(), 1).shape, (1, 2))

    def test_weights(self):
        ebc = self.make(init_fn=torch.nn.init.ones_)
        ebc.eval()
        weights = torch.tensor([0.5, 2.0])
        self.assertEqual(self.look_up(ebc, 1, 2, weights=weights).tolist(), [[2, 2]])
        ebc._is_weighted = True
        self.assertEqual(self.look_up(ebc, 1, 2, weights=weights).tolist(), [[2.5, 2.5]])
        with self.assertRaisesRegex(ValueError, "is_weighted"):
            self.look_up(ebc, 1, 2)
        with self.assertRaisesRegex(ValueError, "weights: they require a gradient.*detach"):
            self.look_up(ebc, 1, 2, weights=weights.requires_grad_())
        mean = compat.EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=8, pooling=compat.PoolingType.MEAN)
        with self.assertRaisesRegex(ValueError, "table 't': PoolingType.MEAN is not allowed with is_weighted"):
            compat.EmbeddingBagCollection([mean], is_weighted=True)
        mean.pooling = enum.Enum("PoolingType", {"MEAN": "MEAN"}).MEAN  # as of torchrec's own config
        with self.assertRaisesRegex(ValueError, "PoolingType.MEAN is not allowed with is_weighted"):
            compat.EmbeddingBagCollection([mean], is_weighted=True)

    def test_a_change_of_a_parameter_in_place_is_not_lost_in_silence(self):
        """As of rows that were trained before, and are copied into it."""
        ebc = self.make()
        for one in (ebc, copy.deepcopy(ebc), pickle.loads(pickle.dumps(ebc))):
            weight = one.embedding_bags["t"].weight
            for change in (lambda: weight.data.copy_(torch.ones(8, 2)), lambda: torch.nn.init.normal_(weight), lambda: weight.detach()[3].fill_(1),  # noqa: B023
                           lambda: weight.__setitem__(0, 1.0), lambda: setattr(weight, "data", torch.ones(8, 2)),  # noqa: B023
                           lambda: setattr(one.embedding_bags["t"], "weight", torch.nn.Parameter(torch.ones(8, 2)))):  # noqa: B023
                with self.assertRaisesRegex(RuntimeError, "weight: .* would be lost; load_state_dict of the collection .* init_fn"), torch.no_grad():
                    change()
            self.assertEqual((tuple(weight.shape), type(weight), weight.is_leaf), ((8, 2), type(ebc.embedding_bags["t"].weight), True))
            compat.apply_optimizer_in_backward(torch.optim.SGD, one.parameters(), {"lr": 1.0})
            self.look_up(one.train(), 1)
            one.finish()

    def test_parts_of_a_parameter_are_as_it(self):
        weight = self.make().embedding_bags["t"].weight
        for parts in (torch.unbind(weight), weight.unbind(1), weight.split(3), weight.chunk(2), torch.tensor_split(weight, 2), list(weight)):
            with self.assertRaisesRegex(RuntimeError, "would be lost"), torch.no_grad():
                parts[0].fill_(1)

    def test_what_a_parameter_has_no_values_for_is_refused(self):
        """As a penalty of all parameters, whose gradient the tables would not get."""
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        for one in (ebc, copy.deepcopy(ebc)):
            weight = one.embedding_bags["t"].weight
            for use in (lambda: weight.pow(2).sum().backward(), lambda: torch.ones(()) + weight.pow(2).sum(), lambda: weight.sum().item(),  # noqa: B023
                        lambda: torch.ones(1, 2) @ weight.T, lambda: torch.nn.functional.embedding(torch.tensor([1]), weight),  # noqa: B023
                        weight.tolist, weight.cpu):
                with self.assertRaisesRegex(RuntimeError, r"weight: rows are on the cluster, so that this parameter has no values.* state_dict\(\)"):
                    use()
            self.assertIsNone(weight.grad)
        with self.assertRaisesRegex(RuntimeError, "table 't': it cannot be called; call the collection"):
            ebc.embedding_bags["t"](torch.tensor([1]))
        ebc.requires_grad_(False)
        self.look_up(ebc.requires_grad_(True), 1).sum().backward()
        self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][1].tolist(), [-1, -1])
        ebc.finish()

    def test_another_parameter_for_one_call_is_refused(self):
        try:
            from torch.func import functional_call
        except ImportError:
            from torch.nn.utils.stateless import functional_call
        ebc = self.make().eval()
        batch = compat.KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
        self.assertEqual(functional_call(ebc, dict(ebc.named_parameters()), (batch,))["t"].tolist(), [[0, 0]])
        with self.assertRaisesRegex(RuntimeError, "would be lost"):
            functional_call(ebc, {"embedding_bags.t.weight": torch.ones(8, 2)}, (batch,))
        self.assertEqual(self.look_up(ebc, 1).tolist(), [[0, 0]])

    def test_an_average_of_tables_is_refused_at_once(self):
        class Net(torch.nn.Module):
            def __init__(self, tables):
                super().__init__()
                self.tables, self.dense = tables, torch.nn.Linear(2, 1)

        net = Net(self.make())
        average = torch.optim.swa_utils.AveragedModel(net)
        with self.assertRaisesRegex(RuntimeError, "would be lost.*the dense part alone"):
            average.update_parameters(net)
        with self.assertRaisesRegex(RuntimeError, "would be lost.*the dense part alone"):  # one of the user's own
            for mine, its in zip(copy.deepcopy(net).parameters(), net.parameters()):
                mine.detach().copy_(its.detach())
        torch.optim.swa_utils.AveragedModel(net.dense).update_parameters(net.dense)

    def test_activations_may_be_changed_in_place(self):
        ebc = self.make(init_fn=torch.nn.init.ones_)
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        found = ebc(compat.KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))).values()
        found.mul_(3).sum().backward()
        self.assertEqual((found.tolist(), ebc.state_dict()["embedding_bags.t.weight"][1].tolist()), ([[3, 3]], [-2, -2]))
        ebc.finish()

    def test_tables_get_new_first_rows(self):
        compat.use(self.client, model="first_rows")
        ebc = compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=8, init_fn=torch.nn.init.ones_),
                                             compat.EmbeddingBagConfig(name="u", embedding_dim=2, num_embeddings=8, weight_init_min=3.0, weight_init_max=4.0)])
        both = {f"embedding_bags.{name}.weight": torch.zeros(8, 2) for name in "tu"}
        for one in (ebc, copy.deepcopy(ebc)):
            one.load_state_dict(both)
            with unittest.mock.patch("emberd._loading.STRETCH_BYTES", 3 * 8):  # 3 rows
                one.reset_parameters()
            t, u = one.state_dict().values()
            self.assertTrue((t == 1).all() and (u >= 3).all() and (u <= 4).all() and len(u.unique()) > 8, u)
        ebc.load_state_dict(both)
        ebc.embedding_bags["t"].reset_parameters()
        self.assertEqual([rows.mean() for rows in ebc.state_dict().values()], [1, 0])

    def test_bounds_of_first_rows_are_torchrecs(self):
        """Would catch: rows that begin near 0, as torchrec's did while it divided by num_embeddings. Tables of then are found."""
        compat.use(self.client, model="bounds_of_then")
        config = {"name": "t", "embedding_dim": 4, "num_embeddings": 10000}
        then = compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(weight_init_min=-0.01, weight_init_max=0.01, **config)])
        for largest, name in ((0.01, "bounds_of_then"), (0.5, "bounds_of_now")):
            compat.use(self.client, model=name)
            if name == "bounds_of_then":
                self.look_up(then.eval(), 1)
            rows = compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(**config)]).state_dict()["embedding_bags.t.weight"]
            self.assertTrue(0.9 * largest < rows.abs().max() <= largest, rows.abs().max())

    def test_names_of_tables_are_checked_at_once(self):
        for kind, of in ((compat.EmbeddingBagCollection, compat.EmbeddingBagConfig), (compat.EmbeddingCollection, compat.EmbeddingConfig)):
            for tables, said in (([of(8, 2, "t"), of(8, 2, "u"), of(9, 2, "t", feature_names=["x"])], r"tables\[2\]: name: 't' is not allowed; .* tables\[0\]"),
                                 ([of(8, 2, feature_names=["x"])], r"tables\[0\]: name: '' is not allowed"),
                                 ([of(8, 2, "t", feature_names=["x", "x"])], r"tables\[0\]: feature_names: 'x' is not allowed twice"),
                                 ([], "tables: an empty list is not allowed")):
                with self.assertRaisesRegex(ValueError, said):
                    kind(tables)

    def test_a_copy_with_another_optimizer_says_so(self):
        ebc = self.make()
        other = copy.deepcopy(ebc)
        compat.apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 1.0})
        self.look_up(other.eval(), 1)
        with self.assertRaisesRegex(emberd.AlreadyExists, "first difference: .*optimizer"):
            self.look_up(ebc, 1)

    def test_epsilons_of_adagrad_that_one_sees(self):
        for place, options in enumerate(({"eps": 0.5}, {"eps": 1e-3, "initial_accumulator_value": 0.1}, {"eps": 1e-8}, {})):
            compat.use(self.client, model=f"epsilon_{place}")
            ebc = compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=8, init_fn=torch.nn.init.ones_)])
            compat.apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1, **options})
            weight = torch.nn.Parameter(torch.ones(8, 2, dtype=torch.float64))
            plain = torch.optim.Adagrad([weight], lr=0.1, **options)
            for step in range(4):
                scale = 0.3 if place < 2 else 10.0 ** (step - 7)
                (self.look_up(ebc, 1, 1, 2).sum() * scale).backward()
                plain.zero_grad()
                (weight[[1, 1, 2]].sum() * scale).backward()
                plain.step()
            ebc.finish()
            torch.testing.assert_close(ebc.state_dict()["embedding_bags.t.weight"].double(), weight.detach(), rtol=0, atol=2e-6 if options else 2e-4)

    def test_tables_of_an_earlier_adagrad_are_trained_on(self):
        for formulas in ({torch.optim.Adagrad: compat._adagrad_below_root}, {}):
            with unittest.mock.patch.dict(compat._OPTIMIZERS, formulas):
                ebc = self.make()
                compat.apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 1.0, "initial_accumulator_value": 0.0, "eps": 1e-3})
            self.look_up(ebc, 1).sum().backward()
            ebc.finish()
        self.assertAlmostEqual(ebc.state_dict()["embedding_bags.t.weight"][1, 0].item(), -1 - 2 ** -0.5, places=5)

    def test_a_copy_says_that_its_rows_are_of_later_steps(self):
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        self.look_up(ebc, 1).sum().backward()
        best = copy.deepcopy(ebc).eval()
        self.look_up(ebc, 1).sum().backward()
        with self.assertWarnsRegex(UserWarning, "A copy of a module has no rows of its own"):
            self.look_up(best, 1)

    def test_ids_may_change_before_their_step_has_ended(self):
        ebc = self.make()
        compat.apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        ids = torch.tensor([1])
        found = ebc(compat.KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([1])))["t"]
        ids.fill_(2)  # a loader's buffer, with the next batch
        ebc._steps._leave()  # as a connection that is lost
        found.sum().backward()
        self.assertEqual(ebc.state_dict()["embedding_bags.t.weight"][:3, 0].tolist(), [0, -1, 0])

    def test_a_frozen_table_stays_bit_for_bit(self):
        for kind in (compat.EmbeddingBagCollection, compat.EmbeddingCollection):
            compat.use(self.client, model=f"frozen_{kind.__name__}")
            config = compat.EmbeddingBagConfig if kind is compat.EmbeddingBagCollection else compat.EmbeddingConfig
            tables = kind([config(name=name, embedding_dim=2, num_embeddings=8, init_fn=torch.nn.init.ones_) for name in "abc"])
            compat.apply_optimizer_in_backward(torch.optim.Adam, tables.parameters(), {"lr": 1.0})
            batch = compat.KeyedJaggedTensor(["a", "b", "c"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]))
            for frozen in ("", "b", "abc", ""):
                before = [rows.clone() for rows in tables.state_dict().values()]
                for name, parameter in zip("abc", tables.parameters()):
                    parameter.requires_grad_(name not in frozen)
                found = tables(batch)
                rows = [found[name] if kind is compat.EmbeddingBagCollection else found[name].values() for name in "abc"]
                self.assertEqual([row.tolist() for row in rows], [[old[id].tolist()] for old, id in zip(before, (1, 2, 3))])
                if frozen == "abc":
                    self.assertFalse(any(row.requires_grad for row in rows))
                else:
                    sum(row.sum() for row in rows).backward()
                changed = [name for name, old, new in zip("abc", before, tables.state_dict().values()) if not torch.equal(old, new)]
                self.assertEqual("".join(changed), "".join(name for name in "abc" if name not in frozen))
            tables.finish()

    def test_rows_that_are_not_pooled(self):
        compat.use(self.client, model="not_pooled")
        tables = [compat.EmbeddingConfig(name=name, embedding_dim=2, num_embeddings=8, feature_names=features, init_fn=lambda rows: torch.arange(16.0).reshape(8, 2))
                  for name, features in (("t", ["a", "b"]), ("u", ["a"]))]
        ec = compat.EmbeddingCollection(iter(tables), need_indices=True)
        self.assertEqual((ec.embedding_dim(), ec.need_indices(), ec.embedding_names_by_table(), ec.embedding_configs()), (2, True, [["a@t", "b"], ["a@u"]], tables))
        batch = compat.KeyedJaggedTensor(["b", "more", "a"], torch.tensor([5, 1, 7, 1, 1]), torch.ones(5), lengths=torch.tensor([0, 1, 1, 1, 2, 0]))
        with self.assertRaisesRegex(RuntimeError, "table 't' has no optimizer"):
            ec(batch)["b"].values().sum().backward()
        found = copy.deepcopy(ec).eval()(batch)
        self.assertEqual({name: (one.lengths().tolist(), one.values().tolist(), one.weights().tolist()) for name, one in found.items()},
                         {"a@t": ([2, 0], [[2, 3]] * 2, [1, 1]), "b": ([0, 1], [[10, 11]], [5]), "a@u": ([2, 0], [[2, 3]] * 2, [1, 1])})
        none = ec.eval()(compat.KeyedJaggedTensor(["a", "b"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(4, dtype=torch.int32)))
        self.assertEqual({(tuple(one.values().shape), one.lengths().dtype) for one in none.values()}, {((0, 2), torch.int32)})
        with self.assertRaisesRegex(ValueError, "feature 'b' is missing; there are ids of a"):
            ec(compat.KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])))
        for wrong, said in ((compat.EmbeddingBagConfig(8, 2, "v"), r"tables\[1\]: an EmbeddingBagConfig is not allowed.*give an EmbeddingConfig"),
                            (compat.EmbeddingConfig(8, 3, "v"), r"tables\[1\]: embedding_dim: 3 of table 'v' is not allowed beside 2 of table 't'")):
            with self.assertRaisesRegex(ValueError, said):
                compat.EmbeddingCollection([tables[0], wrong])

    def test_states_that_do_not_fit(self):
        ebc = self.make()
        with self.assertRaisesRegex(RuntimeError, r"shape \[2, 2\] is not allowed"):
            ebc.load_state_dict({"embedding_bags.t.weight": torch.zeros(2, 2)})
        with self.assertRaisesRegex(RuntimeError, "Missing key"):
            ebc.load_state_dict({})
        self.assertEqual([tuple(one.shape) for one in ebc.to("cpu").parameters()], [(8, 2)])

    def test_a_table_of_a_state_is_loaded_whole_or_not_at_all(self):
        ebc, key = self.make(), "embedding_bags.t.weight"
        weight = torch.arange(16, dtype=torch.bfloat16).reshape(8, 2)
        with unittest.mock.patch("emberd._loading.STRETCH_BYTES", 3 * 8):  # 3 rows
            ebc.load_state_dict({key: weight})
            bad = torch.full((8, 2), 7.0)
            bad[7, 1] = torch.nan
            with self.assertRaisesRegex(ValueError, r"weights\[7, 1\] is not finite"):
                ebc.load_state_dict({key: bad})
        torch.testing.assert_close(ebc.state_dict()[key], weight.float())


class JaggedTest(unittest.TestCase):
    def test_keys_are_taken_apart_and_put_together(self):
        whole = compat.KeyedJaggedTensor.from_offsets_sync(["a", "b"], torch.arange(5), torch.tensor([0, 2, 2, 3, 5]),
                                                           torch.arange(5) / 2)
        self.assertEqual((whole.stride(), whole.length_per_key(), whole.offset_per_key()), (2, [2, 3], [0, 2, 5]))
        self.assertEqual([one.tolist() for one in whole["b"].to_dense()], [[2], [3, 4]])
        self.assertEqual(whole["b"].weights().tolist(), [1.0, 1.5, 2.0])
        swapped = whole.permute([1, 0])
        self.assertEqual((swapped.keys(), swapped.values().tolist()), (["b", "a"], [2, 3, 4, 0, 1]))
        self.assertEqual(swapped.offsets().tolist(), [0, 1, 3, 5, 5])
        again = compat.KeyedJaggedTensor.concat(swapped.split([1, 1]))
        self.assertEqual((again.keys(), again.values().tolist()), (swapped.keys(), swapped.values().tolist()))
        self.assertEqual(again.to("cpu").weights().tolist(), swapped.weights().tolist())
        moved, plain = whole["b"].to("cpu"), compat.JaggedTensor(torch.arange(2), lengths=torch.tensor([2])).to("cpu", non_blocking=True)
        self.assertEqual((moved.values().tolist(), moved.lengths().tolist(), moved.weights().tolist(), plain.weights_or_none()), ([2, 3, 4], [1, 2], [1.0, 1.5, 2.0], None))
        twice = compat.KeyedJaggedTensor.concat([whole.permute([1, 1]), whole])
        self.assertEqual((twice.keys(), twice.values().tolist(), twice.length_per_key()), (["b", "b", "a", "b"], [2, 3, 4, 2, 3, 4, 0, 1, 2, 3, 4], [3, 3, 2, 3]))
        self.assertEqual(whole.permute([-1]).values().tolist(), [2, 3, 4])
        none, both = whole.split([0, 2])
        self.assertEqual((none.keys(), none.values().dtype, none.weights().tolist(), none.length_per_key(), none.offset_per_key()), ([], torch.int64, [], [], [0]))
        self.assertEqual((both.keys(), both.values().tolist()), (["a", "b"], [0, 1, 2, 3, 4]))
        with self.assertRaisesRegex(ValueError, r"lengths: \[1, 3\] samples are not allowed together"):
            compat.KeyedJaggedTensor.from_jt_dict({name: compat.JaggedTensor(torch.arange(3), lengths=lengths)
                                                   for name, lengths in (("a", torch.ones(3, dtype=torch.int64)), ("b", torch.tensor([3])))})
        with self.assertRaisesRegex(KeyError, "there is no key 'c'; there are a, b"):
            whole["c"]
        with self.assertRaisesRegex(ValueError, "multiple"):
            compat.KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1]))

    def test_columns_of_keys_are_put_together(self):
        made, regroup = compat.KeyedTensor.from_tensor_list, compat.KeyedTensor.regroup
        one = made(["a", "b"], [torch.ones(2, 1), torch.ones(2, 2)])
        other = made(["b", "c"], [torch.ones(2, 2), torch.zeros(2, 1)])
        self.assertEqual(compat.KeyedTensor.regroup_as_dict([one, other], [["c", "a"]], ["x"])["x"].tolist(), [[0, 1]] * 2)
        self.assertEqual([part.tolist() for part in regroup(iter([one, other]), (iter(group) for group in ("c", "ca")))], [[[0]] * 2, [[0, 1]] * 2])
        for call, said in ((lambda: made(["a"], [torch.ones(2, 1)] * 2), r"keys: \['a'\] are not allowed for 2 lengths"),
                           (lambda: made(["a", "a"], [torch.ones(2, 1)] * 2), r"keys: \['a', 'a'\] are not allowed"),
                           (lambda: regroup([one, other], [["a"], ["b"]]), "groups: 'b' is not allowed, for 2 of"),
                           (lambda: compat.KeyedTensor.regroup_as_dict([one], [["a"], ["b"]], ["x"]), "for 2 groups")):
            with self.assertRaisesRegex(ValueError, said):
                call()


if __name__ == "__main__":
    assert emberd.torch
    main()
