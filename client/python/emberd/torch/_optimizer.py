"""The update of tables as an optimizer of torch."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

import torch
import torch.distributed

from .. import _native, config, errors

if TYPE_CHECKING:
    from ._collection import EmbeddingBagCollection

# Hyper-parameters of torch's optimizers, which this one does not take by these names.
_OF_TORCH = frozenset(("momentum", "betas", "eps", "dampening", "nesterov", "maximize", "amsgrad", "lr_decay",
                       "initial_accumulator_value", "alpha", "centered", "rho", "lambd", "t0", "etas", "step_sizes"))
# What groups have besides hyper-parameters: of this optimizer, and of torch's schedulers.
_NOTED = frozenset(("params", "table", "lr", "weight_decay", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum"))


class _Kind:
    """What a group of a table with this optimizer may have."""

    def __init__(self, optimizer: config.Optimizer, known: bool = True) -> None:
        """known: with its values; otherwise the kind alone."""
        self.name = type(optimizer).__name__
        self.fields = {one.name: None for one in dataclasses.fields(optimizer)
                       if one.name != "learning_rate" and "float" in str(one.type) and "Mapping" not in str(one.type)}
        self.fields.update(dict.fromkeys(getattr(optimizer, "hyper_parameters", None) or ()))  # of a rule of the user's own
        self.refused = _OF_TORCH.difference(self.fields)
        self.multiplies_decay = bool(getattr(optimizer, "multiply_weight_decay_factor_by_learning_rate", None)) if known else None
        # A rule of a given model: only the server knows what it names.
        self.is_open = isinstance(optimizer, config.Custom) and not (optimizer.expression or optimizer.stablehlo)

    def takes(self, name: str, value: Any) -> bool:
        return name in self.fields or (self.is_open and name not in _NOTED and hasattr(value, "__float__") and not isinstance(value, bool))


class EmbeddingOptimizer(torch.optim.Optimizer):
    """The update of an EmbeddingBagCollection. It has a group for each table, of whose values `lr` and `weight_decay` go to the cluster with
    each step, and what else has the name of a field of the table's optimizer: `group["clip_weight_max"] = 1.0`; of a rule that only the given emberd.Model
    knows, every number. The formula and all other values are those of the table; a group that has torch's `momentum`, `eps` and so on is refused by `step`. Learning-rate
    schedulers and GradScaler work. Clipping by norm takes the norm of the gradients of activations: that of the rows' is another one where an id occurs in
    several samples, or a sample has several ids.

    `lr` None: the rate that the table was declared with. It is so where the module was given an emberd.Model, but neither the table's
    optimizer nor `lr`; a scheduler then needs `lr`.
    """

    def __init__(self, collection: "EmbeddingBagCollection", lr: Union[float, Mapping[str, float], None], weight_decay: Union[float, Mapping[str, float], None] = None) -> None:
        self.collection = collection
        names = [table.name for table in collection.config.tables]
        rates = {**collection._rates, **by_table(lr, names, "lr")}
        decays = {**collection._decays, **by_table(weight_decay, names, "weight_decay")}
        groups: List[Dict[str, Any]] = []
        said = {table.name: collection._optimizer_of(table) for table in collection.config.tables}
        for table in collection.config.tables:
            optimizer = said[table.name]
            rate = rates[table.name] if table.name in rates else None if optimizer is None else 0.01 if optimizer.learning_rate is None else optimizer.learning_rate
            # Until there are activations: an optimizer must have a parameter in each group.
            groups.append({"params": [torch.zeros(0, device="cpu", requires_grad=True)], "lr": rate, "table": table.name,
                           **({"weight_decay": decays[table.name]} if table.name in decays else {})})
        super().__init__(groups, {"lr": 0.01 if lr is None or isinstance(lr, Mapping) else lr})
        self._placeholders = {group["table"]: group["params"][0] for group in self.param_groups}
        self._kinds = {name: _Kind(config.optimizer_of_kind(collection.model.tables[name].optimizer), known=False) if one is None else _Kind(one)
                       for name, one in said.items()}
        self._features: Dict[str, List[str]] = {table.name: [] for table in collection.config.tables}
        for feature in collection.config.features:
            self._features[feature.table].append(feature.name)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """TypeError: there is a group for each table, and rows of tables are no parameters."""
        if hasattr(self, "_placeholders"):
            raise TypeError("add_param_group: this optimizer has one group for each table of its module, and no other parameters; give those of "
                            "the dense part to an optimizer of torch. Tables are added where the module is made")
        super().add_param_group(param_group)

    def _values_of(self, group: Mapping[str, Any]) -> Dict[str, float]:
        """New values of hyper-parameters of this step."""
        table = group["table"]
        kind = self._kinds[table]
        if not kind.refused.isdisjoint(group):
            for name in group:
                if name in kind.refused and not kind.takes(name, group[name]):
                    raise errors.InvalidArgument(f"group of table {table!r}: {name!r} is not allowed, for nothing would come of it; its optimizer is "
                                                 f"{kind.name}, of which a step may have lr, weight_decay, {', '.join(kind.fields)}{', and what its rule names' if kind.is_open else ''}")
        rate, values = group["lr"], {}
        if rate is not None:
            values["learning_rate"] = rate if type(rate) is float and math.isfinite(rate) else _native.real(rate, f"group of table {table!r}: lr")
        elif "initial_lr" in group:
            raise errors.InvalidArgument(f"group of table {table!r}: lr: None, the rate of the declared table, is not allowed with a scheduler, which changes "
                                         "a rate that it knows; give it by optimizer(lr=...), or by TableConfig.optimizer")
        if "weight_decay" in group and "weight_decay" not in kind.fields:
            if "weight_decay_factor" in group:
                raise errors.InvalidArgument(f"group of table {table!r}: 'weight_decay' is not allowed beside 'weight_decay_factor'; give one of them")
            decay = _not_negative(group["weight_decay"], f"group of table {table!r}: weight_decay")
            if rate is None or kind.multiplies_decay is None:
                raise errors.InvalidArgument(f"group of table {table!r}: 'weight_decay' is not allowed where the module does not know the table's optimizer, for it is "
                                             "applied with the rate; give the module the optimizer, by TableConfig.optimizer or `optimizer`, or set 'weight_decay_factor'")
            values["weight_decay_factor"] = decay if kind.multiplies_decay else decay * values["learning_rate"]
        values.update((name, _native.real(group[name], f"group of table {table!r}: {name}")) for name in group if kind.takes(name, group[name]))
        return values

    def __reduce_ex__(self, protocol: object) -> Any:
        return _optimizer_again, (self.collection, self.state_dict())

    def state_dict(self) -> Dict[str, Any]:  # type: ignore[override]
        """Rates and what else the groups have; no activations."""
        groups = [{**group, "params": [place]} for place, group in enumerate(self.param_groups)]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Rates and what else the groups had; ValueError if they are of other tables. Of a model of `Client.change_model`, a table that the
        state does not have gets what another one of its stack had, for they share it, or else stays as it is."""
        groups: Any = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(groups, (list, tuple)) or any(not isinstance(group, Mapping) or "table" not in group for group in groups):
            raise ValueError("state_dict: it is not allowed, for its groups are not those of tables; it must be what state_dict() of an emberd.torch.EmbeddingOptimizer gave")
        given = {group["table"]: group for group in groups}
        if list(given) != list(self._placeholders) and self.collection.model._source is None:
            raise ValueError(f"the state is of the tables {list(given)}, but these are {list(self._placeholders)}; make the module with those of the state, or, "
                             "for other tables, with the model that client.change_model gives")
        tables = self.collection.model.tables
        of_stack = {tables[name].stack: group for name, group in given.items() if name in tables}
        for group in self.param_groups:
            own = {"params": group["params"], "table": group["table"]}
            loaded = given.get(own["table"]) or of_stack.get(tables[own["table"]].stack) or group
            values = {**loaded, **own}
            group.clear()
            group.update(values)

    def _show(self, *parts: Mapping[str, torch.Tensor]) -> None:
        """Makes the activations of the step the parameters, so that their gradients can be inspected."""
        for group in self.param_groups:
            mine = [leaves[name] for leaves in parts for name in self._features[group["table"]] if name in leaves]
            group["params"] = mine or [self._placeholders[group["table"]]]

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, *,  # type: ignore[override]
             checkpoint: Optional[str] = None) -> Any:
        """Ends the step: one update of each row that was looked up. Unless pipelined, it has been made on return.

        checkpoint: saves a checkpoint of this name with exactly the steps up to this one, of all ranks: it goes with the
        state of the dense part after the same step. `EmbeddingBagCollection.checkpoints` has its outcome.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.collection._lock:
            self.collection._update({group["table"]: self._values_of(group) for group in self.param_groups}, checkpoint)
        return loss

    def share_overflow(self) -> None:
        """Under torch.distributed, before a GradScaler's `step` or `unscale_`, which sees gradients of this rank alone: where one of any rank is not finite,
        all become infinite, so that every rank skips the step, and their scales stay equal. Every rank calls it, in each step.
        RuntimeError of one of several ranks without torch.distributed."""
        gradients = [leaf.grad for group in self.param_groups for leaf in group["params"] if leaf.grad is not None]
        overflow = any(not bool(torch.isfinite(one).all()) for one in gradients)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            of_any = torch.tensor(float(overflow), device="cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
            torch.distributed.all_reduce(of_any, torch.distributed.ReduceOp.MAX)
            overflow = bool(of_any)
        elif self.collection._steps.size > 1:
            raise RuntimeError(f"share_overflow: torch.distributed is not initialized, by which the {self.collection._steps.size} ranks of group "
                               f"{self.collection._steps.group!r} would hear of an overflow; call torch.distributed.init_process_group first")
        for one in gradients if overflow else ():
            one.fill_(math.inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Activations are new in each step, so that there is nothing to fill with zeros. Calls that accumulate begin anew, but for those whose backward is
        still to come."""
        if self.collection._parts:
            self.collection._forget_parts()
        for group in self.param_groups:
            for leaf in group["params"]:
                leaf.grad = None


def by_table(given: Union[float, Mapping[str, float], None], tables: Sequence[str], what: str) -> Dict[str, float]:
    """What is given of all tables, or of some by name."""
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else {} if given is None else dict.fromkeys(tables, given)
    for name in values:
        if name not in tables:
            raise errors.InvalidArgument(f"{what}: {name!r} is not allowed; it must be one of the tables, {', '.join(tables)}")
    return {name: _not_negative(value, what) for name, value in values.items()}


def _not_negative(value: Any, what: str) -> float:
    number = _native.real(value, what)
    if number < 0:
        raise errors.InvalidArgument(f"{what}: {number} is not allowed; it must be at least 0")
    return number


def _optimizer_again(collection: "EmbeddingBagCollection", state: Mapping[str, Any]) -> EmbeddingOptimizer:
    made = collection.optimizer()
    made.load_state_dict(state)
    return made
