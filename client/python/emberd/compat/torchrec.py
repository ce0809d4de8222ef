"""EmbeddingBagCollection and EmbeddingCollection of torchrec by changed imports only, with their tables on a cluster of emberd.

    from emberd.compat.torchrec import (EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType,
                                        apply_optimizer_in_backward)

    ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="t1", embedding_dim=64, num_embeddings=1_000_000,
                                                            feature_names=["user"], pooling=PoolingType.SUM)])
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.02})
    loss = bce(net(ebc(KeyedJaggedTensor(keys, values, lengths=lengths)).values()), labels)
    loss.backward()                                             # updates the tables, as torchrec's fused optimizers do

An EmbeddingCollection, of EmbeddingConfig, gives a JaggedTensor for each feature instead: a row for each id.
The names, signatures and values are those of torchrec's documentation. The cluster is that of the environment's
EMBERD_ADDRESS, or of `use`; without either, one is started that ends with this process.

What differs from torchrec: parameters have the shape of their table but no memory. They are there for
apply_optimizer_in_backward, and for requires_grad_(False), which freezes a table; a change of them in place raises, and so does
a gradient of them. The optimizer's state is the cluster's; each row that a batch looked up gets one update, also with Adam; and
the ranks of torch.distributed train the same tables without DistributedModelParallel, their gradients being summed, where
torchrec divides them by the number of ranks: DistributedDataParallel goes around the dense part alone, for it refuses a module
with such parameters. `state_dict()` reads whole tables, and `load_state_dict()` writes them. A copy of a collection, by
copy.deepcopy or pickle, has the same tables.
A model that torchrec trained goes on here with the state of its optimizer: `load_with_slots`.
is_weighted together with PoolingType.MEAN is refused, as by torchrec's modules that are not sharded; sharded ones divide by the
number of ids. `backward` takes the gradients as they are, as torchrec's fused optimizers do: a GradScaler, which scales the
loss, would scale the updates, too. emberd.torch has an optimizer that it knows.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np
import torch

from .. import config
from .._filling import Part
from .._jagged import is_jagged, learned_weights, split_jagged
from .._loading import stretches
from ..arrays import Ids, Ragged, Sequences, copied
from ..client import Client, Model
from ..errors import AlreadyExists
from ..steps import Step, Steps
from ..torch._collection import _rank_and_size, refuse_tracing
from ..torch._rows import as_it_is, changes
from ._in_turn import Place
from .jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["DataType", "EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig", "JaggedTensor",
           "KeyedJaggedTensor", "KeyedTensor", "PoolingType", "RowWiseAdagrad", "apply_optimizer_in_backward", "use"]


class PoolingType(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class DataType(enum.Enum):
    """How the cluster stores a table; activations and gradients are float32."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@dataclass
class _Config:
    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: List[str] = field(default_factory=list)
    weight_init_max: Optional[float] = None
    weight_init_min: Optional[float] = None
    init_fn: Optional[Callable[[torch.Tensor], Optional[torch.Tensor]]] = None

    def get_weight_init_max(self) -> float:
        return math.sqrt(1 / self.embedding_dim) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        return -math.sqrt(1 / self.embedding_dim) if self.weight_init_min is None else self.weight_init_min


@dataclass
class EmbeddingConfig(_Config):
    """init_fn: as that of EmbeddingBagConfig."""


@dataclass
class EmbeddingBagConfig(_Config):
    """init_fn: gets the whole table as a tensor, and fills it in place; default: uniform in +-1/sqrt(embedding_dim)."""

    pooling: PoolingType = PoolingType.SUM


class RowWiseAdagrad(torch.optim.Optimizer):
    """One accumulator for each row. For apply_optimizer_in_backward; it makes no step by itself."""

    def __init__(self, params: Any, lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps})

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        raise RuntimeError("RowWiseAdagrad: give it to apply_optimizer_in_backward; the tables are updated in backward")


def _sgd(lr: float) -> config.Optimizer:
    return config.SGD(learning_rate=lr)


def _adagrad(lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> config.Optimizer:
    if eps > max(1e-10, 1e-7 * math.sqrt(max(0, initial_accumulator_value))):  # one would see it; torch has it behind the root
        return config.Custom(lr, expression="accumulator = accumulator + g * g; w = w - lr * g / (sqrt(accumulator) + eps)",
                             slots={"accumulator": initial_accumulator_value}, hyper_parameters={"eps": eps})
    return _adagrad_below_root(lr, initial_accumulator_value, eps)


def _adagrad_below_root(lr: float, initial_accumulator_value: float, eps: float) -> config.Optimizer:
    if initial_accumulator_value > 0:
        return config.Adagrad(learning_rate=lr, initial_accumulator=initial_accumulator_value)
    # Adagrad alone needs an accumulator that is not 0. Here epsilon stands below the root.
    return config.AdagradMomentum(learning_rate=lr, momentum=0.0, beta2=1.0, exponent=2.0, initial_accumulator=0.0,
                                  epsilon=max(eps * eps, 1e-30))


def _bounds(table: Any) -> Tuple[float, float]:
    return table.get_weight_init_min(), table.get_weight_init_max()


def _earlier_bounds(table: Any) -> Tuple[float, float]:
    """Those of tables that were declared while torchrec divided by num_embeddings."""
    bound = math.sqrt(1 / table.num_embeddings)
    return (-bound if table.weight_init_min is None else table.weight_init_min,
            bound if table.weight_init_max is None else table.weight_init_max)


def _same_optimizer(made: Optional[config.Optimizer]) -> Optional[config.Optimizer]:
    return made


def _earlier_optimizer(made: Optional[config.Optimizer]) -> Optional[config.Optimizer]:
    """What tables have that were declared before Adagrad's epsilon stood behind the root."""
    if not isinstance(made, config.Custom):
        return made
    assert made.slots and made.hyper_parameters and made.learning_rate is not None
    return _adagrad_below_root(made.learning_rate, made.slots["accumulator"], made.hyper_parameters["eps"])


def _row_wise_adagrad(lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> config.Optimizer:
    return config.RowwiseAdagrad(learning_rate=lr, initial_accumulator=initial_accumulator_value, epsilon=eps)


def _adam(lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> config.Optimizer:
    return config.Adam(learning_rate=lr, beta1=betas[0], beta2=betas[1], epsilon=eps, bias_correction=True)


_OPTIMIZERS: Dict[Type[torch.optim.Optimizer], Callable[..., config.Optimizer]] = {
    torch.optim.SGD: _sgd, torch.optim.Adagrad: _adagrad, torch.optim.Adam: _adam, RowWiseAdagrad: _row_wise_adagrad}


def apply_optimizer_in_backward(optimizer_class: Type[torch.optim.Optimizer], params: Iterable[Any],
                                optimizer_kwargs: Mapping[str, Any]) -> None:
    """Makes `backward` update the tables of these parameters. torch.optim.SGD, Adagrad or Adam, or RowWiseAdagrad, with
    their numbers; before the tables are used for the first time."""
    if optimizer_class not in _OPTIMIZERS:
        raise ValueError(f"optimizer_class: {optimizer_class.__name__} is not allowed; it must be one of "
                         + ", ".join(kind.__name__ for kind in _OPTIMIZERS))
    try:
        optimizer_class([torch.nn.Parameter(torch.zeros(1))], **optimizer_kwargs)  # which checks numbers
        made = _OPTIMIZERS[optimizer_class](**optimizer_kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"optimizer_kwargs: {dict(optimizer_kwargs)} are not allowed for {optimizer_class.__name__} of "
                         f"tables: {error}") from error
    for parameter in params:
        owner = getattr(parameter, "_emberd_table", None)
        if owner is None:
            raise ValueError("params: they must be parameters of an EmbeddingBagCollection or EmbeddingCollection; give others to "
                             "an optimizer of torch.optim")
        owner._set_optimizer(made)


_place = Place("torchrec")


def use(client: Client, *, model: str = "torchrec", group: str = "train", **options: Any) -> None:
    """Makes the next collections on the cluster of this client, in models named `model`, `model`_1 and so on.

    A model of this name that exists already is used as it is, with its rows. Without it, the cluster at the
    address in EMBERD_ADDRESS is taken, or one is started. options: rank, size, patience, step_timeout, ... of
    emberd.steps.Steps.
    """
    _place.use(client, model, group, **options)


def _feature(output: str) -> str:
    """The name of an output on the cluster."""
    return output.replace("@", ".")


_LOST = ("weight: rows are on the cluster, so that a change of this parameter would be lost; load_state_dict of the collection "
         "overwrites its tables, and init_fn of a config gives a table its first rows. What averages or copies parameters is to be "
         "given the dense part alone")
_NO_VALUES = ("weight: rows are on the cluster, so that this parameter has no values to compute with; state_dict() of the collection "
              "reads whole tables, and a call with ids gives their rows, whose gradients train them")
# What leaves the numbers of a parameter as they are. Loops set gradients to None that there are not.
_of_torch: Any = torch.Tensor
_ALLOWED = (_of_torch.requires_grad_, _of_torch.requires_grad.__set__, _of_torch.grad.__set__)


class _Weight(torch.nn.Parameter):
    """Of the shape of a table, and without memory. A change of it, and of what is made of it, would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        if func not in _ALLOWED and changes(_Weight, func, args, kwargs or {}):
            raise RuntimeError(_LOST)
        with as_it_is():
            try:
                found = func(*args, **(kwargs or {}))
            except NotImplementedError as error:  # as of .item()
                raise RuntimeError(_NO_VALUES) from error

        def marked(one: Any) -> Any:
            if type(one) is torch.Tensor and one.is_meta:
                if any(isinstance(other, torch.Tensor) and not other.is_meta for other in args):
                    raise RuntimeError(_NO_VALUES)
                return one.as_subclass(_Weight)
            return type(one)(map(marked, one)) if type(one) in (list, tuple) else one

        return marked(found)

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(self.shape, device="meta"), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # of which _Table makes one again


def _refuse_gradient(_: torch.Tensor) -> None:
    raise RuntimeError(_NO_VALUES)


class _Table(torch.nn.Module):
    """What torchrec has an nn.EmbeddingBag or nn.Embedding for."""

    weight: torch.nn.Parameter

    def __init__(self, described: _Config, collection: "_Collection") -> None:
        super().__init__()
        self.described = described
        self.optimizer: Optional[config.Optimizer] = None
        self._collection = (collection,)  # no submodule
        self._make_weight(True)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._make_weight(self.weight.requires_grad)  # a copy is a plain parameter

    def forward(self, *_: Any, **__: Any) -> Any:
        """As of a collection alone, which makes one step of all its tables."""
        raise RuntimeError(f"table {self.described.name!r}: it cannot be called; call the collection, and take the feature's activations")

    def reset_parameters(self) -> None:
        """As that of a collection, of this table."""
        self._collection[0]._reset([self.described])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and not isinstance(value, _Weight):
            raise RuntimeError(_LOST)
        super().__setattr__(name, value)

    def _make_weight(self, requires_grad: bool) -> None:
        self.weight = _Weight(torch.empty(self.described.num_embeddings, self.described.embedding_dim, device="meta"))
        self.weight.register_hook(_refuse_gradient)
        self.weight.requires_grad_(requires_grad)
        self.weight._emberd_table = self  # type: ignore[attr-defined]

    def _set_optimizer(self, optimizer: config.Optimizer) -> None:
        if self._collection[0]._model is not None:
            raise RuntimeError(f"table {self.described.name!r} has been used already: apply the optimizer before that")
        self.optimizer = optimizer

    def _apply(self, fn: Any, *_: Any, **__: Any) -> "_Table":
        return self  # its memory is the cluster's

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = torch.from_numpy(self._collection[0]._declared().table(self.described.name))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: List[str], unexpected_keys: List[str], error_msgs: List[str]) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is None:
            missing_keys.append(prefix + "weight")
        elif tuple(weight.shape) != tuple(self.weight.shape):
            error_msgs.append(f"{prefix}weight: the shape {list(weight.shape)} is not allowed; it must be "
                              f"{list(self.weight.shape)}")
        else:
            model = self._collection[0]._declared()
            model.load_table(self.described.name, weight)
            model._known = True  # who loads goes on


class _Pull(torch.autograd.Function):
    """Activations, whose gradients update the rows."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, collection: "_Collection", step: Step,
                activations: List[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """activations: in a list, for torch gives back views of what are arguments, which may not be changed in place."""
        ctx.collection, ctx.step = collection, step
        return tuple(activations)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.collection._update(ctx.step, gradients)
        return None, None, None, None


def _check_names(tables: Sequence[_Config]) -> None:
    if not tables:
        raise ValueError("tables: an empty list is not allowed; at least one is needed")
    names = [table.name for table in tables]
    for place, table in enumerate(tables):
        if not table.name or names.index(table.name) < place:
            raise ValueError(f"tables[{place}]: name: {table.name!r} is not allowed; "
                             + (f"it is that of tables[{names.index(table.name)}], too, and must be unique; a table of several features has "
                                "them all in its feature_names" if table.name else "it is empty"))
        for feature in table.feature_names:
            if table.feature_names.count(feature) > 1:
                raise ValueError(f"tables[{place}]: feature_names: {feature!r} is not allowed twice")


# What torchrec's fused optimizers call the slots: the first one is always momentum1, and momentum2 was Adam's second one in earlier versions.
_SAVED_SLOTS: Dict[Type[config.Optimizer], Dict[str, Tuple[str, ...]]] = {
    config.SGD: {}, config.Adam: {"momentum": ("momentum1",), "velocity": ("exp_avg_sq", "momentum2")},
    **{kind: {"accumulator": ("momentum1",)} for kind in (config.Adagrad, config.AdagradMomentum, config.Custom, config.RowwiseAdagrad)}}


def _check_saved_names(what: str, given: Sequence[str], wanted: Sequence[str]) -> None:
    wrong = sorted(set(given) ^ set(wanted))
    if wrong:
        raise ValueError(f"{what}: {wrong[0]!r} is {'not allowed' if wrong[0] in given else 'missing'}; there must be "
                         f"{' and '.join(wanted) or 'none'}, and there are {', '.join(given) or 'none'}")


def _saved_table(key: str, weight: Any, saved: Mapping[str, Any], described: _Config, optimizer: Optional[config.Optimizer]) -> Tuple[torch.Tensor, Dict[str, torch.Tensor]]:
    """Its weights and its slots."""
    if optimizer is None:
        raise RuntimeError(f"table {described.name!r} has no optimizer: call apply_optimizer_in_backward first, with the optimizer that the state is of")
    wanted = {slot: next((name for name in (f"{described.name}.{one}" for one in names) if name in saved), f"{described.name}.{names[0]}")
              for slot, names in _SAVED_SLOTS[type(optimizer)].items()}
    _check_saved_names(f"optimizer_state: {key!r} with the table's optimizer {optimizer.kind}", list(saved), list(wanted.values()))
    shape = (described.num_embeddings, described.embedding_dim)
    by_row = shape[:1] if isinstance(optimizer, config.RowwiseAdagrad) else shape
    slots = {slot: _whole(f"optimizer_state: {key!r}: {name!r}", saved[name], by_row, optimizer.kind) for slot, name in wanted.items()}
    return _whole(f"state: {key!r}", weight, shape, ""), {slot: values.reshape(shape[0], -1) for slot, values in slots.items()}


def _whole(what: str, values: Any, shape: Tuple[int, ...], optimizer: str) -> torch.Tensor:
    if type(values) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{what}: a {type(values).__name__} is not allowed; give a whole tensor, as ShardedTensor.gather or DTensor.full_tensor makes it")
    if tuple(values.shape) != shape:
        raise ValueError(f"{what}: the shape {list(values.shape)} is not allowed; it must be {list(shape)}"
                         + (f" with the table's optimizer {optimizer}; apply the optimizer that the state is of" if optimizer else ""))
    found: torch.Tensor = values.detach()
    return found


class _Collection(torch.nn.Module):
    """In training each call is a step, which `backward` ends; one without is skipped by the next call. In evaluation or under
    no_grad rows are only looked up."""

    _side_by_side = False  # activations are columns of one matrix

    def __init__(self, tables: Sequence[_Config]) -> None:
        super().__init__()
        self._configs: List[Any] = list(tables)
        for table in tables:
            table.feature_names = list(table.feature_names) or [table.name]
        _check_names(tables)
        names = [name for table in tables for name in table.feature_names]
        # (output, feature, table): as torchrec has it, a feature of several tables gives an output for each.
        self._outputs = [(name if names.count(name) == 1 else f"{name}@{table.name}", name, table)
                         for table in tables for name in table.feature_names]
        self._tables = {table.name: _Table(table, self) for table in tables}
        self._client, self._name = _place.take()
        self._options: Dict[str, Any] = {"group": _place.group, **_place.options}
        self._model: Optional[Model] = None
        self._steps: Optional[Steps] = None
        self._trigger = torch.zeros((), device="cpu", requires_grad=True)
        self._current: Optional[Step] = None

    def __getstate__(self) -> Dict[str, Any]:
        """A copy has the same tables, and no step under way."""
        return {**self.__dict__, "_steps": copy.copy(self._steps), "_current": None}

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def load_with_slots(self, state: Mapping[str, Any], optimizer_state: Mapping[str, Any], prefix: str = "") -> None:
        """Overwrites all tables, with the slots of their optimizers, by what torchrec saved, so that the next step is that which torchrec would have made.

            collection.load_with_slots(model.state_dict(), model.fused_optimizer.state_dict(), prefix="sparse.")

        state, optimizer_state: of the sharded model and of its fused optimizer, as whole tensors: ShardedTensor.gather and DTensor.full_tensor make them.
        prefix: of the names of this collection in both, such as "sparse."; names that begin otherwise are not looked at.
        Adam counts steps, which are not in a state of torchrec: `use(client, first_step=…)` gives how many it has made. ValueError for a name or shape that is not
        that of a table and its optimizer, before anything has changed.
        """
        states = optimizer_state.get("state")
        if not isinstance(states, Mapping):
            raise ValueError("optimizer_state: it has no mapping 'state'; give fused_optimizer.state_dict() of a model that torchrec has sharded")
        group = "embedding_bags" if self._side_by_side else "embeddings"
        wanted = {f"{prefix}{group}.{one.name}.weight": one for one in self._configs}
        for what, names in (("state", state), ("optimizer_state", states)):
            _check_saved_names(what, [name for name in names if name.startswith(prefix)], list(wanted))
        of_tables = {one.name: _saved_table(key, state[key], states[key], one, self._tables[one.name].optimizer) for key, one in wanted.items()}
        if "first_step" not in self._options and any(isinstance(table.optimizer, config.Adam) for table in self._tables.values()):
            raise ValueError("optimizer_state: Adam's bias correction counts steps, which are not in a state of torchrec; give the number of those that it has made "
                             "by use(client, first_step=…) before the collection is made")
        model = self._declared()
        for name, (weight, slots) in of_tables.items():
            model.load_table(name, weight, slots)
        model._known = True  # who loads goes on

    def reset_parameters(self) -> None:
        """Overwrites all tables with new first rows, of init_fn or uniform; the optimizer's state stays. Of several ranks, rank 0
        does it, before any has trained: where ranks do not wait for each other, put a barrier behind it."""
        self._reset(self._configs)

    def _reset(self, tables: Sequence[Any]) -> None:
        model = self._declared()
        assert self._steps is not None
        if self._steps.rank > 0:
            return
        for name, _, rows, values in self._first_rows(tables):
            model.assign_rows(name, rows, values)
        model._known = True

    def _look_up(self, ids: Dict[str, Ids]) -> List[torch.Tensor]:
        """By output; or one tensor, where they are side by side."""
        model = self._declared()
        for table in self._tables.values():
            if not isinstance(getattr(table, "weight", None), _Weight):  # functional_call puts another one there
                raise RuntimeError(_LOST)
        frozen = {_feature(output) for output, _, table in self._outputs if not self._tables[table.name].weight.requires_grad}
        moving = {output: one for output, one in ids.items() if output not in frozen}
        assert self._steps is not None
        if not (self.training and torch.is_grad_enabled() and moving):
            self._steps.warn_of_other_rows()
            found = model.lookup(ids)
            return [torch.from_numpy(one) for one in ([found.concat] if self._side_by_side else [found[output] for output in ids])]
        before = self._current
        if before is not None and before.gradients is not None:
            self._steps.confirm(given=before)  # what has been sent, when it was interrupted
        elif before is not None and not before.forgotten:
            self._steps.skip(before)
        self._current = None
        self._steps.forget()  # what a call that was interrupted has sent
        still: Mapping[str, Any] = {}
        if frozen:
            still = model.lookup({output: ids[output] for output in ids if output in frozen}, partial=True)
        own = {output: copied(one) for output, one in moving.items()}
        step = self._steps.send(own, concat=self._side_by_side and not frozen, partial=bool(frozen))
        received = self._steps.receive(step)
        self._current = step
        given = [torch.from_numpy(one) for one in ([received.concat] if step.concat else [received[output] for output in moving])]
        pulled: Any = _Pull.apply(self._trigger, self, step, given)
        if step.concat:
            return list(pulled)
        trained = dict(zip(moving, pulled))
        return [trained[output] if output in trained else torch.from_numpy(still[output]) for output in ids]

    def finish(self) -> None:
        """Leaves the group of trainers, once all updates have been made."""
        self._current = None
        if self._steps is not None:
            self._steps.finish()

    def _of_outputs(self, features: Any) -> Iterator[Tuple[str, str, Ragged]]:
        """(output on the cluster, feature, ids)"""
        if not is_jagged(features):
            raise TypeError(f"features: a {type(features).__name__} is not allowed; give a KeyedJaggedTensor")
        split: Dict[str, Any] = split_jagged(features)
        for output, name, _ in self._outputs:
            if name not in split:
                raise ValueError(f"feature {name!r} is missing; there are ids of {', '.join(split) or 'none'}")
            yield _feature(output), name, split[name]

    def _declared(self) -> Model:
        """Once the optimizers are known: the tables are made when they are first used."""
        if self._model is None:
            given = [one for one in self._configs if one.init_fn is not None]
            try:
                model: Model = self._client._declare_filled(self._described(bool(given)),
                                                            parts=functools.partial(self._first_rows, given) if given else None)
            except AlreadyExists:
                found = self._declare_as_earlier(filled=bool(given))
                if found is None:
                    raise
                model = found
            options = dict(self._options)
            options["rank"], options["size"] = _rank_and_size(options.get("rank"), options.get("size"))
            self._steps = Steps(model, **options)
            self._model = model
        return self._model

    def _declare_as_earlier(self, filled: bool) -> Optional[Model]:
        """As earlier versions did, which gave tables their first rows after they were declared, and had another Adagrad and other bounds."""
        for bounds_of, optimizer_of, with_rows in itertools.product((_bounds, _earlier_bounds), (_same_optimizer, _earlier_optimizer), {filled, False}):
            with contextlib.suppress(AlreadyExists):
                return self._client.declare(self._described(with_rows, optimizer_of, bounds_of))
        return None

    def _described(self, filled: bool, optimizer_of: Callable[[Optional[config.Optimizer]], Optional[config.Optimizer]] = _same_optimizer,
                   bounds_of: Callable[[Any], Tuple[float, float]] = _bounds) -> config.ModelConfig:
        """filled: where a table has an init_fn, that gives its rows."""
        tables = [config.TableConfig(
            one.name, one.num_embeddings, one.embedding_dim, combiner=getattr(one, "pooling", PoolingType.SUM).value.lower(),
            initializer=config.Assigned() if filled and one.init_fn is not None else config.Uniform(*bounds_of(one)),
            optimizer=optimizer_of(self._tables[one.name].optimizer),
            storage_dtype={"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}[one.data_type.value])
            for one in self._configs]
        return config.ModelConfig(self._name, tables, [config.FeatureConfig(_feature(output), table.name) for output, _, table in self._outputs])

    def _first_rows(self, tables: Sequence[Any]) -> Iterator[Part]:
        for one in tables:
            shape = (one.num_embeddings, one.embedding_dim)
            filled: Any = None
            if one.init_fn is not None:
                weight = torch.empty(shape)
                made = one.init_fn(weight)
                filled = weight if made is None else made
                if tuple(filled.shape) != shape:
                    raise ValueError(f"table {one.name!r}: init_fn: the shape {list(filled.shape)} is not allowed; it must be {list(shape)}")
            for begin, end in stretches(shape):
                yield one.name, "", np.arange(begin, end), (
                    torch.empty(end - begin, shape[1]).uniform_(*_bounds(one))
                    if filled is None else filled[begin:end])

    def _update(self, step: Step, gradients: Sequence[torch.Tensor]) -> None:
        if step is not self._current:
            raise RuntimeError("these activations have been updated or skipped already: each call allows one backward")
        without = [name for name, table in self._tables.items() if table.optimizer is None and table.weight.requires_grad]
        if without:
            raise RuntimeError(f"table {without[0]!r} has no optimizer: call apply_optimizer_in_backward with its parameter; "
                               "optimizers of torch.optim do not see tables of a cluster")
        assert self._steps is not None
        if step.gradients is not None:  # sent, when it was interrupted
            self._steps.confirm(given=step)
            self._current = None
            return
        if step.concat:
            gradients = torch.split(gradients[0], [table.embedding_dim for _, _, table in self._outputs], dim=1)
        self._steps.update(step, {output: one.detach().numpy() for output, one in zip(step.ids, gradients)})
        self._current = None


class EmbeddingBagCollection(_Collection):
    """Pooled embeddings: a KeyedJaggedTensor in, a KeyedTensor out. In training each call is a step, which `backward`
    ends; one without is skipped by the next call. In evaluation or under no_grad rows are only looked up."""

    _side_by_side = True

    def __init__(self, tables: List[EmbeddingBagConfig], is_weighted: bool = False, device: Any = None) -> None:
        tables = list(tables)
        for place, table in enumerate(tables):
            if not hasattr(table, "pooling"):
                raise ValueError(f"tables[{place}]: an {type(table).__name__} is not allowed, for it does not say how rows are pooled; give an EmbeddingBagConfig")
            if is_weighted and table.pooling.value == PoolingType.MEAN.value:  # also of torchrec's own configs
                raise ValueError(f"table {table.name!r}: PoolingType.MEAN is not allowed with is_weighted, for it could divide by the sum of the weights or by the number of "
                                 "ids; give PoolingType.SUM, and weights that are divided already")
        super().__init__(tables)
        self._is_weighted = is_weighted
        self.embedding_bags = torch.nn.ModuleDict(self._tables)

    def embedding_bag_configs(self) -> List[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: Any) -> KeyedTensor:
        refuse_tracing()
        if torch.is_grad_enabled() and self._is_weighted and learned_weights(features):
            raise ValueError("weights: they require a gradient, which this class does not give; give the KeyedJaggedTensor "
                             "weights.detach(), or use emberd.torch.EmbeddingBagCollection, which gives it")
        ids: Dict[str, Ids] = {}
        for output, name, given in self._of_outputs(features):
            if self._is_weighted and given.weights is None:
                raise ValueError(f"feature {name!r}: there are no weights, but is_weighted is true")
            ids[output] = Ragged(given.values, given.row_splits, given.weights if self._is_weighted else None)
        found = self._look_up(ids)
        return KeyedTensor([output for output, _, _ in self._outputs], [table.embedding_dim for _, _, table in self._outputs],
                           found[0] if len(found) == 1 else torch.cat(found, 1))


class EmbeddingCollection(_Collection):
    """Embeddings that are not pooled: a KeyedJaggedTensor in, and by feature a JaggedTensor out, with a row for each id. Steps
    are as those of EmbeddingBagCollection. Weights of ids are not looked at, as by torchrec.

    need_indices: the ids are the weights() of the JaggedTensors.
    """

    def __init__(self, tables: List[EmbeddingConfig], device: Any = None, need_indices: bool = False) -> None:
        tables = list(tables)
        for place, table in enumerate(tables):
            if hasattr(table, "pooling"):
                raise ValueError(f"tables[{place}]: an {type(table).__name__} is not allowed, for rows are not pooled; give an EmbeddingConfig")
            if table.embedding_dim != tables[0].embedding_dim:
                raise ValueError(f"tables[{place}]: embedding_dim: {table.embedding_dim} of table {table.name!r} is not allowed beside {tables[0].embedding_dim} of table "
                                 f"{tables[0].name!r}; all must be equal: give the others to another EmbeddingCollection")
        super().__init__(tables)
        self._need_indices = need_indices
        self.embeddings = torch.nn.ModuleDict(self._tables)

    def embedding_configs(self) -> List[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return int(self._configs[0].embedding_dim)

    def embedding_names_by_table(self) -> List[List[str]]:
        return [[output for output, _, of in self._outputs if of is table] for table in self._configs]

    def need_indices(self) -> bool:
        return self._need_indices

    def forward(self, features: Any) -> Dict[str, JaggedTensor]:
        refuse_tracing()
        given = [(output, ids) for output, _, ids in self._of_outputs(features)]
        found = self._look_up({output: Sequences(ids.values) for output, ids in given})
        kind = torch.as_tensor(features.lengths()).dtype
        return {output: JaggedTensor(rows, torch.as_tensor(ids.values) if self._need_indices else None, lengths=torch.from_numpy(np.diff(ids.row_splits)).to(kind))
                for (output, _, _), (_, ids), rows in zip(self._outputs, given, found)}
