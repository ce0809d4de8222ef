"""Between the backends and the steps of a trainer: rates that are set while tables train, and calls that make a step together."""

from __future__ import annotations

import warnings
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from .. import _native
from .._records import check_mapping
from .._stacking import unequal
from ..arrays import Ids, concatenate, map_arrays
from ..steps import Steps, warn
from ..trainer import Trainer


class Turns:
    """rates: what tables are declared with; None: it is not set from here. calls: how many make a step, of the mean of their gradients."""

    def __init__(self, trainer: Trainer, rates: Mapping[str, Optional[float]], calls: int) -> None:
        self.model, self.partial = trainer.model, trainer.partial
        self._trainer, self._calls = trainer, calls
        self.declared = {name: rate for name, rate in rates.items() if rate}
        self._frozen = [name for name, rate in rates.items() if rate == 0]
        self.rates = dict(self.declared)
        self.always = False  # whether rates go along with each update, and not only those that have been set
        self.loaded: Optional[int] = None  # of which step weights are, until it is known at which step the tables are
        self._unread = False  # nothing has been read since they were loaded
        self._said = False  # a lookup has warned of their step
        self._parts: List[Tuple[Dict[str, Ids], Dict[str, Any]]] = []  # ids and gradients; without those a call has not ended
        self.begun = 0  # steps, and parts of them

    def look_up(self, ids: Mapping[str, Ids]) -> Any:
        if self._unread:
            self._compare_as_far_as_known(self._trainer._behind())
        return self._trainer.look_up(ids)

    def begin(self, ids: Mapping[str, Ids], number: Optional[int] = None) -> Tuple[int, Any]:
        """The number of the step that this call is of, and activations."""
        if self._calls == 1:
            number, found = self._trainer.begin(ids, number)
            self._compare(number)
        else:
            self._parts = [part for part in self._parts if part[1]]
            self._parts.append(({name: map_arrays(np.array, one) for name, one in ids.items()}, {}))
            number = self._trainer.reached
            self._compare(number)
            found = self._trainer.look_up(ids)
        self.begun += 1
        return number, found

    def note_loaded(self, saved: int, steps: Steps) -> None:
        """Weights of this step have been loaded. Where the tables are at another one, that is said now, or with the next step
        or lookup."""
        self.loaded, self._unread, self._said = saved, True, False
        if steps.joined:
            self._compare(steps.reached)

    def _compare(self, step: int) -> None:
        saved, self.loaded = self.loaded, None
        self._unread = False
        if saved not in (None, step) and not self._said:
            self._say(saved, f"are at step {step}")

    def _compare_as_far_as_known(self, steps: Steps) -> None:
        """Before rows are read. Without joining, which might wait for other ranks."""
        if steps.joined:
            self._compare(steps.reached)
            return
        self._unread = False
        if self.loaded is None or self.model.name in self.model.client._restored:
            return
        found = self.model._reached_by(steps.group)
        if found is not None and (found > self.loaded or found == 0 < self.loaded):
            self._said = True
            self._say(self.loaded, f"have been trained for {found} steps or more" if found else "are new")

    def _say(self, saved: Optional[int], of_tables: str) -> None:
        warn(f"emberd: weights of step {saved} were loaded, and the tables of model {self.model.name!r} {of_tables}. They go "
             "together where both are of the same step: see `request_checkpoint` of the layer, and after client.restore its "
             "`restart`")

    def update(self, number: int, gradients: Mapping[str, Any], hyper: Optional[Mapping[str, Any]] = None, own: bool = False, *, begun: int) -> None:
        """begun: what it was when the call had begun whose gradients these are. Calls that make a step together have its number in common."""
        if self._calls > 1:
            if begun != self.begun:
                for part in self._parts[-1:]:
                    part[1].clear()  # both gradients may be of one loss: that of the last call, if it has come, counts no more
                raise ValueError("another gradient is not allowed, for a call has begun since these rows were looked up. A call has one lookup, of all "
                                 "features, and one gradient")
            if not self._parts or self._parts[-1][1]:  # of a call before the last one, whose ids are gone
                del self._parts[-1:]  # which of both gradients is that of the last call is not known
                raise ValueError(f"step {number}: another gradient of its last call is not allowed; one of the {self._calls} calls that "
                                 "make a step has one lookup, of all features, and one gradient")
            self._parts[-1][1].update({name: np.array(one) for name, one in gradients.items()})
            if len(self._parts) < self._calls:
                return
            parts, self._parts = self._parts, []
            number, _ = self._trainer.begin({name: concatenate([ids[name] for ids, _ in parts], f"feature {name!r}", self.model.features[name].output_shape)
                                             for name in parts[0][0]})
            gradients = {name: np.concatenate([part[name].reshape(-1, *self.model._row_shapes[name]) for _, part in parts]) / np.float32(self._calls) for name in gradients}
        self._trainer.update(number, gradients, self._with_rates(hyper), own=own)

    def forget(self) -> None:
        """Calls whose step has not been made."""
        if self._parts:
            warnings.warn(f"emberd: the gradients of {len(self._parts)} calls, of the {self._calls} that make a step, are dropped", stacklevel=3)
        self._parts = []

    def _with_rates(self, hyper: Optional[Mapping[str, Any]]) -> Mapping[str, Any]:
        values: Dict[str, Any] = {name: dict(one) for name, one in (hyper or {}).items()}
        if self.always:
            values.update((name, {"learning_rate": 0.0}) for name in self._frozen)
        for name, rate in self.rates.items():
            if self.always or rate != self.declared[name]:
                one = values.setdefault(name, {})  # a rate in it is corrected by the step
                one["learning_rate"] = one.get("learning_rate", self.declared[name]) * (rate / self.declared[name])
        return values

    def set_rates(self, rates: Mapping[str, float]) -> None:
        check_mapping(rates, "rates")
        given = {name: _native.real(rate, f"rates: {name!r}") for name, rate in rates.items()}
        for name, rate in given.items():
            if name not in self.declared:
                raise ValueError(f"rates: {name!r} is not allowed; it must be one of the tables with a number above 0 as their rate: "
                                 f"{', '.join(self.declared) or 'there are none'}")
            if rate < 0:
                raise ValueError(f"rates: {name!r}: {rate} is not allowed; it must be >= 0")
        self.check_shared(given)
        self.rates.update(given)

    def check_shared(self, rates: Mapping[str, float]) -> None:
        """Refuses rates that leave tables of a stack with different ones."""
        both = {**self.rates, **rates}
        new = {name: None if both.get(name) == self.declared.get(name) else both[name] for name in self.model.tables}
        found = unequal(new, {name: table.stack for name, table in self.model.tables.items()})
        if found:
            raise ValueError(f"rates: different ones for the tables {found[0]!r} and {found[1]!r} are not allowed, for they are in one stack, whose tables share "
                             "one; give both the same, or make the layer with table_stacking=None")
