"""Tables of a cluster as modules of torch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
import warnings
from collections import deque
from typing import Any, Callable, Deque, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple, Type, TypeVar, Union

import numpy as np
import torch
import torch.distributed

from .. import _native, _records, config, errors
from .._filling import is_given
from .._jagged import (Columns, as_jagged, as_ragged_ids, by_id, has_lengths, is_jagged, largest_of, learned_weights, pass_to_weights, prepare,
                       rows_looked_up, split_jagged, to_array)
from .._pace import Paces
from .._place import checked, serves
from .._stacking import apart, kind_of
from ..arrays import Dense, Hyper, Ids, Ragged, Sequences, Sparse, are_same, concatenate
from ..client import Client, Lookup, Model
from ..steps import RowsLost, Step, Steps, warn
from ..trainer import Checkpointed
from ._ahead import Ahead
from ._optimizer import EmbeddingOptimizer, by_table

Value = TypeVar("Value")


class KeyedTensor:
    """What comes of a KeyedJaggedTensor, with the methods of torchrec's class: activations by key, side by side. values: all
    of them, where they lie so already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], values: Optional[torch.Tensor] = None) -> None:
        self._tensors = {key: one.flatten(0, -2) for key, one in tensors.items()}  # whatever the output_shape of a feature
        self._values = values

    def __repr__(self) -> str:
        return f"KeyedTensor({', '.join(f'{key}: {list(one.shape)}' for key, one in self._tensors.items())})"

    def keys(self) -> List[str]:
        """In the order of `values`."""
        return list(self._tensors)

    def values(self) -> torch.Tensor:
        """[samples, sum of embedding_dim]"""
        return torch.cat(list(self._tensors.values()), dim=1) if self._values is None else self._values

    def length_per_key(self) -> List[int]:
        """Columns of each key."""
        return [tensor.shape[1] for tensor in self._tensors.values()]

    def to_dict(self) -> Dict[str, torch.Tensor]:
        """[samples, embedding_dim] by key."""
        return dict(self._tensors)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]


# torch.compile leaves a method out, and does not try to trace the client. There is no public name that does not load the compiler.
_uncompiled: Callable[[Any], Any] = getattr(torch, "_disable_dynamo", lambda method: method)


def refuse_tracing() -> None:
    """RuntimeError while torch makes a graph of what it sees, as torch.jit.trace and torch.onnx.export do: the rows of one batch would be its constants."""
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():  # type: ignore[no-untyped-call]
        raise RuntimeError("rows are on the cluster, and a trace would keep those of this batch: trace the dense part alone, and give it the activations")


def _rank_and_size(rank: Optional[int], size: Optional[int]) -> Tuple[int, int]:
    one_of_several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if one_of_several and size != 1 else 0
    if size is None:
        size = torch.distributed.get_world_size() if one_of_several else 1
    return rank, size


def _are_alike(one: config.QuantizationConfig, other: Optional[config.QuantizationConfig]) -> bool:
    """As float32, which a model has."""
    return other is not None and all(np.float32(mine) == np.float32(its)
                                     for mine, its in zip(dataclasses.astuple(one), dataclasses.astuple(other)))


def _list_of(given: Any, kind: Type[Value], what: str) -> List[Value]:
    try:
        found = list(given)
    except TypeError:
        raise _native.refuse_kind(given, what, f"a list of emberd.{kind.__name__}") from None
    for place, one in enumerate(found):
        if not isinstance(one, kind):
            raise _native.refuse_kind(one, f"{what}[{place}]", f"an emberd.{kind.__name__}")
    return found


def _plan_apart(plan: Optional[config.PlanConfig], tables: Sequence[config.TableConfig], optimizer: Union[config.Optimizer, str, None],
                own: Set[str]) -> Optional[config.PlanConfig]:
    """With stacks of their own for the tables `own`, but for those that the plan stacks. By names alone, so that a script with other rates finds its model."""
    if not own:
        return plan
    grouped = {name for group in (plan.groups if plan else None) or () for name in group.tables}
    groups = apart({one.name: one.name if one.name in own else None for one in tables if one.name not in grouped},
                   {one.name: kind_of(one.embedding_dim, config.named(one.optimizer or optimizer or "adagrad", config.Optimizer, "optimizer")) for one in tables})
    return dataclasses.replace(plan or config.PlanConfig(), groups=[*((plan.groups if plan else None) or ()), *groups]) if groups else plan


def _declared(described: config.ModelConfig, client: Optional[Client], model: Union[str, Model]) -> Model:
    if not isinstance(model, Model):
        if checked(client) is None:
            raise TypeError("client: it must be given with the name of a model")
        assert client is not None
        return client.declare(described)
    for one in described.tables:
        there = model.tables.get(one.name)
        if there is None or (there.vocabulary_size, there.embedding_dim) != (one.vocabulary_size, one.embedding_dim):
            raise errors.InvalidArgument(f"tables: {one.name!r} of {one.vocabulary_size} x {one.embedding_dim} is not allowed; model {model.name!r} has "
                                         + (f"{there.vocabulary_size} x {there.embedding_dim}" if there else f"the tables {', '.join(model.tables)}"))
        if (one.combiner or there.combiner).lower() != there.combiner:
            raise errors.InvalidArgument(f"tables: {one.name!r}: combiner: {one.combiner!r} is not allowed; that of model {model.name!r} is {there.combiner!r}")
        if one.quantization is not None and not _are_alike(one.quantization, there.quantization):
            raise errors.InvalidArgument(f"tables: {one.name!r}: quantization: {one.quantization} is not allowed; that of model "
                                         f"{model.name!r} is {there.quantization}")
    if {one.name: one.table for one in described.features} != {name: one.table for name, one in model.features.items()}:
        raise errors.InvalidArgument(f"features: they must be those of model {model.name!r}: {', '.join(model.features)}")
    return model


class _Lock(type(threading.RLock())):  # type: ignore[misc]  # pyright: ignore
    """Of a module. A copy has one of its own. Its `with` is that of the lock, which an interrupt cannot leave held."""

    def __reduce__(self) -> Any:
        return _Lock, ()


class EmbeddingBagCollection(Checkpointed, torch.nn.Module):
    """Tables of a cluster as a module: ids by feature in, activations [samples, embedding_dim] by feature out; of ids that are
    emberd.Sequences [samples, positions], [samples, positions, embedding_dim].

    tables: emberd.TableConfig; with the optimizer of each, or `optimizer` for those that name none. The combiner may be "max", too, as EmbeddingBag's mode: of ids
      [samples, k] or emberd.Ragged, without weights.
    features: emberd.FeatureConfig; default: one for each table, of its name.
    model: the name under which the tables are declared; or an emberd.Model that has these tables and features, as the one that serves
      a checkpoint: its optimizers are as they are there, and `client` is not needed. A table's combiner and quantization are those
      of the model, too; others are refused.
    group: the name of the run: training under the same name continues the run; its first step warns of that, and of tables that another
      group has trained, unless `next_step` was asked for, or a state loaded or restored, before. rank and size default to those of
      torch.distributed, if that is initialized.
    pipelined: activations of step k show the updates before step k - 1, and updates overlap computing. The step takes the gradients of the activations, whose
      `grad` is None then: one that was kept must not be changed before the next step.
    reduction: "sum" of the gradients of all ranks, or "mean".
    accumulate: the calls before `optimizer().step()` make one step together, as one large batch would.
    partial: a call may leave features out: it looks up and trains those that it names, and no row changes for the others.
    first_step: the number of the first step of a group that is new, for Adam with bias_correction and others that count steps: rows and slots of a run elsewhere
      go on as they would there. A group that there is goes on from its own.
    patience: seconds for which a coordinator, a connection or another rank may be gone before an error is raised.
    lr, weight_decay: of every table, or of some by name: the defaults of `optimizer`. A table that is named is stacked with no other, so that its rate and decay may be
      changed in each step; so is one whose optimizer differs from all others. That is part of the plan, and so of a model that is declared; a given emberd.Model keeps its own, and tables that
      `plan` groups stay stacked: those of one stack need equal ones.
    lr_by_table: as if `lr` named all tables, for those that begin with equal rates. Otherwise tables with equal optimizers and widths may be stacked, and share one.

    It has no parameters, so that DDP, FSDP and averaging leave the tables alone: `optimizer()` trains them, and an optimizer of torch the rest of a model.
    Of an average, as of AveragedModel, the state has the step at which it was made: before it is evaluated or saved, give its module that of now, by
    `average.module.ebc.set_extra_state(ebc.get_extra_state())`.
    torch.optim.Adam(module.parameters()) of this module alone is refused by torch, "optimizer got an empty parameter list". In training, with gradients enabled,
    each call is a step, which `optimizer().step()` ends; one that is not ended, as when a GradScaler has found an overflow,
    is skipped by the next call: it is counted, and no row changes. Every rank of a group skips it, or none. A call that would
    drop finite gradients so, and backward through a step that is over, raise RuntimeError. In evaluation or under no_grad rows
    are only looked up, also on other threads than the one that trains: there they, and `state_dict()`, wait while a step is sent,
    received or ended, as for other ranks. For weights that require a gradient each call also reads the rows of their ids.
    """

    def __init__(self, tables: Sequence[config.TableConfig], *, client: Optional[Client] = None, model: Union[str, Model],
                 features: Optional[Sequence[config.FeatureConfig]] = None, group: str = "train",
                 rank: Optional[int] = None, size: Optional[int] = None, pipelined: bool = False,
                 consistency: str = "sync", staleness_bound: int = 0, reduction: str = "sum",
                 accumulate: bool = False, partial: bool = False, optimizer: Union[config.Optimizer, str, None] = None, plan: Optional[config.PlanConfig] = None,
                 seed: Optional[int] = None, step_timeout: float = 60.0, patience: float = 60.0, lr_by_table: bool = False, first_step: int = 0,
                 lr: Union[float, Mapping[str, float], None] = None, weight_decay: Union[float, Mapping[str, float], None] = None) -> None:
        super().__init__()
        tables = _list_of(tables, config.TableConfig, "tables")
        names = [table.name for table in tables]
        self._rates, self._decays = by_table(lr, names, "lr"), by_table(weight_decay, names, "weight_decay")
        features = None if features is None else _list_of(features, config.FeatureConfig, "features")
        if lr_by_table:
            if plan is not None and (plan.groups or plan.auto_stack):
                raise ValueError("lr_by_table: not allowed together with a plan that stacks tables, for those of a stack share one rate")
            plan = dataclasses.replace(plan or config.PlanConfig(), auto_stack=False)
        elif not isinstance(model, Model):
            plan = _plan_apart(plan, tables, optimizer, {name for one in (lr, weight_decay) if isinstance(one, Mapping) for name in one})
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction: {reduction!r} is not allowed; it must be 'sum' or 'mean'")
        if accumulate and pipelined:
            raise ValueError("accumulate: not allowed together with pipelined; each call must see all updates before it")
        given = [config.FeatureConfig(table.name, table.name) for table in tables] if features is None else features
        largest = {one.name for one in tables if str(one.combiner).lower() == "max"}  # no table of a cluster combines so
        tables = [dataclasses.replace(one, combiner=None if isinstance(model, Model) else "sum") if one.name in largest else one for one in tables]
        self._largest = frozenset(one.name for one in given if one.table in largest)  # features
        for one in given:
            if one.name in self._largest and one.output_shape:
                raise errors.InvalidArgument(f"feature {one.name!r}: output_shape is not allowed with combiner 'max' of its table; leave it out, and reshape the activations")
        self.config = config.ModelConfig(model.name if isinstance(model, Model) else model, tables, given, optimizer, plan, seed)
        self.model: Model = _declared(self.config, client, model)
        # Rows that were given are on the cluster now. Those here would keep their memory, and go along with each copy of the module.
        self.config = dataclasses.replace(self.config, tables=[
            dataclasses.replace(one, initializer=config.Assigned()) if is_given(one.initializer) and not callable(one.initializer) else one
            for one in self.config.tables])
        self._given = isinstance(model, Model)  # what the config does not say is as it is there
        self.reduction, self.accumulate, self.partial = reduction, accumulate, partial
        self.frozen: FrozenSet[str] = frozenset()  # tables
        self._all_frozen = False  # those of the last call, which has made no step
        rank, size = _rank_and_size(rank, size)
        self._steps = Steps(self.model, group, rank, size, pipelined=pipelined, consistency=consistency,
                            staleness_bound=staleness_bound, first_step=first_step, step_timeout=step_timeout, patience=patience, partial=partial)
        self._lock = _Lock()  # of the steps, which also a lookup on another thread waits for
        self._ahead: Deque[Ahead] = deque()
        self._of_turn: Optional[Ahead] = None  # that of the batch which a loop over a Prefetcher has given last
        self._current: Optional[Step] = None
        self._leaves: Dict[str, torch.Tensor] = {}
        self._parts: List[Tuple[Dict[str, Ids], Dict[str, torch.Tensor]]] = []  # of a step that accumulates: ids, activations
        self._has_warned = False  # of a step without gradients
        self._spared = 0  # how many of them, the first, zero_grad() has left for a backward that is still to come
        self._optimizers: List[EmbeddingOptimizer] = []
        self._paces = Paces(pipelined)

    @_uncompiled
    def forward(self, ids: Any) -> Any:
        """`ids`: by feature a tensor [samples] or [samples, k], or as FeatureConfig.output_shape says; emberd.Ragged, Sparse, Dense or
        Sequences, or a JaggedTensor of torchrec; gives a dict of tensors. Or a KeyedJaggedTensor of torchrec, which gives a KeyedTensor [samples, embedding_dim], in the order of the features."""
        return self._call(ids)[0]

    def _call(self, ids: Any) -> Tuple[Any, Dict[str, Ids]]:
        """Activations, and the ids that they are of, as arrays."""
        refuse_tracing()
        jagged = self._side_by_side(ids)
        found: Any = None
        if not (self.training and torch.is_grad_enabled()):
            weights = self._learned_weights(ids) if torch.is_grad_enabled() else {}
            own = self._read(ids)
            self._check_unchanged(ids, own)
            found = self._evaluate(own, jagged)
        else:
            with self._lock:
                ahead = self._ahead_of(ids) or Ahead(ids, self._read)
                own = ahead.own
                try:
                    ahead.check()
                    weights = self._learned_weights(ids)
                    moving = self._moving(own)
                except Exception:  # their turn is over, as where the server refuses them
                    self._take(ahead)
                    self._steps.forget()  # if they were sent, those behind them are sent again, as the next step
                    raise
                self._all_frozen = moving is not own and not moving
                if not self._all_frozen:
                    side_by_side = jagged and moving is own
                    found = self._train_part(moving, side_by_side) if self.accumulate else self._train(ahead, moving, side_by_side)
                else:  # it needs no step
                    if self._is_given_up():
                        self._skip_current()
                    self._take(ahead)
            if moving is not own:
                found = self._beside_frozen(own, found, jagged) if moving else self._evaluate(own, jagged)
        found = self._pass_to_weights(found, weights, own, jagged) if weights else found
        return (self._combined(found, own, is_jagged(ids)) if self._largest else found), own

    def extra_repr(self) -> str:
        """As torch prints the module."""
        return f"{self.model.name!r}, group={self._steps.group!r}, tables={list(self.model.tables)}, features={list(self.model.features)}"

    def __getstate__(self) -> Dict[str, Any]:
        """Of a copy, pickled or not: it has the same tables, no step under way and no optimizer."""
        return {**self.__dict__, "_steps": copy.copy(self._steps), "_ahead": deque(), "_of_turn": None, "_current": None, "_leaves": {}, "_parts": [], "_spared": 0,
                "_all_frozen": False, "_optimizers": []}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Also of a module that was pickled before it had these."""
        super().__setstate__({"_lock": _Lock(), "_of_turn": None, "_has_warned": False, "_all_frozen": False, "_rates": {}, "_decays": {}, "_largest": frozenset(), **state})

    def requires_grad_(self, requires_grad: bool = True, tables: Optional[Sequence[str]] = None) -> "EmbeddingBagCollection":
        """Freezes tables, or thaws them, from the next call on. Of a frozen one neither rows nor slots change, bit for bit, whatever its
        rate, decay and momentum; its activations require no gradient. As the module has no parameters, a module around it does not reach
        the tables by its own requires_grad_; by its eval() it does, for then rows are only looked up.

        tables: names; default: all. NotFound for one that there is not.
        """
        known = [one.name for one in self.config.tables]
        if isinstance(tables, str):
            raise _native.refuse_kind(tables, "tables", "a list of names")
        for name in () if tables is None else tables:
            if name not in known:
                raise errors.NotFound(f"tables: there is no table {name!r}; there are {', '.join(known)}")
        named = set(known if tables is None else tables)
        self.frozen = frozenset(self.frozen - named if requires_grad else self.frozen | named)
        with self._lock:
            self._steps.forget()  # what was sent ahead has other features
        self._steps.partial = self.partial or bool(self.frozen)
        return self

    def _moving(self, given: Dict[str, Ids]) -> Dict[str, Ids]:
        """What is looked up to be trained; the very ids, where nothing is frozen."""
        if not self.frozen:
            return given
        features = self.model.features
        if given.keys() != features.keys():
            _records.check_features(given, features, self.partial)
        return {name: value for name, value in given.items() if name not in features or features[name].table not in self.frozen}

    def _beside_frozen(self, given: Dict[str, Ids], found: Mapping[str, torch.Tensor], jagged: bool) -> Any:
        frozen = {name: value for name, value in given.items() if name not in found}
        still: Mapping[str, Any] = {}
        if frozen:
            still = self.model.lookup(self._prepare(frozen), partial=True)
        result = {name: found[name] if name in found else torch.from_numpy(still[name]) for name in given}
        return KeyedTensor(result) if jagged else result

    def prefetch(self, ids: Any) -> None:
        """Sends the ids of a later call of forward, which must get the same object, or the same ids, in the same order. Errors
        in them are raised there."""
        self._prefetch(ids)

    def _prefetch(self, ids: Any, loop: Optional[object] = None) -> Ahead:
        if self.accumulate:
            raise RuntimeError("accumulate: the ids of a step are known only when it ends, so they cannot be prefetched")
        with self._lock:
            self._ahead.append(ahead := Ahead(ids, self._read, loop))
            self._send_ahead()
        return ahead

    def _note_given(self, ahead: Optional[Ahead], loop: object) -> None:
        """None: this loop has given a batch that was not sent, or has ended."""
        if ahead is not None or (self._of_turn is not None and self._of_turn.loop is loop):
            self._of_turn = ahead

    def _forget_ahead(self, loop: object) -> None:
        """What this loop has prefetched and not used; those of others, which are wanted, are sent again if they were behind it."""
        with self._lock:
            self._note_given(None, loop)
            others = deque(ahead for ahead in self._ahead if ahead.loop is not loop)
            if len(others) < len(self._ahead) or not others:
                self._ahead = others
                self._steps.forget()

    def optimizer(self, lr: Union[float, Mapping[str, float], None] = None,
                  weight_decay: Union[float, Mapping[str, float], None] = None) -> "EmbeddingOptimizer":
        """A torch.optim.Optimizer whose step is the update. lr: of every table, or of some by name; default: that of the module, or what the config
        says, or what the table was declared with, where an emberd.Model was given and the config names no optimizer; `group["lr"]` is None then.

        weight_decay: of every table, or of some by name: rows of the batch are multiplied by 1 - lr * weight_decay before their update, as
        torch.optim.AdamW does, and SGD. It is `group["weight_decay"]` of the table's group; default: that of the module, or the config's weight_decay_factor.
        """
        made = EmbeddingOptimizer(self, lr, weight_decay)
        self._optimizers.append(made)
        made._show(self._leaves, *(leaves for _, leaves in self._parts))  # of a step that is under way
        return made

    @property
    def next_step(self) -> int:
        """The step whose update comes next. Joins the group, which waits for its other ranks."""
        with self._lock:
            return self._steps.next_step

    def _behind(self) -> Steps:
        return self._steps

    def finish(self) -> None:
        """Leaves the group, once all updates have been made and checkpoints saved. The next step joins again."""
        if self._has_unused():
            warnings.warn("emberd: finish() drops gradients that no optimizer().step() has used", stacklevel=2)
        with self._lock:
            self._forget()
            self._ahead.clear()
            self._steps.finish()

    def get_extra_state(self) -> Dict[str, Any]:
        """For state_dict: names and the next step, 0 of a model that serves; no tables. It does not join the group: until that is joined, the step is that of the
        copy, as of copy.deepcopy, or of the state that was loaded; or None, for it is not known."""
        refuse_tracing()  # an export asks for states before it calls, and takes tensors alone
        with self._lock:
            return {"model": self.model.name, "group": self._steps.group, "next_step": 0 if self._steps.only_looked_up else self._steps.noted}

    def set_extra_state(self, state: Dict[str, Any]) -> None:  # pyright: ignore
        """From load_state_dict. Raises where the tables are at another step than what is loaded: here, or when the group
        is joined. Where rows are looked up before that, a warning says that they are known to be those of another step. A model that serves a checkpoint of the
        state's has no steps, and takes the state of any. One of `Client.change_model` takes the states of its source, too."""
        given: Any = state
        missing = [name for name in ("model", "group", "next_step") if not isinstance(given, Mapping) or name not in given]
        if missing:
            raise errors.InvalidArgument(f"state: {missing[0]!r} is missing; it must be what get_extra_state of a module of emberd gave")
        if serves(self.model, state["model"]):
            return
        group = self._steps.group
        if state["model"] != self.model.name and (self.model._source is None or state["model"] != self.model._source):
            raise ValueError(f"the state is of model {state['model']!r}, but this is model {self.model.name!r}; make the module with that of the state, or, for other "
                             f"tables, with model=client.change_model({state['model']!r}, config, groups=[{group!r}]).model")
        if state["group"] != group:
            raise ValueError(f"the state is of group {state['group']!r}, but this is group {group!r}; make the module with that of the state")
        step = None if state["next_step"] is None else _native.whole(state["next_step"], "state: next_step")
        with self._lock:
            self._go_on_from(step)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: List[str], unexpected_keys: List[str],
                              error_msgs: List[str]) -> None:
        """Rows of modules that torch or torchrec had in its place are refused, for with strict=False they would be lost in silence."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for table in self.model.tables:
            for key in (f"{prefix}{of}{table}.weight" for of in ("", "embedding_bags.", "embeddings.")):
                if key in state_dict:
                    error_msgs.append(f"{key}: rows are on the cluster, and not in the state of a module; load them by model.load_table({table!r}, rows) of the module, "
                                      "and leave the key out of the state")
        with self._lock:
            if prefix + "_extra_state" not in state_dict and self._steps.joined and self._steps.reached:  # torch refuses it by itself with strict=True alone
                warn(f"emberd: the state has no {prefix}_extra_state, so that its step is not known; the tables of model {self.model.name!r} are at "
                     f"step {self._steps.reached}")

    def _go_on_from(self, step: Optional[int]) -> None:
        if not self._steps.joined:
            self._steps.expect(step)
        elif step is None:
            if self._steps.next_step:
                warn(f"emberd: the state was saved before its module had joined its group, so that its step is not known; the tables of model {self.model.name!r} are at "
                     f"step {self._steps.next_step}")
        elif (own := self._steps.next_step) != step:  # where are they now?
            self._forget()
            try:
                self._steps.restart(step)
            except RowsLost as error:
                self._steps.expect(own)  # it goes on from there, as if nothing had been loaded
                raise RuntimeError(str(error)) from error

    def _read(self, ids: Any) -> Dict[str, Ids]:
        """What forward is given, as arrays. What becomes columns is in the order of the model, whatever that of a batch is: the dense part knows them by their places."""
        if not self._side_by_side(ids):
            return prepare(_by_feature(ids))
        found = prepare(ids)
        known = {name: found[name] for name in self.model.features if name in found}
        return {**known, **found}  # with those that are refused later

    def _prepare(self, own: Dict[str, Ids]) -> Dict[str, Ids]:
        """As they are sent."""
        if not self._largest:
            return own
        return {name: by_id(value, name, "with combiner 'max', which combines rows as they are; give a tensor of ids, or an emberd.Ragged without weights")
                if name in self._largest else value for name, value in own.items()}

    def _combined(self, found: Mapping[str, torch.Tensor], own: Mapping[str, Ids], jagged: bool) -> Any:
        """The largest of the rows of a sample, of features of which rows have come for each id."""
        result = {name: largest_of(found[name], own[name]) if name in self._largest else found[name] for name in (self.model.features if jagged else found) if name in found}
        return KeyedTensor(result) if jagged else result

    def _side_by_side(self, ids: Any) -> bool:
        """Whether the activations are columns of one tensor."""
        return is_jagged(ids) and not self._largest

    def _send_ahead(self) -> None:
        for ahead in self._ahead:
            if ahead.failure is None and (ahead.step is None or ahead.step.forgotten):
                try:
                    moving = self._moving(ahead.own)
                    if moving is not ahead.own and not moving:
                        continue
                    ahead.step = self._steps.send(self._prepare(moving), self._side_by_side(ahead.ids) and moving is ahead.own)
                except Exception:  # which the call with these ids meets again
                    return

    def _confirm(self) -> None:
        """Before rows are read without a step: on any thread, also beside one that trains."""
        with self._lock:
            self._steps.warn_of_other_rows()
            self._steps.confirm()

    def _evaluate(self, own: Dict[str, Ids], jagged: bool) -> Any:
        self._confirm()
        lookup = self.model.lookup(self._prepare(own), partial=self.partial)
        found = {name: torch.from_numpy(values) for name, values in lookup.items()}
        return KeyedTensor(found) if jagged else found

    def _check_unchanged(self, ids: Any, read: Dict[str, Ids]) -> None:
        """Of a batch of a loop that trains, before it is read once more: by whom it has been changed, and so which ids are meant, is not known."""
        given = self._of_turn
        if given is not None and given.is_of(ids) and not are_same(given.own, read):
            raise RuntimeError("these ids have changed since the Prefetcher sent them, as where the loader fills one buffer anew; have it give a new one for each batch, "
                               "or look up a copy of those that are meant")

    def _train(self, ahead: Ahead, moving: Dict[str, Ids], side_by_side: bool) -> Any:
        self._skip_current()
        self._take(ahead)
        step = ahead.step
        try:
            if step is None or step.forgotten or not self._steps.is_next(step):
                self._steps.forget()
                step = self._steps.send(self._prepare(moving), side_by_side)
            found = self._steps.receive(step)
            self._current = step  # before others are sent, where Ctrl-C may come
        except errors.FailedPrecondition as error:
            if not self._steps.only_looked_up:
                raise
            raise errors.FailedPrecondition(f"{error}. To look rows up, call eval(), or use torch.no_grad()") from None
        finally:
            self._send_ahead()
        result = self._make_leaves(found, side_by_side)
        for optimizer in self._optimizers:
            optimizer._show(self._leaves)
        return result

    def _ahead_of(self, ids: Any) -> Optional[Ahead]:
        """What was prefetched of these ids. Where a loader fills one buffer anew, several batches look like them: it is that which its loop has given last."""
        found = [one for one in self._ahead if one.is_of(ids)]
        if self._ahead and len(found) != 1:
            read = self._read(ids)
            found = found or [one for one in self._ahead if one.failure is None and one.ids is not ids and is_jagged(one.ids) == is_jagged(ids)
                              and are_same(self._read(one.ids), read)]
            given = self._of_turn
            if given is not None and given in found and not all(are_same(one.own, read) for one in found):
                found = [given]
        if self._ahead and (not found or any(one.loop is None for one in itertools.takewhile(lambda one: one is not found[0], self._ahead))):
            raise RuntimeError("these are not the ids that were prefetched next; give forward the same object or ids, or call finish()")
        return found[0] if found else None

    def _take(self, ahead: Ahead) -> None:
        """Its turn has come. Batches before it are left out, as a loop over a Prefetcher has by `continue`."""
        if ahead in self._ahead:
            left_out = self._ahead.index(ahead)
            for _ in range(left_out + 1):
                self._ahead.popleft()
            if left_out:
                self._steps.forget()  # those behind are sent again, as the next steps

    def _learned_weights(self, ids: Any) -> Dict[str, torch.Tensor]:
        weights = learned_weights(ids)
        if weights and not self._steps.at_rest:
            raise ValueError(f"weights of {', '.join(map(repr, weights))}: their gradient needs the rows of this step, which are not "
                             "known with pipelined, nor with another consistency than 'sync'; give weights.detach(), or make the "
                             "module without these")
        return weights

    def _pass_to_weights(self, found: Any, weights: Mapping[str, torch.Tensor], own: Dict[str, Ids], jagged: bool) -> Any:
        result: Dict[str, torch.Tensor] = found.to_dict() if jagged else dict(found)
        for name, of_feature in weights.items():
            table = self.model.tables[self.model.features[name].table]
            result[name] = pass_to_weights(result[name], of_feature, own[name], self.model.features[name].output_shape,
                                           table.combiner, functools.partial(rows_looked_up, self.model, table.name))
        return KeyedTensor(result) if jagged else result

    def _optimizer_of(self, table: config.TableConfig) -> Optional[config.Optimizer]:
        """None: that of the given model, of which only the kind is known."""
        given = table.optimizer or self.config.optimizer
        if given is None and self._given:
            return None
        found: config.Optimizer = config.named(given or "adagrad", config.Optimizer, "optimizer")
        return found

    def _skip_current(self) -> None:
        step = self._current
        if step is None:
            return
        if step.gradients is not None:
            self._steps.confirm(given=step)  # what has been sent, when it was interrupted
        elif not step.forgotten:
            if self._has_unused():
                raise RuntimeError(f"step {step.number} has gradients that no optimizer().step() has used: "
                                   + ("call it after each " if self._optimizers else "this module has no optimizer. Rows are no parameters, so that one of torch does "
                                      "not reach them: make one by `sparse = module.optimizer()`, and call sparse.step() after each ")
                                   + "backward, or zero_grad() of the optimizer to drop them, which that of a module does not reach; accumulate=True makes one step of several calls")
            self._steps.skip(step)
        self._forget()

    def _is_given_up(self) -> bool:
        """Of the step under way, before a call of frozen tables alone, which may stand between its call and its step(): it overflowed or was refused, or has
        tables that have been frozen since."""
        has_gradient = any(leaf.grad is not None for leaf in self._leaves.values())
        return (has_gradient and not self._has_unused()) or any(self.model.features[name].table in self.frozen for name in self._leaves)

    def _has_unused(self) -> bool:
        """Gradients that would be lost, unless they overflowed, were refused or have been sent."""
        if self._current is not None and (self._current.forgotten or self._current.refused or self._current.gradients is not None):
            return False
        parts = [leaves for _, leaves in self._parts] or [self._leaves]
        grads = [leaf.grad for leaves in parts for leaf in leaves.values() if leaf.grad is not None]
        return bool(grads) and all(bool(torch.isfinite(one).all()) for one in grads)

    def _leaf(self, values: Any, is_open: Callable[[], bool]) -> torch.Tensor:
        """Activations whose gradient may come while their step is open."""
        def check(_: torch.Tensor) -> None:
            if not is_open():
                raise RuntimeError("backward through activations of a step that has been ended or skipped, so their gradient would be lost: "
                                   + ("each call has one step() after its backward, or zero_grad() that drops it" if self.accumulate else
                                      "call the module once in a step, with all ids, or make it with accumulate=True"))

        leaf = torch.from_numpy(values).requires_grad_()
        leaf.register_hook(check)
        return leaf

    def _make_leaves(self, found: Lookup, jagged: bool) -> Any:
        """One for each feature; or one for all, which is not put together and whose gradient is not taken apart."""
        step = self._current

        def is_open() -> bool:
            return self._current is step

        if not jagged:
            self._leaves = {name: self._leaf(values, is_open) for name, values in found.items()}
            return dict(self._leaves)
        whole = self._leaf(found.concat, is_open)
        widths = [values.shape[-1] for values in found.values()]
        begin = 0
        self._leaves = {}
        for name, width in zip(found, widths):
            self._leaves[name] = Columns.of(whole, begin, begin + width)
            begin += width
        return KeyedTensor(dict(zip(found, torch.split(whole, widths, dim=1))), whole)

    def _train_part(self, moving: Dict[str, Ids], side_by_side: bool) -> Any:
        """No update comes between the calls of a step, so that each may look up by itself."""
        self._skip_current()
        prepared = self._prepare(moving)
        self._steps.confirm(all_of_them=True)
        leaves: Dict[str, torch.Tensor] = {}

        def is_open() -> bool:
            return any(part is prepared for part, _ in self._parts)  # by what refers to no leaf: a cycle would keep its memory

        leaves.update((name, self._leaf(values, is_open)) for name, values in self.model.lookup(prepared, partial=self._steps.partial).items())
        self._parts.append((prepared, leaves))
        for optimizer in self._optimizers:
            optimizer._show(*(part for _, part in self._parts))
        return KeyedTensor(leaves) if side_by_side else dict(leaves)

    def _join_parts(self) -> None:
        """Makes one step of the calls: its lookup tells the cluster all ids."""
        names = dict.fromkeys(name for ids, _ in self._parts for name in ids)
        parts = {name: [(ids[name], leaves[name]) for ids, leaves in self._parts if name in ids] for name in names}
        joined: Dict[str, torch.Tensor] = {}  # whole before there is a step, which Ctrl-C would leave with some of them
        for name, of_name in parts.items():
            joined[name] = torch.cat([self._rows(name, leaf.detach()) for _, leaf in of_name])
            if any(leaf.grad is not None for _, leaf in of_name):
                joined[name].grad = torch.cat([self._rows(name, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for _, leaf in of_name])
        self._steps.forget()  # what an interrupted attempt has sent
        step = self._steps.send({name: concatenate([ids for ids, _ in of_name], f'feature "{name}"', self.model.features[name].output_shape)
                                 for name, of_name in parts.items()}, partial=True)  # each call has checked its features, and tables may have been thawed since
        self._steps.receive(step)
        self._leaves, self._current = joined, step

    def _rows(self, name: str, found: torch.Tensor) -> torch.Tensor:
        """Of activations or gradients that may be those of Sequences or of a KeyedTensor."""
        return found.reshape(-1, *self.model._row_shapes[name])

    def _shared_by_stacks(self, values: Mapping[str, Dict[str, float]]) -> Hyper:
        """New values of hyper-parameters by table, as the server takes them: those of a stack are equal."""
        alike = list(values.values())
        if all(one == alike[0] for one in alike):  # said once
            return dict(alike[0])
        of_stack: Dict[str, str] = {}
        for table in sorted(values, key=self.frozen.__contains__):  # a frozen one counts where all of its stack are
            first = of_stack.setdefault(self.model.tables[table].stack, table)
            if table not in self.frozen:
                different = [name for name in {**values[first], **values[table]} if values[first].get(name) != values[table].get(name)]
                if different:
                    name = {"learning_rate": "lr"}.get(different[0], different[0])
                    own = {"lr": "lr", "weight_decay_factor": "weight_decay"}.get(name)
                    raise errors.InvalidArgument(
                        f"{name}: {values[table].get(different[0])} of table {table!r} is not allowed beside {values[first].get(different[0])} of table "
                        f"{first!r}; they are stacked, and share one. " + (f"Make the module with {own}={{{table!r}: ...}}" if own else "Make the module")
                        + f"{', or' if own else ' with'} lr_by_table=True for all tables, and a model of a new name, or of this one after "
                        f"client.drop_model({self.model.name!r}); requires_grad_(False, tables=[{table!r}]) freezes one")
        return {table: values[of_stack[self.model.tables[table].stack]] for table in values}

    def _update(self, values: Mapping[str, Dict[str, float]], checkpoint: Optional[str]) -> None:
        hyper = self._shared_by_stacks(values)
        if self._current is not None and self._current.gradients is not None:  # its update has been sent, when it was interrupted
            self._steps.confirm(given=self._current)
            self._forget()
            return
        if self._current is None:
            # The backward of some never came: they are no part of the step. Where none came, those that zero_grad() has not spared are.
            self._parts, self._spared = list(filter(_has_gradient, self._parts)) or self._parts[self._spared:], 0
            if self._parts:
                self._join_parts()
        if self._current is None:
            raise RuntimeError("there is no step to end: " + ("all tables of the last call are frozen: leave its step() out, or thaw them by requires_grad_()" if self._all_frozen
                                                              else "call the module with ids in training, then backward, then step"))
        if not self._has_warned and all(leaf.grad is None for leaf in self._leaves.values()):
            self._has_warned = True
            warn("emberd: no activation has a gradient, for no backward() has reached one. The step counts, and rows move by momentum and decay alone; leave its step() "
                 "out, and the next call skips it")
        gradients: Dict[str, Any] = {}
        for name, leaf in self._leaves.items():
            if leaf.grad is not None:
                gradient = leaf.grad
                if self.reduction == "mean" and self._steps.size > 1:
                    gradient = gradient * (1.0 / self._steps.size)
                gradients[name] = to_array(self._rows(name, gradient) if isinstance(leaf, Columns) else gradient, name)
        self._steps.update(self._current, gradients, hyper, checkpoint)
        if self._steps.pipelined:  # they are read until the update has been made: who changes the gradient of an activation, finds none
            for leaf in self._leaves.values():
                leaf.grad = None
        self._forget()

    def _forget_parts(self) -> None:
        """Those that have gradients, or whose step has been sent."""
        step = self._current
        coming = [part for part in self._parts if step is None and not _has_gradient(part)]
        self._forget()
        self._current = step  # is skipped by the next call, as any that was not ended
        self._parts, self._spared = coming, len(coming)
        for optimizer in self._optimizers:
            optimizer._show(*(leaves for _, leaves in coming))

    def _forget(self) -> None:
        self._current = None
        self._leaves = {}
        self._parts, self._spared = [], 0
        for optimizer in self._optimizers:
            optimizer._show()


def _has_gradient(part: Tuple[Dict[str, Ids], Dict[str, torch.Tensor]]) -> bool:
    return any(leaf.grad is not None for leaf in part[1].values())


class EmbeddingCollection(EmbeddingBagCollection):
    """Tables of a cluster whose rows are not combined: sequences of ids in, an activation for each id out. What is not said here is
    as in EmbeddingBagCollection, which takes the other arguments.

    In, by feature, and out:
      a tensor of ids [samples, positions]     float32 [samples, positions, embedding_dim]; of any other shape, with embedding_dim behind it
      emberd.Ragged, or a JaggedTensor         a JaggedTensor whose values() are [ids, embedding_dim]
    And a KeyedJaggedTensor of torchrec gives a dict of JaggedTensor of torchrec.

    padding_idx: the id that fills short sequences up, in tensors: its activation is zero, and no row is read or updated for it. Any
      int64, as it stands among the ids: -1 is the id -1, which no table has, and not the last row. A dict has one for each feature that
      it names.
    mask_zero: padding_idx=0 of all features.
    """

    def __init__(self, tables: Sequence[config.TableConfig], *, client: Optional[Client] = None, model: Union[str, Model],
                 features: Optional[Sequence[config.FeatureConfig]] = None, padding_idx: Union[int, Mapping[str, int], None] = None,
                 mask_zero: bool = False, **options: Any) -> None:
        tables = _list_of(tables, config.TableConfig, "tables")
        features = None if features is None else _list_of(features, config.FeatureConfig, "features")
        names = [one.name for one in tables] if features is None else [one.name for one in features]
        given: Mapping[str, Optional[int]] = padding_idx if isinstance(padding_idx, Mapping) else dict.fromkeys(names, padding_idx)
        for name, one in given.items():
            if name not in names:
                raise errors.InvalidArgument(f"padding_idx: {name!r} is not allowed; it must be one of the features, {', '.join(names)}")
            if one is not None:
                _native.whole(one, f"padding_idx of feature {name!r}", low=-2**63)
            Sequences(0, one, mask_zero)._padding(f"feature {name!r}")
        super().__init__(tables, client=client, model=model, features=features, **options)
        self._largest = frozenset()
        self.padding_idx = {name: 0 if mask_zero else given.get(name) for name in names}

    @_uncompiled
    def forward(self, ids: Any) -> Dict[str, Any]:
        """A dict of tensors and JaggedTensors: see the class."""
        found, own = self._call(ids)
        can_be_asked = hasattr(type(ids), "__getitem__")  # for the kind of a JaggedTensor; not each KeyedJaggedTensor can
        return {name: as_jagged(values, one, ids[name] if can_be_asked else None) if isinstance(one := own[name], Ragged) else values
                for name, values in found.items()}

    def mask(self, ids: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
        """Where an id stands that is not padding: bool, of the shapes of the ids, by feature. `~mask` is what
        torch.nn.MultiheadAttention takes as key_padding_mask. TypeError for ids that have no padding, as emberd.Ragged."""
        def of(name: str, given: Any) -> torch.Tensor:
            if isinstance(given, (Ragged, Dense, Sparse)) or has_lengths(given):
                raise _native.refuse_kind(given, f'ids: feature "{name}"', "a tensor of ids, which may hold padding: the activations of others have lengths, and no mask")
            found: Any = prepare({name: given if isinstance(given, Sequences) else Sequences(given, self._padding_of(name))})[name]
            device = getattr(given.ids if isinstance(given, Sequences) else given, "device", "cpu")
            return torch.as_tensor(found.mask).to(device)

        _records.check_features(_checked(ids), self.model.features, partial=True)
        return {name: of(name, value) for name, value in ids.items()}

    def _padding_of(self, name: str) -> Optional[int]:
        return self.padding_idx.get(name)

    def _prepare(self, own: Dict[str, Ids]) -> Dict[str, Ids]:
        return {name: by_id(value, name, "for ids that are not combined; give a tensor of ids, and multiply its activations", self._padding_of(name))
                for name, value in own.items()}

    def _side_by_side(self, ids: Any) -> bool:
        return False

    def _learned_weights(self, ids: Any) -> Dict[str, torch.Tensor]:
        return {}


def _by_feature(ids: Any) -> Mapping[str, Any]:
    return split_jagged(ids) if is_jagged(ids) else _checked(ids)


def _checked(ids: Any) -> Mapping[str, Any]:
    _records.check_mapping(ids, "ids")
    checked: Mapping[str, Any] = ids
    return checked
