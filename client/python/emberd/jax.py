"""Embedding tables of a cluster in JAX.

    emb = emberd.jax.Embedding(model, group="run-7")
    for step, batch in emb.prefetch(batches, depth=2):
        activations = emb.receive(step)                    # dict of float32 [B, D]
        loss, gradients = train_step(state, activations, batch)   # your jitted function
        emb.update(step, gradients)

The cluster is outside of the jitted function: a step receives activations, and gives their gradients back.
Gradients of the ranks of a group are **summed**.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import jax
import numpy as np

from .arrays import Hyper, Ids
from .client import Model
from .steps import Step, Steps

__all__ = ["Embedding"]


class Embedding:
    """The tables of a declared model as a rank of a group of trainers. Not thread-safe.

    group: the name of the run: who trains under it again goes on in it. rank and size default to those of JAX's processes.
    pipelined: activations of step k show the updates before step k - 1, and updates overlap computing.
    patience: seconds for which a coordinator, a connection or another rank may be gone before an error is raised.
    """

    def __init__(self, model: Model, group: str = "train", rank: Optional[int] = None, size: Optional[int] = None, *,
                 pipelined: bool = False, consistency: str = "sync", staleness_bound: int = 0,
                 step_timeout: float = 60.0, patience: float = 60.0) -> None:
        if rank is None and size is None:
            rank, size = jax.process_index(), jax.process_count()
        self.model = model
        self._steps = Steps(model, group, rank or 0, size or 1, pipelined=pipelined, consistency=consistency,
                            staleness_bound=staleness_bound, step_timeout=step_timeout, patience=patience)
        self._sent: Deque[Step] = deque()  # lookups that were sent and whose update was not

    @property
    def next_step(self) -> int:
        """The step whose update comes next. Joins the group, which waits for its other ranks."""
        return self._steps.next_step

    @property
    def checkpoints(self) -> Mapping[str, str]:
        """Those that were asked for with a step and have ended: why there is none of this name; "": it has been saved."""
        return dict(self._steps.checkpoints)

    def send(self, ids: Mapping[str, Ids]) -> int:
        """Sends the ids of the next step and gives its number. They must not change before its update."""
        step = self._steps.send({name: _host(value) for name, value in ids.items()})
        self._sent.append(step)
        return step.number

    def prefetch(self, batches: Iterable[Any], depth: int = 2,
                 ids: Optional[Callable[[Any], Mapping[str, Ids]]] = None) -> Iterator[Tuple[int, Any]]:
        """Number of the step and batch, one after the other; the ids of the next batches are on their way by then.

        ids: gives the ids of a batch: by default its item "ids", or the batch itself.
        depth: lookups that are under way at a time, that of the batch given included. At least 2 for `pipelined`.
        """
        if not 1 <= depth <= 4:
            raise ValueError(f"depth: {depth} is not allowed; it must be in [1, 4]")
        get = ids or _ids_of
        waiting: Deque[Tuple[int, Any]] = deque()
        for batch in batches:
            waiting.append((self.send(get(batch)), batch))
            if len(waiting) >= depth:
                yield waiting.popleft()
        yield from waiting

    def receive(self, step: int) -> Dict[str, jax.Array]:
        """The activations of a step, float32 [samples, embedding_dim] by feature."""
        found = self._steps.receive(self._at(step))
        # On the CPU, JAX uses the memory into which they were received, and keeps it.
        return {name: jax.device_put(values, may_alias=True) for name, values in found.items()}

    def update(self, step: int, gradients: Mapping[str, Any], hyper: Optional[Hyper] = None, *,
               checkpoint: Optional[str] = None) -> None:
        """One update of each row that the step looked up. A feature that is missing has a zero gradient.

        hyper: for this step only, {"learning_rate": 0.1}, or by table; every rank of a group gives the same.
        checkpoint: saves a checkpoint of this name with exactly the steps up to this one; see `checkpoints`.
        """
        given = self._at(step)
        on_host = {name: np.asarray(value) for name, value in gradients.items() if value is not None}
        self._steps.update(given, on_host, hyper, checkpoint)
        self._sent.remove(given)

    def lookup(self, ids: Mapping[str, Ids]) -> Dict[str, jax.Array]:
        """Looks rows up without a step, for evaluation."""
        self._steps.confirm()
        found = self.model.lookup({name: _host(value) for name, value in ids.items()})
        return {name: jax.numpy.asarray(values) for name, values in found.items()}

    def finish(self) -> None:
        """Leaves the group, once all updates have been made. The next step joins again."""
        self._sent.clear()
        self._steps.finish()

    def _at(self, number: int) -> Step:
        for step in self._sent:
            if step.number == number and not step.forgotten:
                return step
        numbers: List[int] = [step.number for step in self._sent]
        raise ValueError(f"step {number} is not under way; under way are {numbers}")


def _ids_of(batch: Any) -> Any:
    return batch["ids"] if "ids" in batch else batch


def _host(value: Ids) -> Ids:
    return np.asarray(value) if isinstance(value, jax.Array) else value
