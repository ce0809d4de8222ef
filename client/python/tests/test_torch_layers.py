"""emberd.torch.Embedding and EmbeddingBag beside those of torch.nn: layers of given rows, their weight, and padding of bags.

What this would catch: rows that are not those that were given, a frozen table that moves, a change of a copy of rows that is lost without a word, and an
argument of torch that is taken and does nothing.
"""

import copy
import gc
import io
import os
import pickle
import unittest.mock
import warnings
import weakref

import numpy as np

from cluster import emberd, main
from test_torch import Case, torch

import emberd.torch._layers  # noqa: E402


class LayersCase(Case):
    def made(self, kind="Embedding", embeddings=None, **options):
        options = {"client": self.client, "model": self.id().split(".")[-1], **options}
        layer = getattr(emberd.torch, kind)
        layer = layer(20, 3, **options) if embeddings is None else layer.from_pretrained(embeddings, **options)
        self.addCleanup(layer.finish)
        return layer


class StateTest(Case):
    def test_a_state_that_says_no_step_is_loaded_with_a_warning(self):
        net = torch.nn.Sequential(self.make(), torch.nn.Linear(4, 1))
        sparse, state = net[0].optimizer(), net.state_dict()
        del state["0._extra_state"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net.load_state_dict(state, strict=False)  # of tables that have made no step
        net[0]({"t": torch.tensor([1])})["t"].sum().backward()
        sparse.step()
        with self.assertWarnsRegex(UserWarning, "has no 0._extra_state, so that its step is not known; the tables of model .* are at step 1") as said:
            net.load_state_dict(state, strict=False)
        self.assertEqual((len(said.warnings), os.path.basename(said.filename)), (1, "test_torch_layers.py"))
        with self.assertRaisesRegex(RuntimeError, "Missing key.*0._extra_state"):
            net.load_state_dict(state)


class RatesTest(Case):
    """Would catch: a user who has to know which tables are stacked to give each a rate, and one who cannot and is not told what to write."""

    def trained(self, name, rates=None, optimizers=(None, None, None), change=None, **options):
        """The first row of each table after a step in which its gradient was 1."""
        tables = [emberd.TableConfig(one, 8, 4, initializer=emberd.Constant(1.0), optimizer=optimizer) for one, optimizer in zip("abc", optimizers)]
        made = emberd.torch.EmbeddingBagCollection(tables, client=self.client, model=name, optimizer=emberd.SGD(learning_rate=0.5), lr=rates, **options)
        self.addCleanup(made.finish)
        sparse = made.optimizer()
        if change:
            change(sparse.param_groups)
        sum(one.sum() for one in made({one: torch.tensor([1]) for one in "abc"}).values()).backward()
        sparse.step()
        return made, [float(made.model.read_rows(one, [1])[0, 0]) for one in "abc"]

    def test_rates_and_decays_by_table_need_no_stacks(self):
        made, rows = self.trained("by_name", {"b": 0.25})
        self.assertEqual(rows, [0.5, 0.75, 0.5])
        stacks = {name: table.stack for name, table in made.model.tables.items()}
        self.assertTrue(stacks["a"] == stacks["c"] != stacks["b"])  # those that are not named still share theirs
        self.assertEqual([group["lr"] for group in made.optimizer(lr={"a": 0.125}).param_groups], [0.125, 0.25, 0.5])
        self.assertEqual(self.trained("by_decay", weight_decay={"b": 0.5, "c": 0.0})[1], [0.5, 0.25, 0.5])
        self.assertEqual(self.trained("by_optimizer", optimizers=(None, emberd.SGD(0.25), emberd.SGD(0.125)))[1], [0.5, 0.75, 0.875])
        made, rows = self.trained("by_one", 0.25)
        self.assertEqual((rows, len({table.stack for table in made.model.tables.values()})), ([0.75] * 3, 1))
        # Of a name, later values are free, and equal ones do not make it another model.
        self.trained("by_name", {"b": 0.5}, group="other", change=lambda groups: groups[1].update(lr=0.125))
        kept = emberd.PlanConfig(groups=[emberd.StackGroup(["a", "c"])])
        stacks = {name: table.stack for name, table in self.trained("planned", {"b": 0.25, "c": 0.5}, plan=kept)[0].model.tables.items()}
        self.assertTrue(stacks["a"] == stacks["c"] != stacks["b"])
        self.assertEqual(pickle.loads(pickle.dumps(made)).optimizer().param_groups[0]["lr"], 0.25)

    def test_what_is_stacked_already_says_what_to_write(self):
        for name, change, said in (
                ("lr", {"lr": 0.25}, r"Make the module with lr=\{'b': ...\}, or lr_by_table=True for all tables, and a model of a new name, or of this one after "
                                     r"client.drop_model\('lr'\); requires_grad_\(False, tables=\['b'\]\) freezes one"),
                ("decay", {"weight_decay": 0.25}, r"with weight_decay=\{'b': ...\}, or lr_by_table"), ("clip", {"clip_weight_max": 0.5}, "Make the module with lr_by_table=True for all")):
            with self.subTest(name), self.assertRaisesRegex(emberd.InvalidArgument, f"of table 'b' is not allowed beside .* of table 'a'; they are stacked, and share one. .*{said}"):
                self.trained(name, change=lambda groups: groups[1].update(change))
        with self.assertRaisesRegex(emberd.InvalidArgument, "lr: 'd' is not allowed; it must be one of the tables, a, b, c"):
            self.trained("never", {"d": 0.25})


class LargestTest(Case):
    """Would catch: a combiner that takes the sum, a row that is updated where none or another gave the maximum, and columns of another feature."""

    def test_a_collection_takes_the_largest_as_torchs_bag_does(self):
        from emberd.compat.jagged import KeyedJaggedTensor
        torch.manual_seed(1)
        first = {name: torch.randn(12, 3) for name in "ab"}
        values, lengths = torch.tensor([1, 2, 3, 5, 1, 1, 7]), torch.tensor([3, 0, 1, 0, 2, 1])
        matrix = torch.tensor([[1, 4], [4, 4], [9, 2]])
        of_keys = {"a": (values[:4], torch.tensor([0, 3, 3])), "b": (values[4:], torch.tensor([0, 0, 2]))}
        for name, options, ids, there in (
                ("matrix", {}, {"a": matrix, "b": matrix}, dict.fromkeys("ab", (matrix, None))),
                ("single", {}, {"a": matrix[:, 0], "b": matrix[:, 1]}, {"a": (matrix[:, :1], None), "b": (matrix[:, 1:], None)}),
                ("ragged", {}, {"b": emberd.Ragged(*of_keys["b"][:1], torch.tensor([0, 0, 2, 3])), "a": emberd.Ragged(of_keys["a"][0], torch.tensor([0, 3, 3, 4]))}, of_keys),
                ("keyed", {"pipelined": True}, KeyedJaggedTensor(["a", "b"], values, lengths=lengths), of_keys), ("parts", {"accumulate": True}, {"a": matrix, "b": matrix}, dict.fromkeys("ab", (matrix, None)))):
            with self.subTest(name):
                tables = [emberd.TableConfig(one, 12, 3, combiner="max" if one == "a" else "sum", initializer=rows.numpy()) for one, rows in first.items()]
                made = emberd.torch.EmbeddingBagCollection(tables, client=self.client, model=f"largest_{name}", optimizer=emberd.SGD(1.0), **options)
                self.addCleanup(made.finish)
                sparse, bags = made.optimizer(), {one: torch.nn.EmbeddingBag.from_pretrained(rows.clone(), mode="max" if one == "a" else "sum", freeze=False) for one, rows in first.items()}
                for _ in range(2 if name == "parts" else 1):
                    found = made(ids)
                    for one, bag in bags.items():
                        expected = bag(*there[one])
                        torch.testing.assert_close(found[one], expected)
                        (found[one] * expected.detach()).sum().backward(retain_graph=True)
                        (expected * expected.detach()).sum().backward()
                    if name == "keyed":
                        self.assertEqual((found.keys(), list(found.values().shape)), (["a", "b"], [3, 6]))
                sparse.step()
                made.finish()
                for one, bag in bags.items():
                    torch.testing.assert_close(torch.from_numpy(made.model.table(one)), (bag.weight - bag.weight.grad).detach(), rtol=1e-6, atol=1e-6)
                served = emberd.torch.EmbeddingBagCollection(tables, model=made.model).eval()  # of a model that is there
                copied, bag = pickle.loads(pickle.dumps(served)), torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(made.model.table("a")), mode="max")
                for one in (served, copied):
                    torch.testing.assert_close(one(ids)["a"], bag(*there["a"]))

    def test_what_is_not_combined_so_is_refused(self):
        table = emberd.TableConfig("t", 12, 3, combiner="max")
        made = emberd.torch.EmbeddingBagCollection([table], client=self.client, model="weighted")
        with self.assertRaisesRegex(TypeError, "feature \"t\": a Dense is not allowed with combiner 'max', which combines rows as they are; give a tensor of ids, or an emberd.Ragged"):
            made({"t": emberd.Dense(torch.tensor([[1]]), torch.ones(1, 1))})
        with self.assertRaisesRegex(emberd.InvalidArgument, "feature 't': output_shape is not allowed with combiner 'max'"):
            emberd.torch.EmbeddingBagCollection([table], client=self.client, model="shaped", features=[emberd.FeatureConfig("t", "t", output_shape=(2,))])
        bag = emberd.torch.EmbeddingBag(12, 3, client=self.client, model="bag", mode="max", table=table)
        self.assertEqual(list(bag.eval()(torch.tensor([[1, 2]])).shape), [1, 3])


class PretrainedTest(LayersCase):
    def test_it_looks_up_as_torchs(self):
        torch.manual_seed(1)
        rows, ids = torch.randn(20, 3), torch.tensor([[1, 19, 4], [19, 7, 2]])
        for padding_idx in (None, 4, -1):
            if padding_idx is not None:
                with self.assertRaisesRegex(ValueError, f"embeddings: row {padding_idx % 20} is not allowed, for padding_idx is {padding_idx}"):
                    self.made(embeddings=rows, padding_idx=padding_idx)
                rows[padding_idx] = 0
            there = torch.nn.Embedding.from_pretrained(rows, padding_idx=padding_idx)
            here = self.made(embeddings=rows, padding_idx=padding_idx, model=f"padding_{padding_idx}")
            self.assertEqual((here(ids).tolist(), here(ids).requires_grad), (there(ids).tolist(), False))
            self.assertEqual((here.num_embeddings, here.embedding_dim, here.padding_idx), (there.num_embeddings, there.embedding_dim, there.padding_idx))
        rows = torch.randn(20, 3)
        for mode in ("mean", "sum", "max"):
            for padding_idx in (None, 4, -1):
                there = torch.nn.EmbeddingBag.from_pretrained(rows, mode=mode, padding_idx=padding_idx)
                here = self.made("EmbeddingBag", rows, mode=mode, padding_idx=padding_idx, model=f"bag_{mode}_{padding_idx}")
                for arguments in ((ids,), (ids.reshape(-1), torch.tensor([0, 2, 2, 5])), (torch.full((2, 3), 4),)):
                    torch.testing.assert_close(here(*arguments), there(*arguments), atol=1e-6, rtol=1e-6)
        for given in (rows.numpy(), rows.double(), rows.bfloat16(), torch.nn.Parameter(rows), rows.tolist()):
            expected = given.float().tolist() if torch.is_tensor(given) else rows.tolist()
            self.assertEqual(self.made(embeddings=given, model=f"given_{type(given).__name__}_{getattr(given, 'dtype', '')}".replace("torch.", "")).weight.tolist(),
                             expected)

    def test_frozen_rows_stay_and_others_learn_as_torchs(self):
        rows = torch.randn(20, 3)
        for kind in ("Embedding", "EmbeddingBag"):
            there = getattr(torch.nn, kind).from_pretrained(rows.clone(), freeze=True, sparse=True)
            here = self.made(kind, rows, sparse=True, optimizer=emberd.SGD(learning_rate=0.5), model=f"frozen_{kind}")
            optimizers = here.optimizer(), None
            ids = torch.tensor([[1, 1, 4]])
            self.assertFalse(here(ids).requires_grad)
            with self.assertRaisesRegex(RuntimeError, "no step to end"):
                optimizers[0].step()
            self.assertTrue(torch.equal(here.weight, rows))
            self.assertFalse(here.weight.requires_grad)
            here.requires_grad_()
            there.requires_grad_()
            optimizers = optimizers[0], torch.optim.SGD(there.parameters(), 0.5)
            for layer, optimizer in zip((here, there), optimizers):
                layer(ids).pow(2).sum().backward()
                optimizer.step()
            torch.testing.assert_close(here.weight.detach(), there.weight.detach(), atol=1e-6, rtol=1e-6)
            self.assertTrue(here.weight.requires_grad)

    def test_padding_of_bags_has_no_gradient(self):
        torch.manual_seed(2)
        for mode in ("mean", "sum", "max"):
            there = torch.nn.EmbeddingBag(20, 3, mode=mode, padding_idx=4)
            here = self.made("EmbeddingBag", there.weight, freeze=False, mode=mode, padding_idx=4, optimizer=emberd.SGD(learning_rate=1.0), model=f"padded_{mode}")
            optimizers = here.optimizer(), torch.optim.SGD(there.parameters(), 1.0)
            weights = [torch.tensor([1.0, 2, 3, 4, 5, 6], requires_grad=True) for _ in range(2)] if mode == "sum" else [None, None]
            for layer, optimizer, of_each in zip((here, there), optimizers, weights):
                found = layer(torch.tensor([4, 1, 4, 2, 2, 4]), torch.tensor([0, 1, 5]), of_each)
                (found * torch.arange(9).reshape(3, 3)).sum().backward()
                optimizer.step()
            torch.testing.assert_close(here.weight.detach(), there.weight.detach(), atol=1e-6, rtol=1e-6)
            if mode == "sum":
                torch.testing.assert_close(weights[0].grad, weights[1].grad, atol=1e-6, rtol=1e-6)
            for offsets in ([0, 9], [1, 2], [0, 3, 2], [0, -1]):
                with self.assertRaisesRegex(ValueError, r"row_splits: \["):
                    here(torch.tensor([4, 1, 4]), torch.tensor(offsets))

    def test_weights_get_the_gradient_of_rounded_rows(self):
        """Also of a model that is given: its description says how its tables round."""
        rows = np.array([[0.3, -2.0], [0.8, 0.1], [-0.3, 5.0]], np.float32)
        rounded = torch.tensor([[0.5, -1.0], [1.0, 0.0], [-0.5, 1.0]])
        rounding = emberd.QuantizationConfig(-1, 1, 5)
        declared = emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 3, 2, initializer=rows, quantization=rounding)],
                                                       client=self.client, model="quantized")
        self.assertEqual(declared.model.tables["t"].quantization, rounding)
        with self.assertRaisesRegex(ValueError, r"tables: 't': quantization: .*num_buckets=6\) is not allowed; that of model 'quantized' is .*num_buckets=5\)"):
            emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 3, 2, quantization=emberd.QuantizationConfig(-1, 1, 6))], model=declared.model)
        for layer in (declared, emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 3, 2)], model=declared.model)):
            weights = [torch.tensor([[1.0, 3.0, 0.5]], requires_grad=True) for _ in range(2)]
            found = layer({"t": emberd.Dense(torch.tensor([[0, 1, 2]]), weights[0])})["t"]
            expected = weights[1] @ rounded / weights[1].sum()
            torch.testing.assert_close(found, expected)
            for one in (found, expected):
                (one * torch.tensor([1.0, 10.0])).sum().backward()
            torch.testing.assert_close(weights[0].grad, weights[1].grad)
            layer.optimizer().zero_grad()
            layer.finish()

    def test_given_rows_are_not_kept(self):
        """They are on the cluster, and may be larger than what a trainer, or each copy of a layer, has room for."""
        rows = np.ones((20, 3), np.float32)
        kept = weakref.ref(rows)
        for kind in ("Embedding", "EmbeddingBag"):
            layer = self.made(kind, rows, model=f"given_to_{kind}")
            self.assertFalse(rows.tobytes() in pickle.dumps(layer), kind)
        del rows
        gc.collect()
        self.assertIsNone(kept())
        self.assertEqual(copy.deepcopy(layer)(torch.tensor([[7]])).tolist(), [[1, 1, 1]])

    def test_tables_are_read_once(self):
        given = iter([emberd.TableConfig("t", 20, 3, combiner="sum", initializer=np.ones((20, 3), np.float32))])
        module = emberd.torch.EmbeddingBagCollection(given, features=[emberd.FeatureConfig("t", "t")], client=self.client, model="read_once")
        self.addCleanup(module.finish)
        self.assertEqual([group["table"] for group in module.optimizer().param_groups], ["t"])

    def test_a_model_that_is_there_keeps_its_rows(self):
        rows = torch.randn(20, 3)
        self.made(embeddings=rows)
        again = self.made(embeddings=rows)
        self.assertFalse(again.collection.model.created)
        self.made(embeddings=rows, model=again.collection.model)
        for freeze, model in ((True, again.collection.model.name), (False, again.collection.model)):
            with self.assertRaisesRegex(emberd.FailedPrecondition, r"embeddings: row 7 of table 'weight' is another one in model '.*load_table\('weight'.*drop_model"):
                self.made(embeddings=rows + torch.arange(20)[:, None].ge(7), freeze=freeze, model=model)
        small = emberd.TableConfig("small", 20, 3, storage_dtype="bfloat16")
        for _ in range(2):  # rounded
            self.made(embeddings=rows, table=small, model="rounded")

    def test_arguments_that_make_no_sense_here(self):
        rows = torch.zeros(20, 3)
        for kind in ("Embedding", "EmbeddingBag"):
            for name, value, said in (("max_norm", 1.0, "a lookup changes no row.*clip_weight_max"), ("norm_type", 1.0, "it belongs to max_norm"),
                                      ("scale_grad_by_freq", True, "gradients of a row are summed")):
                for embeddings in (None, rows):
                    with self.assertRaisesRegex(ValueError, f"^{name}: {value} is not allowed, only .*: {said}"):
                        self.made(kind, embeddings, **{name: value})
            for name, value, said in (("device", "cuda", "move these"), ("dtype", torch.float16, "storage_dtype"), ("_weight", rows, "from_pretrained")):
                with self.assertRaisesRegex(ValueError, f"(?s)^{name}: .* is not allowed, only None.*{said}"):
                    self.made(kind, **{name: value})
            for wrong, said in ((torch.zeros(3), r"embeddings: the shape \[3\] is not allowed; it must be \[num_embeddings, embedding_dim\]"),
                                (rows + float("nan"), "must be finite")):
                with self.assertRaisesRegex(ValueError, said):
                    self.made(kind, wrong)
            with self.assertRaisesRegex(ValueError, "table: initializer: it must be None"):
                self.made(kind, rows, table=emberd.TableConfig("t", 20, 3, initializer="zeros"))
            with self.assertRaisesRegex(ValueError, "num_embeddings, embedding_dim: 20 and 3 are not allowed"):
                self.made(kind, rows, table=emberd.TableConfig("t", 21, 3))
            self.made(kind, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=True, device="cpu", dtype=torch.float32, _weight=None, model=f"torchs_{kind}")


class InputTest(LayersCase):
    def test_ids_of_any_shape(self):
        layer = self.made(embeddings=torch.randn(20, 3), freeze=False, optimizer=emberd.SGD(learning_rate=1.0))
        sparse, there = layer.optimizer(), torch.nn.Embedding.from_pretrained(layer.weight.detach().clone(), freeze=False)
        for ids in (torch.tensor(7), torch.zeros(0, dtype=torch.int64), torch.ones(2, 1, 3, dtype=torch.int32)):
            found, expected = layer(ids), there(ids)
            self.assertEqual((found.shape, found.tolist()), (expected.shape, expected.tolist()))
            for one in (found, expected):
                one.sum().backward()
            sparse.step()
        torch.testing.assert_close(layer.weight.detach(), there.weight.detach() - there.weight.grad, atol=1e-5, rtol=1e-5)

    def test_activations_may_be_changed_in_place(self):
        for kind, options in (("Embedding", {}), ("EmbeddingBag", {"mode": "sum"}), ("EmbeddingBag", {"mode": "max"})):
            layer = self.made(kind, embeddings=torch.ones(20, 3), freeze=False, optimizer=emberd.SGD(learning_rate=1.0), model=f"in_place_{kind}_{options.get('mode')}", **options)
            sparse = layer.optimizer()
            there = getattr(torch.nn, kind).from_pretrained(torch.ones(20, 3), freeze=False, **options)
            for ids in (torch.tensor([[1, 2], [3, 3]]), torch.tensor([4, 5]) if kind == "EmbeddingBag" else torch.tensor(4)):
                before = layer.weight.detach().clone()
                changed = []
                for one in (layer, there):
                    there.zero_grad()
                    found = one(ids if ids.dim() != 1 or kind == "Embedding" else ids[:, None])
                    found *= 2
                    found.clamp_(max=100)
                    torch.nn.functional.relu_(found).sum().backward()
                    changed.append(found.tolist())
                self.assertEqual(changed[0], changed[1])
                sparse.step()
                torch.testing.assert_close(layer.weight.detach(), before - there.weight.grad)
                with torch.no_grad():
                    there.weight.copy_(layer.weight.detach())

    def test_weights_beside_padding_have_the_shape_of_the_ids(self):
        bag = self.made("EmbeddingBag", embeddings=torch.ones(20, 3), mode="sum", freeze=False, padding_idx=None)
        padded = emberd.torch.EmbeddingBag(20, 3, model=bag.collection.model, mode="sum", padding_idx=0, group="padded").eval()
        ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
        for weights in (torch.arange(5.0), torch.arange(6.0), torch.ones(3, 2), torch.ones(1, 1)):
            with self.assertRaisesRegex(ValueError, r"per_sample_weights: the shape .* is not allowed; it must be that of input, \[2, 3\], or \[1\]"):
                padded(ids, per_sample_weights=weights)
        self.assertEqual(padded(ids, per_sample_weights=torch.arange(6.0).reshape(2, 3)).tolist(), [[3] * 3, [12] * 3])
        self.assertEqual(padded(ids, per_sample_weights=torch.tensor([2.0])).tolist(), [[4] * 3, [6] * 3])

    def test_what_is_no_tensor_is_refused(self):
        for options, offsets in (({"mode": "max"}, None), ({"padding_idx": 0}, None), ({}, torch.tensor([0]))):
            layer = self.made("EmbeddingBag", model=f"input_{len(options)}_{options.get('mode')}", **options)
            for wrong, said in (([1, 2], "a list"), (np.array([1, 2]), "a ndarray")):
                with self.assertRaisesRegex(TypeError, f"input: {said} is not allowed; it must be a tensor of ids"):
                    layer(wrong, offsets)


class WeightTest(LayersCase):
    def test_it_is_the_rows_as_they_are_now(self):
        for options in ({}, {"pipelined": True}):
            layer = self.made(optimizer=emberd.SGD(learning_rate=1.0), model=f"now_{len(options)}", **options)
            sparse = layer.optimizer()
            for _ in range(2):
                before = layer.weight.detach().clone()
                layer(torch.tensor([3])).sum().backward()
                sparse.step()
                layer.finish()
                self.assertEqual((before - layer.weight).nonzero()[:, 0].tolist(), [3] * 3)
        self.assertEqual((tuple(layer.weight.shape), layer.weight.dtype, list(layer.parameters()), list(layer.state_dict())),
                         ((20, 3), torch.float32, [], ["collection._extra_state"]))

    def test_what_would_change_it_raises(self):
        layer = self.made()
        rows = layer.weight.detach().clone()
        said = r"weight: it is a copy of rows of the cluster, so that a change of it would be lost; collection.model.assign_rows.*load_table.*from_pretrained.*requires_grad_\(False\)"

        def iadd():
            weight = layer.weight.detach()
            weight += 1

        for change in (iadd, lambda: layer.weight.data.copy_(rows), lambda: layer.weight.detach().__setitem__(0, 1.0), lambda: layer.weight[3].zero_(),
                       lambda: torch.nn.init.xavier_uniform_(layer.weight), lambda: torch.add(rows, 1, out=layer.weight), lambda: layer.weight.T.mul_(2),
                       lambda: setattr(layer.weight, "requires_grad", False), lambda: layer.weight.requires_grad_(False), lambda: setattr(layer.weight, "data", rows),
                       lambda: next(iter(layer.weight)).fill_(1), lambda: layer.weight.split(5)[1].add_(1), lambda: torch.relu_(layer.weight),
                       lambda: torch._foreach_add_([layer.weight], 1.0)):
            with self.subTest(change), self.assertRaisesRegex(RuntimeError, said), torch.no_grad():
                change()
        for shared in (layer.weight.detach().numpy(), np.asarray(layer.weight.detach())):
            with self.assertRaisesRegex(ValueError, "read-only"):
                shared[0] = 1
        for assigned in (rows, torch.nn.Parameter(rows), None):
            with self.assertRaisesRegex(AttributeError, "weight: it cannot be assigned, for rows are on the cluster; collection.model.assign_rows.*from_pretrained"):
                layer.weight = assigned
        self.assertTrue(torch.equal(layer.weight, rows))
        with self.assertRaisesRegex(RuntimeError, "its gradient would be lost; call the layer"):
            (torch.ones(1, 3) @ layer.weight.T).sum().backward()

    def test_what_is_computed_from_it_is_a_tensor_as_any_other(self):
        layer = self.made()
        rows = layer.weight.detach()
        for made in (rows * 2, rows.clone(), rows[[1, 2]], torch.cat([rows, rows]), copy.deepcopy(layer.weight), rows.sum(), torch.nn.functional.embedding(torch.tensor([1]), rows)):
            self.assertIs(type(made), torch.Tensor)
            made += 1
        plain = torch.ones(20, 3)
        plain += rows
        self.assertIs(type(plain), torch.Tensor)
        torch.testing.assert_close(plain - 1, rows.clone(), atol=1e-6, rtol=1e-6)
        file = io.BytesIO()
        torch.save(layer.weight, file)
        file.seek(0)
        self.assertTrue(torch.equal(torch.load(file), rows))
        self.assertIn("tensor(" if type(rows) is torch.Tensor else "Rows(", repr(rows))

    def test_the_state_of_torchs_layer_is_no_state_of_it(self):
        for kind in ("Embedding", "EmbeddingBag"):
            net = torch.nn.Sequential(self.made(kind, model=kind))
            with self.assertRaisesRegex(RuntimeError, r"0.weight: rows are on the cluster, .*collection.model.load_table\('weight', rows\) of the layer, or make it by from_pretrained"):
                net.load_state_dict({**net.state_dict(), "0.weight": torch.zeros(20, 3)})
            net.load_state_dict(net.state_dict())

    def test_rows_in_a_state_of_torchrec_are_not_lost_in_silence(self):
        made = emberd.torch.EmbeddingBagCollection([emberd.TableConfig("t", 4, 2)], client=self.client, model="collection")
        net = torch.nn.ModuleDict({"ebc": made, "dense": torch.nn.Linear(2, 1)})
        state = net.state_dict()
        for key in ("ebc.embedding_bags.t.weight", "ebc.embeddings.t.weight", "ebc.t.weight"):
            with self.subTest(key), self.assertRaisesRegex(RuntimeError, rf"{key}: rows are on the cluster, .* model.load_table\('t', rows\) of the module, and leave the key out"):
                net.load_state_dict({**state, key: torch.zeros(4, 2)}, strict=False)
        found = net.load_state_dict({**state, "t.weight": torch.zeros(1)}, strict=False)  # of another module
        self.assertEqual((found.missing_keys, found.unexpected_keys), ([], ["t.weight"]))

    def test_a_large_table_is_not_read_whole(self):
        layer = self.made()
        with unittest.mock.patch.object(emberd.torch._layers, "MOST_BYTES", 239):
            with self.assertRaisesRegex(emberd.ResourceExhausted, r"weight: 20 x 3 are 240 B, which is above 239 B; read some rows by "
                                        r"collection.model.read_rows\('weight', ids\), or all in parts by collection.model.export\('weight'\)"):
                layer.weight
        with unittest.mock.patch.object(emberd.torch._layers, "MOST_BYTES", 240):
            self.assertEqual(len(layer.weight), 20)


if __name__ == "__main__":
    main()
