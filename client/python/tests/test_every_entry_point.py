"""Every public function, class and method of the package with wrong arguments; every object copied, pickled, used after it was
closed, and used in a forked child. The calls are made from the signatures: an argument that is required needs a good value below.

What this would catch: an argument that is cut, wrapped, ignored or read as something else; an error of Python's machinery in
place of one that says what is wrong; a refused call that changes rows; a handle that is freed twice; and a call that ends the
process or never returns: all runs in a child process, which says what it calls.

PyTorch, JAX and Keras are swept where they are installed; with EMBERD_FRAMEWORKS_ALONE, for which another run sweeps the rest, JAX and Keras alone.
"""

import asyncio
import collections.abc
import copy
import dataclasses
import functools
import enum
import faulthandler
import importlib
import inspect
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import typing
import unittest

INSIDE, HANGS, NEVER_ENDS = "EMBERD_INSIDE", 30, 900  # seconds of a call, and of all
if __name__ == "__main__" and INSIDE not in os.environ:
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        inside = subprocess.run([sys.executable, "-B", os.path.abspath(__file__), *sys.argv[1:]], cwd=folder,
                                env={**os.environ, INSIDE: str(said.fileno())}, pass_fds=[said.fileno()])
        if inside.returncode < 0:
            print(f"ended by signal {-inside.returncode} in {os.pread(said.fileno(), 1000, 0).decode()}", file=sys.stderr)
    sys.exit(abs(inside.returncode))

from cluster import counting_model, emberd, main  # noqa: E402

import emberd.aio  # noqa: E402

import numpy as np  # noqa: E402


def optional(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


torch, jax, keras = optional("torch"), optional("jax"), optional("keras")
if jax:
    jax.config.update("jax_platforms", "cpu")
ALONE = "EMBERD_FRAMEWORKS_ALONE" in os.environ
MODULES = [*["emberd", "emberd.nested", "emberd.aio", *["emberd.torch", "emberd.compat.jagged", "emberd.compat.torchrec"] * bool(torch)] * (not ALONE),
           *["emberd.jax", "emberd.jax.nnx"] * bool(jax), *["emberd.keras"] * bool(keras)]

# What a wrong argument may raise. UnicodeError is a ValueError that names no argument.
SAID = (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, FileNotFoundError, emberd.Error)
D, R, S, Q = emberd.Dense, emberd.Ragged, emberd.Sparse, emberd.Sequences
JUNK = {
    "None": None, "5": 5, "-1": -1, "2**32 + 5": 2**32 + 5, "2**63": 2**63, "1.5": 1.5, "nan": float("nan"), "inf": float("inf"),
    "10**400": 10**400, "''": "", "'x'": "x", "NUL": "x\0y", "surrogate": "x\ud800", "bytes": b"x\0y", "[]": [], "[[]]": [[]],
    "lists": [[1, 2], [3]], "{}": {}, "{'x': 1}": {"x": 1}, "object": object(), "class": emberd.SGD, "[object]": [object()],
    "matrix": np.zeros((2, 2, 2)), "masked": np.ma.array([1, 2], mask=[0, 1]), "array of str": np.array(["a"]),
    "array of object": np.array([None, 1]), "complex": np.array([1j]), "0-d": np.array(7.5), "empty": np.zeros((0, 3)),
}
BAD_FLOATS = {"10**400", "nan", "inf", "NUL", "surrogate"}  # though the type may be right
BAD_VALUES = BAD_FLOATS | {"-1", "2**32 + 5", "2**63"}


class Each(list):
    """Several good values."""


def arrays_like(good):
    """Arrays that are wrong in place of this one, and those ("right") that hold the same."""
    wide = np.repeat(good, 2, axis=-1)
    yield "right: strided", wide[..., ::2]
    yield "right: byte-swapped", good.astype(good.dtype.newbyteorder())
    yield "right: backwards", good[..., ::-1].copy()[..., ::-1]
    yield "right: Fortran's order", np.asfortranarray(good)
    frozen = good.copy()
    frozen.flags.writeable = False
    yield "right: read-only", frozen
    yield "right: a list", good.tolist()
    yield "of another rank", good[None, None]
    yield "longer", np.concatenate([good, good])
    yield "flat or a column", good.reshape(-1) if good.ndim > 1 else good[:, None]
    yield "of str", good.astype(str)
    yield "of objects", np.array([object()] * good.size, object).reshape(good.shape)
    yield "of complex", good.astype(complex)
    yield "masked", np.ma.array(good, mask=good >= 0)
    if good.dtype.kind == "i":
        yield "of floats", good.astype(float)
        yield "below", good - 2**40
        yield "beyond", good + 2**40
        yield "unsigned beyond", good.astype(np.uint64) + 2**63
    else:
        yield "of NaN", good * np.nan
        yield "beyond float32", good.astype(float) + 1e300


def wrong(good):
    """Labels and values to give in place of a good value: whole, and of each part of it."""
    yield from JUNK.items()
    if isinstance(good, dict) and good:
        part = next(iter(good.values()))
        yield from {"another key": {**good, "other": part}, "a number as key": {5: part}, "NUL in a key": {"t\0": part}}.items()
        for key, part in good.items():
            yield from ((f"[{key!r}] {label}", {**good, key: value}) for label, value in wrong(part))
    elif isinstance(good, (D, R, S, Q, emberd.Tls)):
        for field in (one for one in dataclasses.fields(good) if one.type != "bool"):
            for label, value in wrong(getattr(good, field.name)):
                yield f".{field.name} {label}", dataclasses.replace(good, **{field.name: value})
    elif isinstance(good, np.ndarray) and good.ndim:
        yield from arrays_like(good)
    elif torch and isinstance(good, torch.Tensor):
        yield from {"meta": good.to("meta"), "sparse": good.to_sparse(), "of bfloat16": good.to(torch.bfloat16)}.items()
        for label, value in arrays_like(good.numpy()):
            if type(value) is np.ndarray and value.dtype.kind in "if" and value.dtype.isnative and min(value.strides) >= 0:
                yield label, torch.tensor(value)
    elif isinstance(good, (emberd.Client, emberd.Model)):
        yield "closed", CLOSED[type(good)]
    elif isinstance(good, list) and good:
        yield from {"longer": [*good, good[-1]], "shorter": good[:-1], "as a dict": dict(enumerate(good))}.items()


def fits(hint, value):
    """Whether a value has the type that a signature names, which Any does not."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Union:
        return any(fits(kind, value) for kind in kinds)
    if typing.get_origin(hint) in (collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, list) and all(fits(kinds[0], one) for one in value)
    if typing.get_origin(hint) is collections.abc.Callable:
        return callable(value)
    if hint in (float, int) and not isinstance(value, bool):
        return isinstance(value, (int, float) if hint is float else int)
    return isinstance(hint, type) and hint not in (object, typing.Any) and isinstance(value, hint)


def own(function):
    return (getattr(function, "__module__", None) or "").startswith("emberd")


def methods_of(kind):
    """The public ones that this package wrote, by name."""
    return {name: method for name, method in inspect.getmembers(kind, inspect.isfunction)
            if own(method) and (not name.startswith("_") or name in ("__call__", "__getitem__"))}


CLOSED = {}
IDS = np.array([1, 2])
ALL_IDS = Each([{"t": IDS}, {"t": D(IDS[:, None], np.ones((2, 1), np.float32))}, {"t": R(IDS, np.array([0, 1, 2]), np.ones(2, np.float32))},
                {"t": S(np.array([[0, 0], [1, 0]]), IDS, 2, np.ones(2, np.float32))}, {"t": Q(IDS, 0)}])
ROWS = np.ones((2, 4), np.float32)

# By "function.argument" or argument: what is given where nothing is wrong. What is awaited calls what blocks, which is tried with ids of all kinds.
GOOD = {
    "ids": ALL_IDS, **dict.fromkeys(("TrainStream.lookup.ids", *(f"Aio{name}.ids" for name in ("Model.lookup", "TrainStream.lookup", "TrainStream.send_lookup"))), ALL_IDS[0]), "read_rows.ids": IDS, "assign_rows.ids": IDS, "values": ROWS, "load_table.weights": ROWS, "slots": {"accumulator": ROWS}, "Custom.slots": {"a": 0.5}, "gradients": {"t": ROWS}, "like": {"t": ROWS},
    "hyper": Each([{"learning_rate": 0.5}, {"t": {"learning_rate": 0.5}}]), "table": "t", "name": "m", "model": "m", "group": "none",
    "table.name": "t", "delete_checkpoint.name": "gone", "restore.name": "saved", "serve.name": "saved", "serve.serve_as": "served",
    "save_checkpoint.name": None, "feature": "t", "tree": {"t": {"u": IDS}}, "flat": {"t/u": IDS}, "flatten.like": None, "pack.like": {"t": {"u": IDS}},
    "samples": [[1, 2], [3]], "from_lists.weights": [[1.0, 2.0], [1.0]], "tls": Each([None, emberd.Tls()]), "size": 1,
    "declare.config": counting_model("declared").to_json(), "timeout": 5.0, "local.timeout": 60.0, "step_timeout": 1.0, "patience": 1.0, "Prefetcher.ids": None, "Embedding.prefetch.ids": None, "connect_timeout": 10.0, "deadline": 5.0,
    "expression": "w = g", "hyper_parameters": {"k": 0.5}, "Constant.value": 0.5, "lower": -1.0, "upper": 1.0, "num_buckets": 16, "vocabulary_size": 8, "embedding_dim": 4,
    "Watch.write.step": 0, "requires_grad_.tables": ["t"], "param_group": {"params": []}, "drop_model.name": "gone", "reset_model.name": "reset", "stack": "t", "writer": types.SimpleNamespace(add_scalar=lambda *_: None), "file": None,
    "ModelConfig.tables": counting_model("d", rows=8).tables, "features": counting_model("d").features, "StackGroup.tables": ["t"],
    "spec": {"kind": "LOOKUP", "model": "m", "inputs": [{"feature": "t", "max_samples": 2}]}, **{f"{name}.compile.{field}": value for name in ("Model", "AioModel") for field, value in (("features", ["t"]), ("samples", 2))},
    "change_model.config": counting_model("changed", rows=16, optimizer=emberd.Adagrad(learning_rate=0.5)), "change_model.groups": ["g"], "restore_tables.name": "saved", "restore_tables.tables": ["t"],
    "largest.rows": np.ones((2, 2, 4), np.float32), "largest.ids": None, "embeddings": np.ones((16, 4), np.float32), "from_pretrained.table": emberd.TableConfig("t", 16, 4), "operation": "pin", "change_memory.model": "m", "names": "exec.*", "ProgramResult.__getitem__.name": "t",
}
MODULES_WITH_STEPS = ("EmbeddingBagCollection", "EmbeddingCollection", "Embedding", "DistributedEmbedding")
COLLECTIONS = MODULES_WITH_STEPS[:2]
FAILS = {"Initializer": "it has no kind", **dict.fromkeys(("Client.change_memory", "AioClient.change_memory"), "no model is evicted here"), "EmbeddingOptimizer.add_param_group": "it has one for each table", **dict.fromkeys(("Client.delete_checkpoint", "AioClient.delete_checkpoint"), "there is none"),
         **dict.fromkeys((f"{name}.wait_checkpoint" for name in MODULES_WITH_STEPS), "none was asked for")}
# Public names that are not called here, and where they are.
ELSEWHERE = {
    **dict.fromkeys(("Client", "Model", "Watch", "Lookup", "TrainStream", "LocalCluster", "EmbeddingOptimizer", "Program", "PreparedBatch", "ProgramResult"), "made by others: makers"),
    **dict.fromkeys(("Bundle", "BundlePart", "Client.bundle", "AioClient.bundle", "Bundle.__getitem__", "Bundle.read", "Bundle.close", "BundlePart.__getitem__", "Chain", "ChainedResult", "Program.__call__", "Chain.add", "Chain.run"), "their arguments are others' results: test_programs.py"),
    **dict.fromkeys(("ChangedModel", "HotRow", "Limits", "CallStatistics", "MemoryChange", "ModelStatistics", "ShardMemory", "Applied", "Table", "Feature", "ModelStatus", "Checkpoint", "Checkpoints", "Progress", "KeyedTensor"), "results"),
    **dict.fromkeys(("Dense", "Ragged", "Sequences", "Sparse", "Tls"), "in what takes them"), "layers": "the module itself", **dict.fromkeys(("AioModel.apply", "AioModel.release"), "a lookup is applied once: test_statistics.py"), "AioTrainStream.receive_update": "it ends a step: the same as TrainStream.receive_update",
    **dict.fromkeys((f"AioClient.{name}" for name in ("prepare", "execute", "run", "read")), "what the programs of another client do: test_programs.py"),
    **dict.fromkeys(("JaggedTensor", "EmbeddingBagConfig", "RowWiseAdagrad", "apply_optimizer_in_backward", "use", "EmbeddingConfig",
                     "emberd.compat.torchrec.EmbeddingBagCollection", "emberd.compat.torchrec.EmbeddingCollection"), "as torchrec has them: test_torchrec.py"), "Token": "of Flax", "Embed": "it holds an Embedding",
    **dict.fromkeys(("DistributedEmbedding", *(f"DistributedEmbedding.{name}" for name in (
        "build", "call", "compute_mask", "compute_output_shape", "from_config", "get_config", "load_own_variables", "prefetch", "preprocess", "save_own_variables", "typed_errors")), "on_tables"),
                    "Keras calls them, or wraps what they raise: test_keras.py"),
    "Embedding.in_jit": "JAX calls it: test_jax_in_jit.py", "TableConfig": "test_descriptions, or the layer's",
    "FeatureConfig": "the same",
}
# What needs no cluster, and goes on without.
STILL = {"Client.close", *(f"{name}.close" for name in ("Program", "PreparedBatch", "ProgramResult")), "ProgramResult.__getitem__", "AioClient.close", "AioTrainStream.close", "Watch.close", "Watch.scalars", "Lookup.__getitem__", "TrainStream.close", "EmbeddingCollection.mask", *(f"{name}.{method}" for name in ("EmbeddingBag", "TorchEmbedding") for method in ("finish", "optimizer", "requires_grad_")), "EmbeddingOptimizer.add_param_group",
         *(f"{name}.{method}" for name in COLLECTIONS for method in ("extra_repr", "finish", "optimizer", "requires_grad_", "get_extra_state", "set_extra_state")), "EmbeddingOptimizer.load_state_dict",
         "EmbeddingOptimizer.share_overflow", "EmbeddingOptimizer.state_dict", "EmbeddingOptimizer.zero_grad", "Embedding.finish", "Embedding.token", "Embedding.typed_errors",
         "DistributedEmbedding.finish", *(f"{name}.{method}" for name in MODULES_WITH_STEPS for method in ("request_checkpoint", "wait_checkpoint"))}
# What may succeed though it is not what the signature names: a pattern of "function(argument: label)", and why.
ALLOWED = {
    r"^flatten\(tree|^flatten.*like: None|^pack.*\['t": "leaves are anything",
    r"param_groups'\] longer|state_dict: another": "what is there for other tables",
    r"next_step'\] (5|2|None)": "it is compared when the group is joined, or not known",
    r"state: another key": "it is not looked at",
    r"(first_step|step|rows_at_a_time): 2\*\*32": "they have 64 bits",
    r"(ids|input): (\['t'\] )?(\[\]|\[\[\]\]|empty|longer|flat or a column)\)": "batches and lists of other sizes; no two of them are compared",
    r"(\.|per_sample_)weights:? (None|5|-1|2.*|1.5|0-d|of bfloat16)\)": "no weights, one for all ids, or as many in fewer bits",
    r"features: (\[\]|empty|shorter)|(loader|batches): (''|longer|{}|\[\]|empty|shorter)": "other batches, or none",
    r"\.samples 5": "the last samples have no ids",
    r"spec: \['inputs'\] (None|\[\]|shorter)|spec: .*\['\w+'\] None": "it has the default",
    r"spec: \['model'\] 'x'": "a model that another call has made",
    r"padding_idx:? (None|5|-1|2\*\*32 \+ 5|\{\})\)": "another padding, or none, which no row need have",
    r"\.ids (\[\]|\[\[\]\]|empty|longer|of another rank|flat or a column)\)|(EmbeddingCollection.\w+|TorchEmbedding.*)\((ids|input): (\['t'\] )?(\[\[\]\]|of another rank)": "sequences of other shapes",
    r"^largest\(rows": "activations of other shapes, and of any numbers",
    r"mask\(ids": "ids are looked at when they are looked up",
    r"(tables|rates|lr|weight_decay|slots): {}": "no table is set, or no slot",
    r"Custom\((slots|hyper_parameters): ({}|{'x': 1}|another key|\[')": "a number by any name, or none",
    r"gradients: ({}|\['t'\] None)": "missing gradients are zero",
    r"hyper: (\['t'\] )?({}|\['learning_rate'\] (5|2.*|1.5|0-d))\)": "none, or other rates",
    r"Sequences.from_lists\(samples: (''|\{\}|empty|longer|shorter)": "other samples, or none",
    r"(requires_grad_|restore_tables)\(tables: (empty|longer|shorter)|change_model\(groups: (longer|shorter)": "other tables or groups, or none",
    r"like: {}|like: \['t'\] (masked|longer|of |beyond)": "nothing but the shape counts",
    r"addresses: longer": "the same coordinator twice",
    r"(vocabulary_size|_bytes_limit|seed): 2": "they have 64 bits",
    r"(deadline|timeout|step_timeout|patience|interval|lr): 0-d": "a number of NumPy",
    r"(rates|weight_decay): (\['t'\] )?(5|2.*|1.5|0-d)\)": "other values",
}


class Sweep(unittest.TestCase):
    """A cluster with the model "m", and functions that make one of each kind of object on it."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.cluster = emberd.local(shards=2, data=folder.name)
        cls.addClassCleanup(cls.cluster.close)
        cls.client = cls.connect()
        cls.addClassCleanup(cls.client.close)
        cls.model = cls.client.declare(counting_model("m", rows=16, optimizer=emberd.Adagrad(learning_rate=0.5)))
        cls.model.save_checkpoint("saved")
        cls.client.declare(counting_model("reset"))
        cls.groups = itertools.count()
        with cls.connect() as client:
            CLOSED.update({emberd.Client: client, emberd.Model: client.model("m")})
        cls.good = {**GOOD, "source": cls.model, "watch.model": cls.model, "client": cls.client, "addresses": cls.cluster.addresses}
        if torch:
            ids = [torch.from_numpy(IDS), D(torch.from_numpy(IDS), torch.ones(2)),
                   R(torch.from_numpy(IDS), torch.tensor([0, 1, 2]), torch.ones(2)),
                   S(torch.tensor([[0, 1], [0, 0]]), torch.from_numpy(IDS), 2, torch.ones(2))]
            every = Each({"t": one} for one in [*ids, Q(ids[0], 0)])
            cls.good.update({"keys": ["t"], "KeyedJaggedTensor.values": ids[0], "lengths": torch.tensor([1, 1]), "num_embeddings": 16,
                             **{f"{name}.tables": cls.tables() for name in COLLECTIONS}, "TorchEmbedding.table": cls.tables()[0], "Prefetcher.loader": [{"ids": every[0]}],
                             "EmbeddingBag.table": cls.tables()[0]})
            cls.good.update({"EmbeddingBagCollection.forward.ids": every, "mask.ids": every[0],
                             "EmbeddingCollection.forward.ids": Each([every[0], {"t": R(IDS, np.array([0, 1, 2]))}, every[-1]]), "prefetch.ids": every[0], "input": ids[0],
                             "offsets": Each([None, torch.tensor([0, 1])]), "state": {"model": "m", "group": "g", "next_step": 0}, "weight_decay": Each([0.5, {"t": 0.5}]), "EmbeddingBag.optimizer.weight_decay": 0.5,
                             "TorchEmbedding.optimizer.weight_decay": 0.5,
                             "load_state_dict.state_dict": {"param_groups": [{"table": "t", "lr": 0.5}]}})
        if jax:
            cls.good.update({"Embedding.model": cls.model, "batches": [{"ids": {"t": IDS}}], "step": 0})
        if keras:
            cls.good.update({"inputs": IDS, "tables": {"t": np.ones((16, 4), np.float32)}, "rates": {"t": 0.5}, "input_shapes": (2,),
                             "DistributedEmbedding.prefetch.batches": [IDS], "DistributedEmbedding.prefetch.inputs": None})

    @classmethod
    def connect(cls):
        return cls.cluster.connect(deadline=5)

    def run(self, result=None):
        signal.signal(signal.SIGALRM, self.hangs)
        super().run(result)

    def hangs(self, *_):
        raise RuntimeError(f"it hangs: {''.join(traceback.format_stack(limit=4))}")

    def lookup(self, model):
        return model.lookup({"t": IDS}, train=True)

    def stream(self, model, method=""):
        """As far as the method needs it."""
        stream = model.train(self.group())
        if method not in ("send_lookup", "lookup", "finish"):
            stream.send_lookup({"t": IDS})
            if method != "receive_lookup":
                stream.receive_lookup()
        if method == "receive_update":
            stream.send_update({"t": ROWS})
        self.ends.append(stream.close)
        return stream

    def makers(self):
        """Of the objects that have methods: by name, from a client and the name of the method that will be called."""
        makers = {**({"Embedding": self.embedding} if jax else {}), **({"DistributedEmbedding": self.layer} if keras else {})}
        if ALONE:
            return makers
        makers |= {"Client": lambda client, _: client, "Model": lambda client, _: client.model("m"),
                  "Lookup": lambda client, _: self.lookup(client.model("m")),
                  "TrainStream": lambda client, method: self.stream(client.model("m"), method), "Watch": lambda client, _: emberd.watch(client.model("m")),
                  "Program": lambda client, _: self.program(client), "PreparedBatch": lambda client, _: self.program(client).prepare({"t": IDS}),
                  "ProgramResult": lambda client, _: self.program(client)({"t": IDS}), "Chain": lambda client, _: emberd.Chain(),
                  "AioClient": lambda client, _: emberd.aio.Client(client, 2),
                  "AioModel": lambda client, _: emberd.aio.Model(emberd.aio.Client(client, 2), client.model("m")),
                  "AioTrainStream": lambda client, method: emberd.aio.TrainStream(
                      emberd.aio.Model(emberd.aio.Client(client, 2), client.model("m")), self.stream(client.model("m"), method))}
        if torch:
            makers["EmbeddingBagCollection"] = self.collection
            makers["EmbeddingCollection"] = lambda client, method: self.collection(client, method, "EmbeddingCollection")
            makers["TorchEmbedding"] = lambda client, _: self.ended(optional("emberd.torch").Embedding(
                16, 4, client=client, model="m", table=self.tables()[0], group=self.group()))
            makers["EmbeddingOptimizer"] = lambda client, _: self.optimizer(self.collection(client))
            makers["EmbeddingBag"] = lambda client, _: self.ended(optional("emberd.torch").EmbeddingBag(
                16, 4, client=client, model="m", table=self.tables()[0], group=self.group()))
        return makers

    @staticmethod
    def program(client):
        return client.model("m").compile(samples=64, dynamic=True)

    @staticmethod
    def tables():
        return counting_model("m", rows=16, optimizer=emberd.Adagrad(learning_rate=0.5)).tables

    def group(self):
        return f"g{next(self.groups)}"

    def ended(self, layer):
        self.ends.append(layer.finish)
        return layer

    def collection(self, client, method="", kind="EmbeddingBagCollection"):
        group = "g" if method == "set_extra_state" else self.group()
        return self.ended(getattr(optional("emberd.torch"), kind)(self.tables(), client=client, model="m", group=group))

    def optimizer(self, collection):
        made = collection.optimizer()
        collection({"t": torch.tensor([1, 2])})["t"].sum().backward()
        return made

    def embedding(self, client, method):
        made = self.ended(optional("emberd.jax").Embedding(client.model("m"), self.group()))
        if method in ("receive", "update"):
            made.send({"t": IDS})
            if method == "update":
                made.receive(0)
        return made

    def layer(self, client, _=""):
        layers = optional("emberd.keras")
        table = layers.TableConfig("t", 16, 4, initializer="zeros", optimizer="sgd", combiner="sum")
        return self.ended(layers.DistributedEmbedding(layers.FeatureConfig("t", table, (2,), (2, 4)), client=client, model="k",
                                                      group=self.group()))

    def given(self, function, name):
        """By argument what is good for it; and good arguments of a call."""
        found, base = {}, {}
        for one in inspect.signature(function).parameters.values():
            if one.name in ("self", "options", "_") or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            keys = f"{name}.{one.name}", f"{name.split('.')[-1]}.{one.name}", one.name
            good = next((self.good[key] for key in keys if key in self.good), one.empty)
            self.assertFalse(good is one.default is one.empty, f"{name}: argument {one.name!r}: give it a good value in GOOD")
            found[one.name] = good if isinstance(good, Each) else Each([one.default if good is one.empty else good])
            if good is not one.empty:
                base[one.name] = found[one.name][0]
        return found, base

    def state(self):
        """What a refused call must not change: rows, read in the fastest way."""
        return self.model.lookup({"t": np.arange(16)})["t"].tobytes()

    def answered(self, thing, name):
        """What is only sent is refused with its answer."""
        method = getattr(thing, name)
        answer = getattr(thing, name.replace("send", "receive"), None) if name in ("send_lookup", "send_update") else None
        if answer is not None and isinstance(thing, emberd.aio.TrainStream):
            async def both(**given):
                return await method(**given), await answer()

            return both
        if name == "prefetch" and torch and isinstance(thing, torch.nn.Module):
            return lambda ids: (method(ids), thing(ids))
        if name == "send":
            return lambda ids: thing.receive(method(ids))
        return method if answer is None else lambda **given: (method(**given), answer())

    def use(self, result):
        async def all_of(runs):
            return [one async for one in runs]

        if inspect.isasyncgen(result):
            result = all_of(result)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if inspect.isgenerator(result):
            list(result)
        if isinstance(result, emberd.aio.TrainStream):
            result = result.blocking
        if isinstance(result, emberd.TrainStream):
            result.close()

    def sweep(self, name, make, function, use=None, only=None):
        """Calls what `make` gives with each argument wrong in turn. `use` is what is done with the result."""
        found, base = self.given(function, name)
        use = use or self.use
        if not found:
            return
        if name not in FAILS:
            problem = self.judge(f"{name}(right)", lambda: use(make()(**base)), True)
            self.problems += [f"{name}: with good arguments: {self.refused or problem}"] if self.refused or problem else []
        hints = typing.get_type_hints(function, None, {name: getattr(emberd, name) for name in emberd.__all__})
        for argument, goods in found.items():
            hint = hints.get(argument)
            if hint in (bool, typing.Optional[bool]):
                continue  # everything has a truth value
            for good in goods if only is None or argument in only else ():
                for label, value in wrong(good):
                    what = f"{name}({argument}: {label})"
                    os.pwrite(int(os.environ[INSIDE]), f"{what:900}".encode(), 0)
                    given = {**base, argument: value}
                    if "group" in given and argument != "group":
                        given["group"] = self.group()
                    problem = self.judge(what, lambda: use(make()(**given)),
                                         label in JUNK and fits(hint, value)
                                         and label not in (BAD_FLOATS if fits(hint, 0.5) else BAD_VALUES))
                    if problem:
                        self.problems.append(f"{what}: {problem}")
            self.check_rows()

    def judge(self, what, call, may_succeed):
        self.calls += 1
        may_succeed = may_succeed or "right" in what or any(re.search(pattern, what) for pattern in ALLOWED)
        if may_succeed:  # and change the rows
            self.check_rows()
        signal.alarm(HANGS)
        try:
            call()
            refused = None
        except SAID as error:
            refused = error
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
            while self.ends:
                self.ends.pop()()
        self.refused = refused
        if refused is None:
            self.seen, self.unchecked = self.state(), []
            return None if may_succeed else "it succeeds"
        self.unchecked.append(what)
        text = str(refused)
        argument = re.search(r"\((\w+?)s?[:)]", what)[1]
        if not text or isinstance(refused, UnicodeError):
            return f"{refused!r} does not say what is wrong"
        if isinstance(refused, emberd.Error) and not re.search(f"{argument}|feature|model|name|values|ranks|`emberd up`|checkpoint \"|no coordinator", text):
            return f"the argument is not named: {text}"
        return None

    def check_rows(self):
        """After calls that were refused, at the latest when another one may succeed."""
        if self.unchecked and self.state() != self.seen:
            self.problems.append(f"refused, but rows have changed, by one of {self.unchecked}")
            self.seen = self.state()
        self.unchecked = []

    def setUp(self):
        if torch:
            self.good["collection"] = self.collection_of_all = optional("emberd.torch").EmbeddingBagCollection(
                self.tables(), client=self.client, model="m", group=self.group())
        self.problems, self.calls, self.seen, self.unchecked, self.ends = [], 0, self.state(), [], []

    def finish(self):
        print(f"{self.id()}: {self.calls} calls", file=sys.stderr)
        self.assertFalse(self.problems, "\n".join(["", *self.problems]))
        self.assertEqual([one.name for one in self.client.checkpoints() if not re.match(r"saved$|x$|\d{8}-|auto", one.name)], [])


class WrongArgumentsTest(Sweep):
    def test_methods(self):
        for kind, make in self.makers().items():
            for name, method in methods_of(type(make(self.client, ""))).items():
                if f"{kind}.{name}" not in ELSEWHERE:
                    self.sweep(f"{kind}.{name}", lambda make=make, name=name: self.answered(make(self.client, name), name), method)
                if name == "set_limits":  # to small ones, which the batches of later calls do not fit
                    self.makers()["Model"](self.client, "").reset_limits()
        self.finish()

    def test_functions_and_constructors(self):
        uses = {"connect": lambda client: client.status(), "Aioconnect": lambda made: asyncio.run(made).blocking.status(), "local": lambda cluster: cluster.close(),
                "EmbeddingBagCollection": lambda made: (made({"t": torch.from_numpy(IDS)}), made.finish()),
                "EmbeddingCollection": lambda made: (made({"t": torch.from_numpy(IDS)}), made.finish()),
                **dict.fromkeys(("EmbeddingBag", "TorchEmbedding"), lambda made: (made(torch.from_numpy(IDS)), made.finish())),
                "Prefetcher": self.prefetched,
                "KeyedJaggedTensor": self.jagged, "from_lists": lambda ids: self.model.lookup({"t": ids}),
                "Embedding": lambda made: (made.receive(made.send({"t": IDS})), made.finish()),
                "DistributedEmbedding": lambda made: (made(IDS), made.finish())}
        for module in map(importlib.import_module, MODULES):
            for name in getattr(module, "__all__", list(vars(module))):
                thing = getattr(module, name)
                if {name, f"{module.__name__}.{name}"} & set(ELSEWHERE) or not own(thing) or getattr(thing, "__module__", None) == "emberd.config" or (
                        inspect.isclass(thing) and issubclass(thing, (Exception, enum.Enum))) or name.startswith("_"):
                    continue
                self.assertTrue(callable(thing), name)
                name = f"Aio{name}" if module is emberd.aio else name
                name = "TorchEmbedding" if torch and thing is optional("emberd.torch").Embedding else name
                self.sweep(name, lambda thing=thing: thing, thing.__init__ if inspect.isclass(thing) else thing, uses.get(name))
        for name in ("Embedding", "EmbeddingBag") if torch else ():
            made = getattr(optional("emberd.torch"), name).from_pretrained
            self.sweep(f"{name}.from_pretrained", lambda made=made: functools.partial(made, client=self.client, model=f"pretrained_{self.group()}"), made,
                       lambda layer: layer.finish())
        for name, made in {} if ALONE else {"from_lists": R.from_lists, "Sequences.from_lists": Q.from_lists}.items():
            self.sweep(name, lambda made=made: made, made, uses["from_lists"])
        self.finish()

    def prefetched(self, loader):
        self.ends.append(loader.collection.finish)
        try:
            for batch in loader:
                loader.collection(batch["ids"])
        except RuntimeError as error:  # other ids than those that were sent
            raise ValueError(str(error)) from error

    def jagged(self, ids):
        self.collection(self.client).eval()(ids)

    @unittest.skipIf(ALONE, "SKIP: another run does it")
    def test_descriptions(self):
        """What they hold is looked at when they are declared."""
        config = emberd.config
        places = {
            config.Initializer: lambda one: self.described(initializer=one), config.Optimizer: lambda one: self.described(optimizer=one),
            config.TableConfig: lambda one: emberd.ModelConfig("d", [one], [emberd.FeatureConfig("t", "t")]),
            config.FeatureConfig: lambda one: emberd.ModelConfig("d", self.described().tables, [one]),
            config.ModelConfig: lambda one: one, config.PlanConfig: lambda one: dataclasses.replace(self.described(), plan=one),
            config.StackGroup: lambda one: dataclasses.replace(self.described(), plan=emberd.PlanConfig(groups=[one])),
            config.QuantizationConfig: lambda one: self.described(quantization=one),
            config.TableResource: lambda one: dataclasses.replace(self.described(resource=one), enable_variable_deduplication=True)}
        self.client.declare(self.described())
        self.seen = self.state()
        for name, kind in vars(config).items():
            if not dataclasses.is_dataclass(kind):
                continue
            place = next(place for base, place in places.items() if issubclass(kind, base))
            self.good[f"{name}.name"] = "d" if kind is config.ModelConfig else "t"
            own = vars(kind).get("__annotations__", {})  # what is inherited is swept once
            made = functools.partial(kind, expression="w = g") if kind is config.Custom else kind
            self.sweep(name, lambda made=made: made, kind.__init__, lambda one, place=place: self.declare(place(one)), own)
        self.finish()

    def described(self, **table):
        return counting_model("d", rows=8, **table)

    def declare(self, config):
        try:
            self.client.declare(config)
        except emberd.AlreadyExists:
            pass  # so it is a valid one


class ObjectsTest(Sweep):
    def test_copies(self):
        for name, make in self.makers().items():
            for copied in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
                with self.subTest(name):
                    thing = make(self.client, "")
                    try:
                        second = copied(thing)
                    except TypeError as error:
                        self.assertRegex(str(error), "cannot (be copied|pickle)")
                        continue
                    self.assertIsNot(second, thing)
                    del second
                    self.assertEqual(self.state(), self.seen)

    def call_all(self, says):
        """Every method with good arguments, of objects with which nothing can be done: which do not say so, as `says` sees it?"""
        silent = []
        for kind, make in self.makers().items():
            for name, method in methods_of(type(make(self.client, ""))).items():
                if f"{kind}.{name}" in ELSEWHERE:
                    continue
                self.ends = []
                with self.connect() as client:
                    thing = make(client, name)
                    said = says(client, lambda: self.use(self.answered(thing, name)(**self.given(method, f"{kind}.{name}")[1])))
                if said and f"{kind}.{name}" not in STILL:
                    silent.append(f"{kind}.{name}: {said}")
        self.ends = []
        return silent

    def test_what_is_closed_says_so(self):
        def says(client, call):
            for end in (*self.ends, client.close):
                if end.__name__ == "close":
                    end()
            try:
                call()
            except (RuntimeError, *SAID) as error:
                return "" if "has been closed" in str(error) else str(error)
            return "it goes on"

        self.assertEqual("\n".join(self.call_all(says)), "")

    @unittest.skipIf(jax, "SKIP: JAX has threads that no fork survives")
    def test_a_forked_child_is_told_and_ends(self):
        def says(_, call):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    call()
                    code = 2
                except emberd.ForkedProcess:
                    code = 0
                finally:
                    os._exit(code)
            signal.alarm(HANGS)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            signal.alarm(0)
            return code and f"the child ends with {code}"

        self.assertEqual("\n".join(self.call_all(says)), "")
        self.client.status()


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.dump_traceback_later(NEVER_ENDS, exit=True)
    main()
