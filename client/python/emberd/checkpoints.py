"""Checkpoints of models: what `Model.save_checkpoint`, `Client.restore` and `Client.checkpoints` give."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Callable, Dict, List, Mapping, Optional

from . import _native, _tables, errors
from ._native import Call, Handle


@dataclass(frozen=True)
class Checkpoint:
    """One exact moment of a model: its rows, its slots, and the steps that its groups had made."""

    model: str
    name: str
    saved_at: datetime  # UTC
    bytes: int  # of its own files
    rows: int  # of weights, in its own files
    parent: str  # the checkpoint that it builds on; "": none, it is a full one
    chain: int  # checkpoints that it needs besides itself
    groups: Mapping[str, int] = field(default_factory=Dict[str, int])  # the step that each training group goes on from
    automatic: bool = False  # made by the cluster itself, which removes it when newer ones are there
    changes: int = 0  # updates and assignments that its rows had seen
    pause: float = 0.0  # of one that was just saved: seconds for which updates were held back


class Checkpoints(List[Checkpoint]):
    """A list of checkpoints, the newest first."""

    damaged: List[str]  # folders that cannot be read, with the reason

    def __init__(self, checkpoints: List[Checkpoint], damaged: List[str]) -> None:
        super().__init__(checkpoints)
        self.damaged = damaged

    def _repr_html_(self) -> str:
        rows = [(one.model, one.name, one.saved_at.isoformat(" ", "seconds"), _tables.size(one.bytes), _tables.count(one.rows),
                 ", ".join(f"{group}: {step}" for group, step in one.groups.items())) for one in self]
        rows += [("damaged", folder, "", "", "", "") for folder in self.damaged]
        return _tables.in_html("emberd checkpoints" if rows else "no checkpoints", ("model", "name", "saved at (UTC)", "size", "rows", "next step of groups"), rows)


@dataclass(frozen=True)
class Progress:
    """The progress of a save, of a restore, of a change of what is served, or of rows that are given."""

    phase: str  # "pausing", "saving", "checking", "restoring", "loading"
    bytes: int
    total_bytes: int  # as far as it is known; grows while saving
    elapsed: float  # seconds

    @property
    def bytes_per_second(self) -> float:
        """Since it began; 0.0 before any time has passed."""
        return self.bytes / self.elapsed if self.elapsed > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.phase}: {_tables.size(self.bytes)} of {_tables.size(self.total_bytes)}, {_tables.size(self.bytes_per_second)}/s"


ProgressCallback = Callable[[Progress], object]


def checkpoint_name(name: Any, what: str) -> str:
    """Of one to be saved with a step, where the server would say only later that it is wrong."""
    _native.text(name, what)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name) or name == "newest":
        raise errors.InvalidArgument(f"{what}: {name!r} is not allowed; it must be 1 to 128 letters, digits and _-., beginning with a "
                                     "letter or digit, and not \"newest\"")
    given: str = name
    return given


def _checkpoint(said: Dict[str, Any]) -> Checkpoint:
    return Checkpoint(said["model"], said["name"], datetime.fromtimestamp(said["saved_at_ms"] / 1000, timezone.utc),
                      said["bytes"], said["rows"], said["parent"], said["chain"], dict(said["groups"]),
                      said["automatic"], said["changes"], said.get("pause_us", 0) / 1e6)


def _run(function: str, client: Handle, progress: Optional[ProgressCallback], names: Mapping[str, Optional[str]],
         *more: int) -> Checkpoint:
    if progress is not None and not callable(progress):
        raise _native.refuse_kind(progress, "progress", "callable")

    def tell(said: Dict[str, Any]) -> None:
        if progress is not None:
            progress(Progress(said["phase"], said["bytes"], said["total_bytes"], said["elapsed_ms"] / 1000))

    texts = [_native.text(value, what, optional=what != "model") for what, value in names.items()]
    try:
        return _checkpoint(Call(getattr(_native.lib(), function)(client.get(), *texts, *more), progress=tell).text())
    except errors.FailedPrecondition as error:
        if "no storage" not in str(error):
            raise
        raise errors.make(error.code, f"{error}; in Python, emberd.local(data=DIR)") from None


def save(client: Handle, model: str, name: Optional[str], incremental: bool,
         progress: Optional[ProgressCallback]) -> Checkpoint:
    return _run("save_checkpoint", client, progress, {"model": model, "name": name}, int(bool(incremental)))


def restore(client: Handle, model: str, name: Optional[str], config: Optional[str],
            progress: Optional[ProgressCallback]) -> Checkpoint:
    return _run("restore_checkpoint", client, progress, {"model": model, "name": name, "config": config})


def serve(client: Handle, model: str, name: Optional[str], serve_as: Optional[str], storage_dtype: Optional[str],
          progress: Optional[ProgressCallback]) -> Checkpoint:
    dtype = storage_dtype.upper() if isinstance(storage_dtype, str) else storage_dtype  # in either case, as in a TableConfig
    return _run("serve_checkpoint", client, progress, {"model": model, "name": name, "serve_as": serve_as, "storage_dtype": dtype})


def list_all(client: Handle, model: Optional[str]) -> Checkpoints:
    said = Call(_native.lib().list_checkpoints(client.get(), _native.text(model, "model", optional=True))).text()
    return Checkpoints([_checkpoint(one) for one in said["checkpoints"]], said["damaged"])


def delete(client: Handle, model: str, name: str) -> int:
    said = Call(_native.lib().delete_checkpoint(client.get(), _native.text(model, "model"), _native.text(name, "name"))).text()
    freed: int = said["bytes"]
    return freed
