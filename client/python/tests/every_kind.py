"""How an object of every public class of the package is made, used and ended, for test_every_object.py."""

import asyncio
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import sys

SWEEP = "EMBERD_SWEEP"  # the folder of a run's files
PLAIN = "EMBERD_PLAIN"  # set: without the frameworks, whose weight makes children slow to fork and to end
FRAMEWORKS = ("torch", "jax", "keras", "emberd.torch", "emberd.jax", "emberd.keras", "emberd.ray", "emberd.compat")
os.environ.setdefault("KERAS_BACKEND", "jax")

from cluster import counting_model, emberd  # noqa: E402

import numpy as np  # noqa: E402

import emberd.aio  # noqa: E402
import emberd.trainer  # noqa: E402


def optional(name):
    try:
        return None if PLAIN in os.environ and name.startswith(FRAMEWORKS) else importlib.import_module(name)
    except ImportError:
        return None


torch, jax, keras = (optional(f"emberd.{name}") and optional(name) for name in ("torch", "jax", "keras"))
if jax:
    jax.config.update("jax_platforms", "cpu")
IDS, ZEROS = np.array([1, 2]), np.zeros((2, 4), np.float32)
CLOSE, FINISH = (lambda one: one.close()), (lambda one: one.finish())
SPARED_BY_JAX = ["exit while a thread uses it", "fork and sys.exit", "fork and os._exit"]

# Public classes that nobody holds an object of, and why.
NO_OBJECTS = {
    "emberd.trainer.Checkpointed": "what the layers of all frameworks are made of",
    "emberd.ray.Cluster": "it needs a cluster of Ray: test_ray.py",
    **dict.fromkeys((f"emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.nnx.embed.{name}" for name in (
        "EmbeddingVariablesParam", "PartitionedOptimizer", "SparseCoreEmbed")), "Flax makes and copies them: test_jax_tpu_embedding.py"),
    "emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.linen.embed.SparseCoreEmbed": "Flax makes and copies it: test_jax_quick_starts.py",
    **dict.fromkeys((f"emberd.compat.jax_tpu_embedding.sparsecore.lib.fdo.fdo_client.{name}" for name in ("FDOClient", "FilesOfProcesses")),
                    "what the clients are made of"),
}


def public_classes():
    """By the name of the module that has it."""
    found = {}
    for info in pkgutil.walk_packages(emberd.__path__, "emberd."):
        if any(part.startswith("_") for part in info.name.split(".")) or not optional(info.name):
            continue
        module = sys.modules[info.name]
        for name, kind in [*vars(emberd).items(), *vars(module).items()]:
            own = getattr(kind, "__module__", "")
            shown = (name in emberd.__all__ and vars(emberd).get(name) is kind or own.startswith(module.__name__))
            if inspect.isclass(kind) and own.startswith("emberd") and not name.startswith("_") and shown:
                found.setdefault(f"{own}.{kind.__qualname__}".replace("._", "."), kind)
    return found


def shown(value):
    """What an object holds, as what can be compared and pickled."""
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (np.ndarray, np.generic)) or (jax and isinstance(value, jax.Array)):
        return np.asarray(value).tolist()
    if isinstance(value, Exception):
        return [type(value).__name__, value.code if isinstance(value, emberd.Error) else None, str(value)]
    if dataclasses.is_dataclass(value):
        return {one.name: shown(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [*map(shown, value), *map(shown, vars(value).values())] if hasattr(value, "__dict__") else [shown(one) for one in value]
    if hasattr(value, "keys"):
        return {key: shown(value[key]) for key in value.keys()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else re.sub(" at 0x[0-9a-f]+", "", str(value))


@dataclasses.dataclass
class Kind:
    """How an object is made in a World; used, which gives something to compare; and ended, if it has an end. live: it has to do
    with the library. The others are copied and pickled one by one, and all else is done with all of them at once."""

    make: object
    use: object = shown
    end: object = None
    live: bool = True
    spared: tuple = ()  # what its framework does not survive


class World:
    """What objects are made in: a client of the cluster, and a group that nobody has."""

    def __init__(self, address, name):
        self.address, self.name, self.numbers = address, name.replace(" ", "_"), itertools.count()

    @functools.cached_property
    def client(self):
        return emberd.connect(self.address)

    @functools.cached_property
    def model(self):
        return self.client.model("m")

    def group(self):
        return f"g{os.getpid()}-{next(self.numbers)}"

    def joins(self):
        return {"group": self.group(), "patience": 1.0}

    def lookup(self):
        return self.model.lookup({"t": IDS}, train=True)

    def program(self):
        return self.model.compile(samples=2)

    def trainer(self):
        return emberd.trainer.Trainer(self.model, self.group(), patience=1.0)

    def steps(self):
        return emberd.steps.Steps(self.model, self.group(), patience=1.0)

    def gradients(self):
        with self.model.train(self.group()) as stream:
            made = stream.empty_gradients({"t": ZEROS})["t"]
            made[:] = 3
            return made

    def received(self):
        steps = self.steps()
        return steps.receive(steps.send({"t": IDS}))


def step_of_stream(stream):
    found = stream.lookup({"t": IDS})["t"].tolist()
    stream.update({"t": ZEROS})
    return found


async def step_of_awaited(stream):
    found = (await stream.lookup({"t": IDS}))["t"].tolist()
    await stream.update({"t": ZEROS})
    return found


def step_of_steps(steps):
    step = steps.send({"t": IDS})
    found = steps.receive(step)["t"].tolist()
    steps.update(step, {"t": ZEROS})
    return found


def step_of_trainer(trainer):
    number, found = trainer.begin({"t": IDS})
    trainer.update(number, {"t": ZEROS})
    return found["t"].tolist()


def kinds():
    """By name: the public classes, and what methods give that is of no class of this package."""
    live = {
        "emberd.client.Client": Kind(lambda world: emberd.connect(world.address), lambda one: one.model("m").name, CLOSE),
        "emberd.client.Model": Kind(lambda world: world.model, lambda one: one.read_rows("t", IDS).tolist(), lambda one: one.client.close()),
        "emberd.changing.ChangedModel": Kind(lambda world: emberd.ChangedModel(world.model, False, (), (), (), (), ("t",), (), {}), str, lambda one: one.model.client.close()),
        "emberd.client.Lookup": Kind(World.lookup, lambda one: [shown(one), one.step], lambda one: one.release()),
        "emberd.train.TrainStream": Kind(lambda world: world.model.train(world.group()), step_of_stream, CLOSE),
        "emberd.programs.Program": Kind(lambda world: world.program(), lambda one: one({"t": IDS})["t"].tolist(), CLOSE),
        "emberd.programs.PreparedBatch": Kind(lambda world: world.program().prepare({"t": IDS}), lambda one: list(one.read(csr=True)), CLOSE),
        "emberd.programs.ProgramResult": Kind(lambda world: world.program()({"t": IDS}), shown, CLOSE),
        "emberd.programs.Bundle": Kind(lambda world: world.client.bundle({"x": ZEROS}, ({"y": ZEROS},)), lambda one: len(one.read()), CLOSE),
        "emberd.programs.BundlePart": Kind(lambda world: world.client.bundle({"x": ZEROS})[0], lambda one: one[0]._places),
        "emberd.programs.Chain": Kind(lambda world: emberd.Chain(), lambda one: len(one._added)),
        "emberd.programs.ChainedResult": Kind(lambda world: emberd.Chain().add(world.program(), {"t": IDS}), lambda one: one["t"]._element),
        "emberd.watching.Watch": Kind(lambda world: emberd.watch(world.model), lambda one: one.refresh().statistics.model, CLOSE),
        "emberd.aio.Client": Kind(lambda world: emberd.aio.Client(world.client, 2), lambda one: asyncio.run(one.model("m")).name, lambda one: asyncio.run(one.close())),
        "emberd.aio.Model": Kind(lambda world: emberd.aio.Model(emberd.aio.Client(world.client, 2), world.model),
                                 lambda one: asyncio.run(one.read_rows("t", IDS)).tolist(), lambda one: one.client.blocking.close()),
        "emberd.aio.TrainStream": Kind(lambda world: emberd.aio.TrainStream(emberd.aio.Model(emberd.aio.Client(world.client, 2), world.model), world.model.train(world.group())),
                                       lambda one: asyncio.run(step_of_awaited(one)), lambda one: asyncio.run(one.close())),
        "emberd.local.LocalCluster": Kind(lambda _: emberd.local(shards=1), lambda one: [one.log() is not None, one.address], CLOSE),
        "emberd.steps.Steps": Kind(World.steps, step_of_steps, FINISH),
        "emberd.steps.Step": Kind(lambda world: world.steps().send({"t": IDS}), lambda one: [one.number, shown(one.ids)]),
        "emberd.trainer.Trainer": Kind(World.trainer, step_of_trainer, FINISH),
        "array of a lookup": Kind(lambda world: world.lookup()["t"]),
        "array of a step": Kind(lambda world: world.received()["t"]),
        "array of rows": Kind(lambda world: world.model.read_rows("t", IDS)),
        "array of gradients": Kind(World.gradients),
        "iterator of export": Kind(lambda world: world.model.export("t", rows_at_a_time=1), lambda one: next(one)[1].shape, CLOSE),
        "iterator of ahead": Kind(lambda world: emberd.trainer.ahead([{"t": IDS}] * 999, world.trainer().send, emberd._pace.Pace(2), lambda _: None),
                                  lambda one: next(one)[1]["t"].tolist(), CLOSE),
    }
    found = {**values(), **live}
    # An interpreter that ends unwinds the frames of threads, which those of C++ do not survive; and no fork survives JAX's threads.
    for framework, make, spared in ((torch, kinds_of_torch, ["exit while a thread uses it"]), (jax, kinds_of_jax, SPARED_BY_JAX),
                                    (keras, kinds_of_keras, SPARED_BY_JAX)):
        found.update((name, dataclasses.replace(kind, spared=spared)) for name, kind in (make().items() if framework else ()))
    still = {name: kind for name, kind in found.items() if not kind.live}
    found["all that is not live"] = Kind(lambda world: {name: kind.make(world) for name, kind in still.items()},
                                         lambda made: [still[name].use(one) for name, one in made.items()], spared=["exit while a thread uses it"])
    return found


def values():
    """What holds nothing of the library: made of examples for the arguments that it requires."""
    tables = counting_model("d").tables
    examples = {"stacks": 1, "table_bytes": 64, **dict.fromkeys(("stack_name", "combiner", "initializer", "table_spec", "stats"), "s"), **dict.fromkeys((
        "min_value", "max_value", "padded_vocab_size", "padded_embedding_dim", "stack_vocab_size", "stack_embedding_dim", "total_sample_count",
        "input_shape", "output_shape", "num_minibatches"), (1,)), "name": "t", "model": "m", "tables": tables, "features": counting_model("d").features,
                "vocabulary_size": 8, "embedding_dim": 4,
                "table": "t", "value": 0.5, "lower": -1.0, "upper": 1.0, "num_buckets": 16, "stack": "s", "optimizer": "sgd", "slots": (),
                "ids": IDS, "values": IDS, "row_splits": np.array([0, 1, 2]), "indices": np.array([0, 1]), "samples": 2, "step": 3,
                "time": 5, "examples": 1, "batches": 1, "unique_ids": 1, "dropped_ids": 0, "updates": 1, "failures": 0, "wait_seconds": 0.5, "serves": "",
                "lost": "", "shard": 0, "address": "a", "error": "", "table_budget_bytes": 1, "resident_bytes": 1, "memory_bytes": 1, "id": 7, "lookups": 5,
                "share": 0.5, "percentiles": {50.0: 0.5}, "evicted": (), **dict.fromkeys((
                     "total", "count", "min", "max", "mean", "standard_deviation", "changed", "returned", "evicted_bytes", "moved_tables", "free_bytes", "pinned_bytes"), 1), **dict.fromkeys(("max_ids_per_partition", "max_unique_ids_per_partition", "largest_ids_per_partition",
                                               "largest_unique_ids_per_partition", "max_ids_per_chip_per_sample",
                                               "max_minibatches_per_sparsecore", "largest_ids_per_chip_per_sample", "largest_minibatches"), 1), "rows_updated": 1, "rows_skipped": 0, "phase": "saving", "bytes": 5, "total_bytes": 6, "elapsed": 0.5, "num_embeddings": 8}
    found = {}
    for name, kind in public_classes().items():
        if issubclass(kind, Exception):
            found[name] = Kind(lambda _, kind=kind: kind("what went wrong"), live=False)
        elif issubclass(kind, enum.Enum):
            found[name] = Kind(lambda _, kind=kind: next(iter(kind)), live=False)
        elif dataclasses.is_dataclass(kind) and kind is not emberd.Checkpoint:
            required = [one.name for one in dataclasses.fields(kind) if one.default is one.default_factory is dataclasses.MISSING]
            if set(required) <= set(examples):
                found[name] = Kind(lambda _, kind=kind, required=required: kind(*(examples[one] for one in required)), live=False)
    found["emberd.checkpoints.Checkpoints"] = Kind(lambda world: world.client.checkpoints("m"))
    found["emberd.checkpoints.Checkpoint"] = Kind(lambda world: world.client.checkpoints("m")[0])
    return found


def kinds_of_torch():
    from emberd.compat import jagged, torchrec
    ids = torch.tensor([1, 2])

    def keyed(kind=jagged.KeyedJaggedTensor):
        return kind(["t"], ids, lengths=torch.tensor([1, 1]))

    def collection(world, **options):
        made = emberd.torch.EmbeddingBagCollection(counting_model("m").tables, client=world.client, model="m", **world.joins(), **options)
        made.optimizer()
        return made

    def step(made, given=None, optimizer=None):
        found = made({"t": ids} if given is None else given)["t"]
        (found * 0).sum().backward()
        optimizer = optimizer or (made._optimizers or [made.optimizer()])[0]
        optimizer.step()
        optimizer.zero_grad()
        return found.tolist()

    def sequences(world):
        made = emberd.torch.EmbeddingCollection(counting_model("m").tables, client=world.client, model="m", mask_zero=True, **world.joins())
        made.optimizer()
        return made

    def bag(world, kind="EmbeddingBag"):
        made = getattr(emberd.torch, kind)(64, 4, client=world.client, model="m", table=counting_model("m").tables[0], **world.joins())
        return made

    def of_torchrec(world, kind="Bag"):
        torchrec.use(world.client, model=f"r{kind}", group=world.group())
        config = getattr(torchrec, f"Embedding{kind}Config")(64, 4, "t", feature_names=["t"], weight_init_min=0.0, weight_init_max=0.0)
        made = getattr(torchrec, f"Embedding{kind}Collection")(tables=[config])
        torchrec.apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 1.0})
        return made

    def columns(world):
        made = collection(world)
        made(keyed())
        return made._optimizers[0].param_groups[0]["params"][0]

    return {
        "emberd.torch.collection.EmbeddingBagCollection": Kind(collection, step, FINISH),
        "EmbeddingBagCollection that accumulates": Kind(lambda world: collection(world, accumulate=True), step, FINISH),
        "EmbeddingBagCollection that is pipelined": Kind(lambda world: collection(world, pipelined=True), step, FINISH),
        "emberd.torch.optimizer.EmbeddingOptimizer": Kind(lambda world: collection(world)._optimizers[0],
                                              lambda one: [step(one.collection, optimizer=one), one.param_groups[0]["lr"]]),
        "emberd.torch.layers.EmbeddingBag": Kind(bag, lambda one: step(one.collection), FINISH),
        "emberd.torch.collection.EmbeddingCollection": Kind(sequences, lambda one: step(one, {"t": torch.tensor([[1, 0]])}), FINISH),
        "emberd.torch.layers.Embedding": Kind(lambda world: bag(world, "Embedding"), lambda one: step(one.collection), FINISH),
        "emberd.torch.collection.KeyedTensor": Kind(lambda world: collection(world)(keyed())),
        "columns of a KeyedTensor": Kind(columns),
        "emberd.torch.prefetcher.Prefetcher": Kind(lambda world: emberd.torch.Prefetcher([{"t": ids}] * 3, collection(world)),
                                        lambda one: [step(one.collection, batch) for batch in one]),
        "iterator of a Prefetcher": Kind(lambda world: iter(emberd.torch.Prefetcher([{"t": ids}] * 9, collection(world))),
                                         lambda one: next(one)["t"].tolist(), CLOSE),
        "emberd.compat.jagged.JaggedTensor": Kind(lambda _: keyed()["t"], lambda one: one.to_dense()[0].tolist(), live=False),
        "emberd.compat.jagged.KeyedJaggedTensor": Kind(lambda _: keyed(), lambda one: [one.keys(), *map(shown, one["t"].to_dense())], live=False),
        "emberd.compat.jagged.KeyedTensor": Kind(lambda _: jagged.KeyedTensor(["t"], [2], torch.ones(1, 2)), live=False),
        "emberd.compat.torchrec.EmbeddingBagCollection": Kind(of_torchrec, lambda one: one(keyed())["t"].tolist()),
        "emberd.compat.torchrec.EmbeddingCollection": Kind(lambda world: of_torchrec(world, ""), lambda one: one(keyed())["t"].values().tolist()),
        "emberd.compat.torchrec.RowWiseAdagrad": Kind(lambda _: torchrec.RowWiseAdagrad([torch.zeros(1)], 0.5),
                                                       lambda one: one.param_groups[0]["lr"], live=False),
    }


def kinds_of_jax():
    import jax.numpy as jnp

    def embedding(world):
        return emberd.jax.Embedding(world.model, world.group(), patience=1.0)

    def step(made):
        number = made.send({"t": IDS})
        found = made.receive(number)["t"].tolist()
        made.update(number, {"t": ZEROS})
        return found

    def layer(one):
        return np.asarray(one({"t": jnp.array([1, 2], jnp.int32)})["t"]).tolist()

    compat = "emberd.compat.jax_tpu_embedding.sparsecore.lib."
    nn, spec, messages = (optional(f"{compat}{name}") for name in ("nn.embedding", "nn.embedding_spec", "proto.embedding_spec_pb2"))
    inputs = nn.SparseDenseMatmulInput({"t": np.array([0, 1])}, {"t": np.array([5])}, {}, {})
    return {
        **{f"{compat}fdo.{module}.{name}": Kind(lambda _, module=module, name=name: getattr(optional(f"{compat}fdo.{module}"), name)(
            os.environ[SWEEP]), lambda one: one._folder, live=False)
           for module, name in (("file_fdo_client", "NPZFileFDOClient"), ("csv_file_fdo_client", "CSVFileFDOClient"))},
        f"{compat}nn.embedding_spec.TableSpec": Kind(lambda _: spec.TableSpec("t", 8, 4, optimizer=spec.SGDOptimizerSpec()), live=False),
        f"{compat}nn.embedding_spec.QuantizationConfig": Kind(lambda _: spec.QuantizationConfig(-1.0, 1.0, 16), live=False),
        f"{compat}flax.nnx.checkpoint_utils.TargetTopology": Kind(
            lambda _: optional(f"{compat}flax.nnx.checkpoint_utils").TargetTopology(4, 2), tuple, live=False),
        f"{compat}nn.embedding_spec.CallablePlaceholder": Kind(lambda _: spec.CallablePlaceholder("a"), repr, live=False),
        **{f"{compat}nn.embedding_spec.{name}": Kind(lambda _, name=name: getattr(spec, name)(*range(len(getattr(spec, name)._fields))), tuple, live=False)
           for name in vars(spec) if name.endswith("SlotVariables")},
        **{f"{compat}proto.embedding_spec_pb2.{name}": Kind(lambda _, name=name: getattr(messages, name)(), str, live=False)
           for name in ("EmbeddingSpecProto", "FeatureSpecProto", "OptimizerSpecProto", "StackedTableSpecProto", "TableSpecProto")},
        f"{compat}nn.embedding.SparseDenseMatmulInput": Kind(lambda _: inputs, lambda one: shown(tuple(one)), live=False),
        f"{compat}nn.embedding.PreprocessedInput": Kind(lambda _: nn.PreprocessedInput(inputs, 1), lambda one: shown(tuple(one)), live=False),
        "emberd.jax.embedding.Embedding": Kind(embedding, step, FINISH),
        "emberd.jax.nnx.Token": Kind(lambda world: emberd.jax.nnx.Embed(embedding(world)).token, lambda one: float(one[...])),
        "emberd.jax.nnx.Embed": Kind(lambda world: emberd.jax.nnx.Embed(embedding(world)), layer),
        "a jax.Array of a step": Kind(lambda world: (lambda one: one.receive(one.send({"t": IDS}))["t"])(embedding(world))),
        "iterator of Embedding.prefetch": Kind(lambda world: embedding(world).prefetch([{"t": IDS}] * 9),
                                               lambda one: next(one)[1]["t"].tolist(), CLOSE),
    }


def kinds_of_keras():
    layers = emberd.keras

    def layer(world):
        table = layers.TableConfig("t", 64, 4, initializer="zeros", optimizer=emberd.SGD(learning_rate=1.0), combiner="sum")
        return layers.DistributedEmbedding(layers.FeatureConfig("t", table, (2,), (2, 4)), client=world.client, model="k", **world.joins())

    def look_up(one):
        return np.asarray(one(IDS.astype(np.int32))).tolist()

    return {"emberd.keras.layer.DistributedEmbedding": Kind(layer, look_up, FINISH)}
