"""EmbeddingBagCollection of torchrec by changed imports only, with its tables on a cluster of emberd.

    from emberd.compat.torchrec import (EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType,
                                        apply_optimizer_in_backward)

    ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="t1", embedding_dim=64, num_embeddings=1_000_000,
                                                            feature_names=["user"], pooling=PoolingType.SUM)])
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.02})
    loss = bce(net(ebc(KeyedJaggedTensor(keys, values, lengths=lengths)).values()), labels)
    loss.backward()                                             # updates the tables, as torchrec's fused optimizers do

The names, signatures and values are those of torchrec's documentation. The cluster is that of the environment's
EMBERD_ADDRESS, or of `use`; without either, one is started that ends with this process.

What differs from torchrec: parameters have the shape of their table but no memory, and are there for
apply_optimizer_in_backward alone; the optimizer's state is the cluster's; each row that a batch looked up gets one update,
also with Adam; and the ranks of torch.distributed train the same tables without DistributedModelParallel, their gradients
being summed: DistributedDataParallel goes around the dense part alone, for it refuses a module with such parameters. `state_dict()` reads whole tables, and `load_state_dict()` writes them.
is_weighted together with PoolingType.MEAN is refused, as by torchrec's modules that are not sharded; sharded ones divide by the number of ids.
`backward` takes the gradients as they are, as torchrec's fused optimizers do: a GradScaler, which scales the loss, would scale the updates, too. emberd.torch has an
optimizer that it knows.
"""

from __future__ import annotations

import copy
import enum
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np
import torch

from .. import config
from .._filling import Part
from .._jagged import learned_weights, split_jagged
from .._loading import stretches
from ..arrays import Ids, Ragged
from ..client import Client, Model
from ..errors import AlreadyExists
from ..steps import Step, Steps
from ..torch._collection import _rank_and_size, refuse_tracing
from ._in_turn import Place
from .jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["DataType", "EmbeddingBagCollection", "EmbeddingBagConfig", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor",
           "PoolingType", "RowWiseAdagrad", "apply_optimizer_in_backward", "use"]


class PoolingType(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class DataType(enum.Enum):
    """How the cluster stores a table; activations and gradients are float32."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@dataclass
class EmbeddingBagConfig:
    """init_fn: gets the whole table as a tensor, and fills it in place; default: uniform in +-1/sqrt(num_embeddings)."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: List[str] = field(default_factory=list)
    weight_init_max: Optional[float] = None
    weight_init_min: Optional[float] = None
    init_fn: Optional[Callable[[torch.Tensor], Optional[torch.Tensor]]] = None
    pooling: PoolingType = PoolingType.SUM

    def get_weight_init_max(self) -> float:
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min


class RowWiseAdagrad(torch.optim.Optimizer):
    """One accumulator for each row. For apply_optimizer_in_backward; it makes no step by itself."""

    def __init__(self, params: Any, lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps})

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        raise RuntimeError("RowWiseAdagrad: give it to apply_optimizer_in_backward; the tables are updated in backward")


def _sgd(lr: float) -> config.Optimizer:
    return config.SGD(learning_rate=lr)


def _adagrad(lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> config.Optimizer:
    if initial_accumulator_value > 0:
        return config.Adagrad(learning_rate=lr, initial_accumulator=initial_accumulator_value)
    # Adagrad alone needs an accumulator that is not 0. Here epsilon stands below the root.
    return config.AdagradMomentum(learning_rate=lr, momentum=0.0, beta2=1.0, exponent=2.0, initial_accumulator=0.0,
                                  epsilon=max(eps * eps, 1e-30))


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
        made = _OPTIMIZERS[optimizer_class](**optimizer_kwargs)
    except TypeError as error:
        raise ValueError(f"optimizer_kwargs: {dict(optimizer_kwargs)} are not allowed for {optimizer_class.__name__} of "
                         f"tables: {error}") from error
    for parameter in params:
        owner = getattr(parameter, "_emberd_table", None)
        if owner is None:
            raise ValueError("params: they must be parameters of an EmbeddingBagCollection; give others to an optimizer of "
                             "torch.optim")
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


class _Table(torch.nn.Module):
    """What torchrec has an nn.EmbeddingBag for."""

    weight: torch.nn.Parameter

    def __init__(self, described: EmbeddingBagConfig, collection: "EmbeddingBagCollection") -> None:
        super().__init__()
        self.described = described
        self.optimizer: Optional[config.Optimizer] = None
        self._collection = (collection,)  # no submodule
        self.weight = torch.nn.Parameter(torch.empty(described.num_embeddings, described.embedding_dim, device="meta"))
        self.weight._emberd_table = self  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.weight._emberd_table = self  # type: ignore[attr-defined]  # copies of parameters lose it

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
    """Activations, whose gradient updates the rows."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, collection: "EmbeddingBagCollection", step: Step,
                activations: torch.Tensor) -> torch.Tensor:
        ctx.collection, ctx.step = collection, step
        return activations

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.collection._update(ctx.step, gradients[0])
        return None, None, None, None


class EmbeddingBagCollection(torch.nn.Module):
    """Pooled embeddings: a KeyedJaggedTensor in, a KeyedTensor out. In training each call is a step, which `backward`
    ends; one without is skipped by the next call. In evaluation or under no_grad rows are only looked up."""

    def __init__(self, tables: List[EmbeddingBagConfig], is_weighted: bool = False, device: Any = None) -> None:
        super().__init__()
        self._configs, self._is_weighted = list(tables), is_weighted
        for table in tables:
            if is_weighted and table.pooling is PoolingType.MEAN:
                raise ValueError(f"table {table.name!r}: PoolingType.MEAN is not allowed with is_weighted, for it could divide by the sum of the weights or by the number of "
                                 "ids; give PoolingType.SUM, and weights that are divided already")
            table.feature_names = list(table.feature_names) or [table.name]
        names = [name for table in tables for name in table.feature_names]
        # (output, feature, table): as torchrec has it, a feature of several tables gives an output for each.
        self._outputs = [(name if names.count(name) == 1 else f"{name}@{table.name}", name, table)
                         for table in tables for name in table.feature_names]
        self._tables = {table.name: _Table(table, self) for table in tables}
        self.embedding_bags = torch.nn.ModuleDict(self._tables)
        self._client, self._name = _place.take()
        self._options: Dict[str, Any] = {"group": _place.group, **_place.options}
        self._model: Optional[Model] = None
        self._steps: Optional[Steps] = None
        self._trigger = torch.zeros((), device="cpu", requires_grad=True)
        self._current: Optional[Step] = None

    def __getstate__(self) -> Dict[str, Any]:
        """A copy has the same tables, and no step under way."""
        return {**self.__dict__, "_steps": copy.copy(self._steps), "_current": None}

    def embedding_bag_configs(self) -> List[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, features: Any) -> KeyedTensor:
        refuse_tracing()
        model, ids = self._declared(), self._ids_of(features)
        widths = [table.embedding_dim for _, _, table in self._outputs]
        keys = [output for output, _, _ in self._outputs]
        if not (self.training and torch.is_grad_enabled()):
            return KeyedTensor(keys, widths, torch.from_numpy(model.lookup(ids).concat))
        assert self._steps is not None
        before = self._current
        if before is not None and before.gradients is not None:
            self._steps.confirm(given=before)  # what has been sent, when it was interrupted
        elif before is not None and not before.forgotten:
            self._steps.skip(before)
        self._current = None
        self._steps.forget()  # what a call that was interrupted has sent
        step = self._steps.send(ids, concat=True)
        whole = torch.from_numpy(self._steps.receive(step).concat)
        self._current = step
        pulled: Any = _Pull.apply(self._trigger, self, step, whole)
        return KeyedTensor(keys, widths, pulled)

    def finish(self) -> None:
        """Leaves the group of trainers, once all updates have been made."""
        self._current = None
        if self._steps is not None:
            self._steps.finish()

    def _ids_of(self, features: Any) -> Dict[str, Ids]:
        if torch.is_grad_enabled() and self._is_weighted and learned_weights(features):
            raise ValueError("weights: they require a gradient, which this class does not give; give the KeyedJaggedTensor "
                             "weights.detach(), or use emberd.torch.EmbeddingBagCollection, which gives it")
        split = split_jagged(features)
        result: Dict[str, Ids] = {}
        for output, name, _ in self._outputs:
            if name not in split:
                raise ValueError(f"feature {name!r} is missing; there are ids of {', '.join(split) or 'none'}")
            ids = split[name]
            assert isinstance(ids, Ragged)
            if self._is_weighted and ids.weights is None:
                raise ValueError(f"feature {name!r}: there are no weights, but is_weighted is true")
            result[_feature(output)] = Ragged(ids.values, ids.row_splits, ids.weights if self._is_weighted else None)
        return result

    def _declared(self) -> Model:
        """Once the optimizers are known: the tables are made when they are first used."""
        if self._model is None:
            filled = any(one.init_fn is not None for one in self._configs)
            try:
                model: Model = self._client._declare_filled(self._described(filled), parts=self._first_rows if filled else None)
            except AlreadyExists:
                if not filled:
                    raise
                model = self._client.declare(self._described(False))  # by an earlier version, which gave it these rows after it was declared
            options = dict(self._options)
            options["rank"], options["size"] = _rank_and_size(options.get("rank"), options.get("size"))
            self._steps = Steps(model, **options)
            self._model = model
        return self._model

    def _described(self, filled: bool) -> config.ModelConfig:
        """filled: where a table has an init_fn, that gives its rows."""
        tables = [config.TableConfig(
            one.name, one.num_embeddings, one.embedding_dim, combiner=one.pooling.value.lower(),
            initializer=config.Assigned() if filled and one.init_fn is not None else config.Uniform(one.get_weight_init_min(), one.get_weight_init_max()),
            optimizer=self._tables[one.name].optimizer,
            storage_dtype={"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}[one.data_type.value])
            for one in self._configs]
        return config.ModelConfig(self._name, tables, [config.FeatureConfig(_feature(output), table.name) for output, _, table in self._outputs])

    def _first_rows(self) -> Iterator[Part]:
        for one in self._configs:
            if one.init_fn is not None:
                weight = torch.empty(one.num_embeddings, one.embedding_dim)
                made = one.init_fn(weight)
                filled = weight if made is None else made
                if tuple(filled.shape) != tuple(weight.shape):
                    raise ValueError(f"table {one.name!r}: init_fn: the shape {list(filled.shape)} is not allowed; it must be {list(weight.shape)}")
                for begin, end in stretches(tuple(filled.shape)):
                    yield one.name, "", np.arange(begin, end), filled[begin:end]

    def _update(self, step: Step, gradient: torch.Tensor) -> None:
        if step is not self._current:
            raise RuntimeError("these activations have been updated or skipped already: each call allows one backward")
        without = [name for name, table in self._tables.items() if table.optimizer is None]
        if without:
            raise RuntimeError(f"table {without[0]!r} has no optimizer: call apply_optimizer_in_backward with its parameter; "
                               "optimizers of torch.optim do not see tables of a cluster")
        assert self._steps is not None
        if step.gradients is not None:  # sent, when it was interrupted
            self._steps.confirm(given=step)
            self._current = None
            return
        widths = [table.embedding_dim for _, _, table in self._outputs]
        columns: Sequence[torch.Tensor] = torch.split(gradient.detach(), widths, dim=1)
        self._steps.update(step, {_feature(output): one.numpy() for (output, _, _), one in zip(self._outputs, columns)})
        self._current = None
