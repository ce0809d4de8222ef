"""The tables of a model as a rank of a group of trainers."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native
from .._pace import Paces
from .._records import check_mapping
from ..arrays import Hyper, Ids
from ..client import Model
from ..steps import Steps
from ..trainer import Checkpointed, Trainer, ahead, ids_of
from ._in_jit import Lookups, check_ids, on_host


class Embedding(_native.Uncopied, Checkpointed):
    """The tables of a declared model as a rank of a group of trainers. Used by one thread, besides that of JAX.

    group: the name of the run: training under the same name continues the run. rank and size default to those of
      JAX's processes.
    pipelined: activations of step k show the updates before step k - 1, and updates overlap computing.
    patience: seconds for which a coordinator, a connection or another rank may be gone before an error is raised.
    partial: a step may leave features out: it looks up and trains those that it names.

    emberd.Sequences as ids of a feature, [samples, positions], give activations [samples, positions, embedding_dim].
    """

    def __init__(self, model: Model, group: str = "train", rank: Optional[int] = None, size: Optional[int] = None, *,
                 pipelined: bool = False, consistency: str = "sync", staleness_bound: int = 0,
                 step_timeout: float = 60.0, patience: float = 60.0, partial: bool = False) -> None:
        if rank is None:
            rank = 0 if size == 1 else jax.process_index()  # with a size of 1 each process trains alone
        if size is None:
            size = jax.process_count()
        self.model = model
        self._trainer = Trainer(model, group, rank, size, pipelined=pipelined, consistency=consistency,
                                staleness_bound=staleness_bound, step_timeout=step_timeout, patience=patience, partial=partial)
        self._in_jit = Lookups(self._trainer)
        self._paces = Paces(pipelined)

    def __repr__(self) -> str:
        return f"emberd.jax.Embedding({self.model.name!r}, group={self._behind().group!r})"

    @property
    def next_step(self) -> int:
        """The step whose update comes next. Joins the group, which waits for its other ranks."""
        self._in_jit.wait()
        return self._trainer.next_step

    def _behind(self) -> Steps:
        return self._trainer._behind()

    def _wait(self) -> None:
        self._in_jit.wait()

    @property
    def failure(self) -> Optional[BaseException]:
        """The error of `in_jit`, which JAX turns into a JaxRuntimeError."""
        return self._in_jit.failure

    def send(self, ids: Mapping[str, Ids]) -> int:
        """Sends the ids of the next step and returns its number. The ids must not change before its update."""
        return self._trainer.send(self._on_host(ids))

    def _on_host(self, ids: Mapping[str, Ids]) -> Dict[str, Ids]:
        check_mapping(ids, "ids")
        return {name: on_host(value) for name, value in ids.items()}

    def prefetch(self, batches: Iterable[Any], depth: int = 2,
                 ids: Optional[Callable[[Any], Mapping[str, Ids]]] = None) -> Iterator[Tuple[int, Any]]:
        """Yields the number of a step and its batch; the ids of the next batches have been sent by then.

        A loop over it may be left at any time. The next one begins with no step in progress: one that was received and not updated counts, and no row
        changes; those that were sent and not received are forgotten. A batch may be left out before it is received, as by `continue`: its step counts, and no row changes; every rank of a
        group leaves the same steps out.

        ids: gives the ids of a batch: by default its item or attribute "ids", the first part of a pair as (ids, label), or the
          batch itself.
        depth: lookups in progress at a time, including that of the batch yielded. At least 2 for `pipelined`.
        """
        get = ids_of if ids is None else ids
        loop = object()

        def begin() -> None:
            self._in_jit.wait()
            self._trainer.begin_loop(loop)

        def forget(steps: List[int]) -> None:
            self._in_jit.wait()  # some of those before may be on their way through JAX
            self._trainer.forget(steps, loop)

        return ahead(batches, lambda batch: self._trainer.send_of_loop(self._on_host(get(batch))), self._paces.of(depth), forget, begin)

    def receive(self, step: int) -> Dict[str, jax.Array]:
        """The activations of a step, float32 [samples, embedding_dim] by feature."""
        # On the CPU, JAX uses the memory into which they were received, and keeps it.
        return {name: jax.device_put(values, may_alias=True) for name, values in self._trainer.receive(step).items()}

    def update(self, step: int, gradients: Mapping[str, Any], hyper: Optional[Hyper] = None, *,
               checkpoint: Optional[str] = None) -> None:
        """One update of each row that the step looked up. A feature that is missing has a zero gradient.

        hyper: for this step only, {"learning_rate": 0.1}, or by table as in Lookup.apply; every rank of a group gives the same.
        checkpoint: saves a checkpoint of this name with exactly the steps up to this one; see `checkpoints`, and
          `request_checkpoint` for steps that `in_jit` makes.
        """
        check_mapping(gradients, "gradients")
        given = {name: value for name, value in gradients.items() if value is not None}
        fixed = all(isinstance(value, jax.Array) for value in given.values())  # others may be written to until they have been sent
        arrays = {name: np.asarray(value) if isinstance(value, jax.Array) else value for name, value in given.items()}
        self._trainer.update(step, arrays, hyper, checkpoint, own=fixed)

    def lookup(self, ids: Mapping[str, Ids]) -> Dict[str, jax.Array]:
        """Looks rows up without a step, for evaluation. Where steps are `pipelined`, the last update is missing until `finish`, or until the ids of another
        step have been sent; in `in_jit`, too."""
        self._in_jit.wait()
        found = self._trainer.look_up(self._on_host(ids))
        return {name: jnp.asarray(values) for name, values in found.items()}

    def token(self) -> jax.Array:
        """A float32 zero for `in_jit`."""
        return jnp.zeros((), jnp.float32)

    def in_jit(self, token: Any, ids: Mapping[str, Ids], step: Any = None, *,
               hyper: Optional[Callable[[Any], Mapping[str, Any]]] = None) -> Dict[str, jax.Array]:
        """The activations, float32 [samples, embedding_dim] by feature, inside of a jitted function.

        Differentiating makes a step of it: its forward pass receives, its backward pass sends the update. Where nothing is
        differentiated, the rows are looked up and no step is made. A loss calls it once, with the ids of all features.

        token: the scalar by which JAX knows that there is something to differentiate, `token()`: the loss must be
          differentiated with respect to it. Its gradient is zero.
        ids: by feature an array [samples] or [samples, k], or as FeatureConfig.output_shape says; Dense, Ragged, Sparse or Sequences.
          Ragged.values may be filled up at the end, so that shapes stay the same from step to step and nothing is compiled anew. JAX has
          int32 ids unless jax_enable_x64 is set. NumPy's that do not fit, and those of a larger table, are refused: send them ahead. Arguments of
          a jitted function JAX cuts to 32 bits before this sees them: id 2^32 + 5 becomes 5. Weights have no gradient, so that ValueError refuses those that
          the loss is differentiated with respect to; jax.lax.stop_gradient(weights) are allowed.
        step: the number that `send` or `prefetch` gave: the ids are on their way, and only their shapes matter here.
        hyper: gives the hyper-parameters of a step as `update` takes them, of its number; it is traced, as a schedule of
          optax is: `hyper=lambda step: {"learning_rate": schedule(step)}`. The same function each time.

        Works on one device of each process. A step that is not ended, because the backward pass was not run, is skipped by
        the next one: it counts, and no row changes. A failure arrives as JAX's JaxRuntimeError; `failure` has the error itself, and `typed_errors`
        raises it.
        """
        check_mapping(ids, "ids")
        if step is None:
            check_ids(ids, self.model)
        found: Dict[str, jax.Array] = self._in_jit.function(token, dict(ids), step, hyper)
        return found

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Raises what `in_jit` fails with in the block as it is, an IndexError for an id beyond its table, in place of JAX's
        JaxRuntimeError, which is its cause. The block ends when all its steps have been made, so that it is for one step or for many:

            with emb.typed_errors():
                loss, gradients = train_step(dense, emb.token(), batch)
        """
        self._in_jit.failure = None
        try:
            yield
            self._in_jit.wait()
        except jax.errors.JaxRuntimeError as error:
            failure = self._in_jit.failure
            if failure is None or str(failure) not in str(error):  # another one, behind one that the block has caught
                raise
            raise failure from error

    def restart(self, step: int) -> None:
        """Goes on from this step, as after a restore: forgets those in progress, and joins the group anew, which waits for its
        other ranks. RowsLost where its tables are at another step."""
        self._in_jit.wait()
        self._trainer.restart(step)
        self._in_jit.forget()

    def finish(self) -> None:
        """Leaves the group, once all updates have been made and checkpoints saved. The next step joins again."""
        self._in_jit.wait()
        self._trainer.finish()
