"""Clients, models, lookups and rows. Everything is thread-safe, and Ctrl-C ends every wait."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import json
import math
import os
import re
import uuid
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np
import numpy.typing as npt

from . import _changing, _filling, _loading, _native, _records, _tables, arrays, checkpoints, errors, programs, statistics
from ._changing import ChangedModel
from ._native import Call, Handle
from .arrays import Floats, Hyper, Ids
from .checkpoints import Checkpoint, Checkpoints, ProgressCallback
from .config import ModelConfig, QuantizationConfig
from .programs import Bundle, Program
from .statistics import CallStatistics, HotRow, Limits, MemoryChange, ModelStatistics, ShardMemory

if TYPE_CHECKING:
    from .train import TrainStream

WIRE = {"float32": 0, "bfloat16": 1}
TRANSPORT = {"auto": 0, "tcp": 1}


@dataclass(frozen=True)
class Tls:
    """PEM files, and the name that certificates must have instead of the host. All may be empty."""

    ca_file: str = ""  # who signs coordinators' certificates; empty: this system's authorities
    certificate_file: str = ""  # mutual TLS: both of them
    key_file: str = ""
    server_name: str = ""


@dataclass(frozen=True)
class Applied:
    """The result of an update."""

    step: int  # of a training stream, or what the caller gave; -1: none
    rows_updated: int
    rows_skipped: int  # left as they were: their gradient was not finite
    replayed: bool = False  # it had been applied before, and nothing was done now
    # On a training stream: a checkpoint that it has asked for and whose end is known now, and why there is none of this
    # name; "": it has been saved.
    checkpoint: str = ""
    checkpoint_error: str = ""
    checkpoint_step: int = -1  # which has asked for it: several may ask for one name


@dataclass(frozen=True)
class Table:
    """A table of a declared model. stack: that it is part of; optimizer: its kind; slots: of the optimizer, as `Model.read_rows` takes them."""

    name: str
    vocabulary_size: int
    embedding_dim: int
    stack: str
    optimizer: str
    slots: Tuple[str, ...]
    combiner: str = ""  # of the rows of a sample: "mean", "sum" or "sqrtn"
    quantization: Optional[QuantizationConfig] = None  # of looked-up rows; read_rows gives them as they are stored


@dataclass(frozen=True)
class Feature:
    """A feature of a declared model, and the table that it looks up."""

    name: str
    table: str
    embedding_dim: int
    output_shape: Tuple[int, ...] = ()  # of the activations without the last dimension; (): [samples]


@dataclass(frozen=True)
class ModelStatus:
    """A model of the cluster, as `Client.models` lists them."""

    name: str
    tables: int
    stacks: int
    table_bytes: int  # of rows and slots, on all shards
    serves: str = ""  # the checkpoint that it serves, "MODEL/NAME"; "": it is none that serves
    lost: str = ""  # why every call on it fails, where a shard has lost its rows; "": none has


def connect(addresses: Union[str, Sequence[str]], *, tls: Union[Tls, bool, None] = None, token: str = "",
            token_file: str = "", deadline: float = 30.0, connect_timeout: float = 10.0, wire: str = "float32",
            gradient_wire: Optional[str] = None, transport: str = "auto") -> "Client":
    """A client of a cluster.

    addresses: "host:port" of the coordinators, one or several; the first one that answers is used.
    tls: True for encryption with this system's authorities, or Tls with files.
    token, token_file: the token, or the file that holds it in one line.
    deadline: seconds for every call, all retries included. connect_timeout: until the first coordinator has answered.
    wire: how activations travel, "float32" or "bfloat16" (half the bytes); gradients too, unless gradient_wire is given.
    transport: "auto" shares memory with a coordinator on this machine for large arrays; "tcp" never does.
    """
    given = dict(tls=tls, token=token, token_file=token_file, deadline=deadline, connect_timeout=connect_timeout,
                 wire=wire, gradient_wire=gradient_wire, transport=transport)
    try:
        hosts = [addresses] if isinstance(addresses, str) else list(addresses)
    except TypeError:
        raise _native.refuse_kind(addresses, "addresses", "\"host:port\", or a list of these; of emberd.local, call cluster.connect()") from None
    if tls is not None and not isinstance(tls, (Tls, bool)):
        raise _native.refuse_kind(tls, "tls", "a Tls, or a bool")
    files = tls if isinstance(tls, Tls) else Tls()
    options = _native.ClientOptions(
        ctypes.sizeof(_native.ClientOptions),
        (ctypes.c_char_p * max(1, len(hosts)))(*[_native.text(host, "addresses") for host in hosts]), len(hosts), int(bool(tls)),
        *(_native.text(getattr(files, one.name), one.name, path=True) for one in dataclasses.fields(Tls)),
        _native.text(token, "token"), _native.text(token_file, "token_file", path=True),
        _native.milliseconds(connect_timeout, "connect_timeout"), _native.milliseconds(deadline, "deadline"),
        _native.choice(wire, "wire", WIRE), _native.choice(wire if gradient_wire is None else gradient_wire, "gradient_wire", WIRE),
        _native.choice(transport, "transport", TRANSPORT))
    handle = Call(_native.lib().connect(ctypes.byref(options))).take("client")
    return Client(handle, hosts, given)


def _config_text(config: Union[ModelConfig, str, "os.PathLike[str]"]) -> str:
    if isinstance(config, ModelConfig):
        return config.to_json()
    if isinstance(config, os.PathLike) or (isinstance(config, str) and "\n" not in config and os.path.isfile(config)):
        return Path(config).read_text(encoding="utf-8")
    if not isinstance(config, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(config, "config", "an emberd.ModelConfig, its text, or the path of a file")
    _native.text(config, "config")
    if config.strip() and not set("\n:{") & set(config):
        raise FileNotFoundError(errno.ENOENT, "config: there is no such file, and it is no text of a model", config)
    return config


def _what_differs(said: str, text: str) -> str:
    """Also which table it is, and what to write."""
    found = re.search(r"first difference: (?:tables\[(\d+)\]\.)?(optimizer\.)?(\S+): (\S+) in the declared model, (\S+) in", said)
    to_do = "Give this one another name, which `change_model` fills with the rows of the other; or drop that: `drop_model`"
    if found and found[2] and found[3] == "learning_rate":
        to_do = (f"Declare learning_rate={found[4]}, and give the rate of each step with it: hyper={{\"learning_rate\": {found[5]}}} of an update, or "
                 f"optimizer(lr={found[5]}) of emberd.torch. Or: {to_do}")
    elif found and found[2]:
        to_do = f"To keep the rows, save a checkpoint, drop the model, and call client.restore(name, config=config), where slots of another kind begin anew. Or: {to_do}"
    try:
        said += f" (table {json.loads(text)['tables'][int(found[1])]['name']!r})" if found and found[1] else ""
    except (ValueError, LookupError, TypeError):  # it is text proto, or JSON with other spellings
        pass
    return f"{said}. {to_do}"


def _matters(warning: str) -> bool:
    """Not so of a table that is stored with more rows or columns than it was declared with, and is small all the same."""
    stored = re.search(r" is stored as (\d+) x (\d+);", warning)
    return stored is None or 4 * int(stored[1]) * int(stored[2]) >= 1 << 20


class Client:
    """Made by `connect`. It may be pickled, with its token: the copy connects anew, in a spawned process for instance."""

    def __init__(self, handle: Handle, addresses: Sequence[str], options: Mapping[str, Any]) -> None:
        self._handle = handle
        self.addresses = list(addresses)
        self._options = dict(options)
        self._mutations = uuid.uuid4().hex, itertools.count(1)
        self._cluster: Any = None  # of this process, which lives as long as this client is open
        self._restored: Set[str] = set()  # models, by this client
        _clients.add(self)

    def __reduce__(self) -> Tuple[Any, ...]:
        return _connect_again, (self.addresses, self._options)

    def __repr__(self) -> str:
        return f"emberd.Client({', '.join(self.addresses)})"

    def _repr_html_(self) -> str:
        try:
            rows = [(one.name, one.tables, _tables.size(one.table_bytes), one.serves) for one in self.models()]
        except (errors.Error, ValueError, errors.ForkedProcess) as error:
            return _tables.in_html(repr(self), (), [(error,)])
        return _tables.in_html(repr(self), ("model", "tables", "memory", "serves"), rows)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def declare(self, config: Union[ModelConfig, str, "os.PathLike[str]"], *,
                restore_from: Optional[str] = None) -> "Model":
        """Creates the tables of a model, or finds them. Where an initializer is a function or an array, also gives the model its rows, or waits until another
        client has; until then, calls of others on the model end with Unavailable.

        config: a ModelConfig, its text (text proto or JSON), or the path of a file that holds it.
        restore_from: a model that is not there yet begins with the rows of this checkpoint of a model of its name, or of
        the "newest".
        AlreadyExists if a different model of this name is declared. One that differs in the samples that the plan is made for is the same,
        and keeps its plan. Warns of what a new plan may not be meant to have, as many more rows or columns than were declared, where that takes 1 MiB or more;
        `Model.description["warnings"]` has them all.
        """
        return self._declare_filled(config, restore_from)

    def change_model(self, source: Union["Model", str], config: ModelConfig, *, strict: bool = True, groups: Sequence[str] = (),
                     progress: Optional[ProgressCallback] = None) -> ChangedModel:
        """A trained model with tables that are added, have more rows or fewer, or are gone: declares one of another name, which goes on from the source.

        Tables of the same names begin with the rows and slots of the source, part by part, and what the source does not have with its initial values: new
        tables, and new rows. The source stays as it is; `drop_model` removes it. It should not be trained meanwhile. Nobody sees the new model before it is
        whole: until then calls of others on it end with Unavailable. Called again, it finds the model, trained or not, and copies nothing; after a failure it
        begins anew. Call it where `declare` would be called, in each run: a later `declare` of the same config is AlreadyExists, for its first rows are others.

        source: a Model, also of another cluster, or its name on this one, which need not be there any more once the changed model is.
        config: the new model.
        strict: InvalidArgument, and nothing is declared, if a table of both has another embedding_dim, or another optimizer, so that its rows or slots
          would be lost. False: they begin with initial values, and `not_taken` says so.
        groups: groups of trainers that go on from the step that they have reached, of consistency "sync"; one process names them. Others begin at step 0, which
          optimizers that count steps would take for their first.
        progress: called after each part, with how far it is.
        NotFound if there is neither of both models.
        """
        return _changing.change(self, source, config, strict, groups, progress)

    def _declare_filled(self, config: Union[ModelConfig, str, "os.PathLike[str]"], restore_from: Optional[str] = None,
                        parts: Optional[_filling.Parts] = None) -> "Model":
        """parts: rows of tables that have Assigned() as their initializer."""
        text = _config_text(config)
        given = [one for one in (_filling.parts_of(config) if isinstance(config, ModelConfig) else None, parts) if one is not None]
        model = _filling.fill(self, text, self._model(self._declare(text, restore_from)), given)
        model._known |= restore_from is not None
        for warning in filter(_matters, model.description["warnings"]) if model.created else ():
            warnings.warn(f"emberd: model {model.name!r}: {warning}", stacklevel=3)
        return model

    def _declare(self, text: str, restore_from: Optional[str]) -> Call:
        try:
            return Call(_native.lib().declare_from(self._handle.get(), _native.text(text, "config"),
                                                   _native.text(restore_from, "restore_from", optional=True)))
        except errors.AlreadyExists as error:
            raise errors.AlreadyExists(_what_differs(str(error), text)) from None

    def _model(self, call: Call) -> "Model":
        return Model(self, call.take("model"))

    def model(self, name: str) -> "Model":
        """A model that somebody declared. NotFound if nobody did."""
        try:
            return Model(self, Call(_native.lib().describe(self._handle.get(), _native.text(name, "name"))).take("model"), found=True)
        except errors.NotFound as error:
            raise errors.NotFound(f"{error}{self._saved(name)}") from None

    def _saved(self, name: str) -> str:
        """How a model that is not there is made of its checkpoints."""
        try:
            there = self.checkpoints(name)
        except errors.Error:  # there is nowhere to keep one, or this is not ours to know
            return ""
        are = f"are {len(there)} checkpoints of it, the newest" if there[1:] else "is a checkpoint of it,"
        return f". There {are} {there[0].name!r}: client.restore({name!r}) declares it with the rows of that" if there else ""

    def models(self) -> List[ModelStatus]:
        """The models of the cluster, by name, whoever declared them."""
        found = [ModelStatus(one["name"], one["tables"], one["stacks"], int(one["table_bytes"]), one["serves"], one["lost"])
                 for one in statistics.administer(self._handle, "GetStatus")["models"]]
        return sorted(found, key=lambda one: one.name)

    def memory(self) -> List[ShardMemory]:
        """The memory of each shard, in their order, with why one does not answer within a second."""
        return statistics.memory(self._handle)

    def change_memory(self, operation: str, model: str = "") -> List[MemoryChange]:
        """Moves models in and out of the memory of the shards' SparseCores, where the cluster evicts models. Of each shard, in their order, what it did.

        operation: "pin" brings a model in, and has it stay; "unpin" lets it be evicted again; "compact" moves the tables together; "release" evicts
        all that is neither pinned nor in use.
        model: to pin or unpin. FailedPrecondition in a cluster that evicts none.
        """
        return statistics.change_memory(self._handle, operation, model)

    def call_statistics(self, names: str = "") -> Dict[str, CallStatistics]:
        """How long calls of programs took at the coordinator, by kind: "compile", "prepare_batch", "execute", "execute_chained", "read_handle", "release".

        names: a regular expression for whole names; "": all that there were. InvalidArgument if it is none.
        """
        return statistics.calls(self._handle, names)

    def compile(self, spec: Mapping[str, Any]) -> Program:
        """A program, of the ProgramSpec of program_service.proto as a dict; `Model.compile` makes those of one model. A sum of two tuples:
        {"kind": "ELEMENTWISE", "inputs": [{"feature": "a"}, {"feature": "b"}], "outputs": [{"operation": "ADD", "a": {"argument": 0}, "b": {"argument": 1}}]}

        InvalidArgument names the field that is wrong.
        """
        if not isinstance(spec, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(spec, "spec", "a mapping")
        return Program(self, spec)

    def bundle(self, *elements: Any) -> Bundle:
        """One handle on the coordinator for several things: what `prepare` and programs gave, mappings of tensors by name, parts of other bundles, and
        tuples of these, on up to 16 levels. Programs take its elements as arguments.

        FailedPrecondition for a result that stays nowhere, ResourceExhausted where the coordinator has no room.
        """
        return Bundle(self, elements)

    def _mutation(self) -> Dict[str, Any]:
        """A name for the updates of one call, by which they are made once."""
        name, numbers = self._mutations
        return {"client_id": name, "sequence": next(numbers)}

    def drop_model(self, name: str) -> bool:
        """Removes a model, its rows and its groups from all shards; checkpoints stay. False: there is none of this name. Streams and
        batches of it end with an error."""
        _native.text(name, "name")
        return bool(statistics.administer(self._handle, "DropModel", name=name)["dropped"])

    def reset_model(self, name: str) -> "Model":
        """Discards all rows of a model, which gets initial ones again; its groups begin at step 0. This ends DataLoss, where a shard
        has lost its rows. Batches and streams under way end with Aborted. NotFound if there is none of this name."""
        _native.text(name, "name")
        statistics.administer(self._handle, "ResetModel", name=name)
        return self.model(name)

    def status(self) -> Dict[str, Any]:
        """The cluster: version, uptime_ms; models (see `models`); batches and batch_bytes that wait for gradients; and of each of the
        shards: reachable or the error, uptime_ms, table_bytes, rows_gathered and rows_updated since it was started."""
        result: Dict[str, Any] = Call(_native.lib().client_status(self._handle.get())).text()
        return result

    def checkpoints(self, model: Optional[str] = None) -> Checkpoints:
        """The checkpoints of a model, or of all, the newest first."""
        return checkpoints.list_all(self._handle, model)

    def restore(self, model: str, name: Optional[str] = None, *,
                config: Union[ModelConfig, str, "os.PathLike[str]", None] = None,
                progress: Optional[ProgressCallback] = None) -> "Model":
        """Gives a model the rows and groups of a checkpoint (None: the newest), or declares it with them.

        Its present rows are lost; earlier batches and streams end with Aborted. If a file of the checkpoint is damaged,
        DataLoss names it, and nothing has changed.
        config: the same tables with another storage type or optimizer; slots that the checkpoint does not have begin with
        their initial values. AlreadyExists if another config is declared: drop the model first (`drop_model`).
        progress: called now and then with how far it is.
        """
        checkpoints.restore(self._handle, model, name, None if config is None else _config_text(config), progress)
        self._restored.add(model)
        return self.model(model)

    def serve(self, model: str, name: Optional[str] = None, *, serve_as: Optional[str] = None,
              storage_dtype: Optional[str] = None, progress: Optional[ProgressCallback] = None) -> "Model":
        """Has a model serve the weights of a checkpoint (None: the newest), for lookups alone, without slots.

        What was served under its name is replaced once all shards have the new rows: no lookup fails, and each answer is
        wholly from one of them.
        serve_as: the name of the model that serves; None: `model`, which must then not be trained on this cluster
        (AlreadyExists).
        storage_dtype: "float32", "bfloat16" or "float16", in either case; None: as it is served by now, or else as in the checkpoint.
        progress: called now and then with how far it is.
        """
        checkpoints.serve(self._handle, model, name, serve_as, storage_dtype, progress)
        return self.model(model if serve_as is None else serve_as)

    def delete_checkpoint(self, model: str, name: str) -> int:
        """Removes a checkpoint that no other one builds on; returns the number of bytes freed."""
        return checkpoints.delete(self._handle, model, name)

    def drop_group(self, model: str, group: str) -> bool:
        """Forgets a group of trainers whose run is over: the next run under its name begins at its first step. False: no
        shard knows it. FailedPrecondition while some of its ranks are active."""
        said = Call(_native.lib().drop_group(self._handle.get(), _native.text(model, "model"), _native.text(group, "group"))).text()
        return bool(said["dropped"])

    def cancel(self) -> None:
        """Ends all calls and streams of this client, on all threads, with Cancelled. Later calls are not affected."""
        _native.lib().client_cancel(self._handle.get())

    def close(self) -> None:
        """Cancels calls in progress and disconnects. Closing twice, or in a forked child, does nothing."""
        if self._handle.open:
            if not _native.forked():
                self.cancel()
            self._handle.close()
            self._cluster = None


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _living() -> List[Client]:
    while True:
        try:
            return list(_clients)
        except RuntimeError:  # another thread connects, and the set has changed meanwhile
            continue


def open_client(addresses: Sequence[str]) -> Optional[Client]:
    """One that this process has to these addresses."""
    return next((one for one in _living() if one._handle.open and one.addresses == list(addresses)), None)


def _connect_again(addresses: List[str], options: Dict[str, Any]) -> Client:
    """A copy. It keeps a cluster of this process alive, too."""
    cluster = next((one._cluster for one in _living() if one._cluster is not None and one.addresses == list(addresses)), None)
    client = connect(addresses, **options)
    client._cluster = cluster
    return client


def _model_again(client: Client, name: str, source: Optional[str] = None) -> "Model":
    model = client.model(name)
    model._source = source
    return model


class Model:
    """A declared model: `tables` and `features` by name, in the order of the config."""

    def __init__(self, client: Client, handle: Handle, found: bool = False) -> None:
        """found: by its name."""
        self.client = client
        self._handle = handle
        self.description: Dict[str, Any] = json.loads(_native.lib().model_json(handle.get()))
        self.name: str = self.description["name"]
        self.id = int(self.description["id"])
        self.created: bool = self.description["created"]  # False: it was there already
        self._source: Optional[str] = None  # the model whose tables these go on from, by `Client.change_model`
        self._known = found  # whether who has this object knows that it was there before
        self._unfilled = int(self.description["unfilled"])  # of a model that is being filled: which of its declarations this is; else 0
        self.tables = {one["name"]: Table(one["name"], one["vocabulary_size"], one["embedding_dim"], one["stack"],
                                          one["optimizer"], tuple(one["slots"]), one["combiner"],
                                          _quantization(*one["quantization"]))
                       for one in self.description["tables"]}
        self.features = {one["name"]: Feature(one["name"], one["table"], one["embedding_dim"], tuple(one["output_shape"]))
                         for one in self.description["features"]}
        # Of gradients, without the first dimension.
        self._row_shapes = _records.RowShapes({name: (*one.output_shape[1:], one.embedding_dim) for name, one in self.features.items()})
        self._inner_shapes = {name: one.output_shape[1:] for name, one in self.features.items() if len(one.output_shape) > 1}
        self._dims = _records.Dims({name: one.embedding_dim for name, one in self.features.items()}, self._inner_shapes)

    @property
    def _goes_on(self) -> bool:
        """Whether it is no surprise that its tables have been trained."""
        return self._known or self.name in self.client._restored

    def _trained_by(self) -> Dict[str, int]:
        """Groups of which a coordinator or the newest checkpoint knows that they have trained the rows of now, and by how many steps. "": somebody has."""
        groups: Dict[str, int] = {}
        anew = updated = False
        try:
            groups, anew, updated = statistics.training(self.client._handle, self.name)
        except errors.Error:  # this is not ours to know
            pass
        try:
            groups.update({} if anew else self.client.checkpoints(self.name)[0].groups)
        except (errors.Error, IndexError):  # there is no checkpoint, or nowhere to keep one
            pass
        return groups or {"": int(updated)}

    def _reached_by(self, group: str) -> Optional[int]:
        """How many steps a group has made at least, as far as a coordinator knows; 0 where this client has made the tables and nobody has trained them. None: it is not
        known."""
        try:
            groups, _, updated = statistics.training(self.client._handle, self.name)
        except errors.Error:
            return None
        return groups.get(group, 0 if self.created and self._source is None and not (groups or updated) else None)

    def __reduce__(self) -> Tuple[Any, ...]:
        return _model_again, (self.client, self.name, self._source)

    def __repr__(self) -> str:
        return f"emberd.Model({self.name!r}, tables={list(self.tables)}, features={list(self.features)})"

    def _repr_html_(self) -> str:
        features = {name: ", ".join(one.name for one in self.features.values() if one.table == name) for name in self.tables}
        return _tables.in_html(f"emberd.Model {self.name}", ("table", "rows", "embedding_dim", "optimizer", "features"), [
            (one.name, _tables.count(one.vocabulary_size), one.embedding_dim, one.optimizer, features[one.name]) for one in self.tables.values()])

    def statistics(self, hot_rows: int = 0) -> ModelStatistics:
        """What has been done with the model, and what it holds. hot_rows: that are listed of each table, 0 to 100."""
        return statistics.of_model(self.client._handle, self.name, hot_rows)

    def hot_rows(self, table: str, count: int = 10) -> List[HotRow]:
        """The rows of a table that are looked up most, 1 to 100 of them, the hottest first. NotFound for an unknown table."""
        _native.text(table, "table")
        if table not in self.tables:
            raise errors.NotFound(f"table: model {self.name!r} has no table {table!r}; it has {', '.join(self.tables)}")
        stack = self.tables[table].stack  # a name that is none of its tables is another one of a shared table
        tables = next((one["tables"] for one in self.description["stacks"] if one["name"] == stack), [table])
        counted = table if table in tables else tables[0]
        return [dataclasses.replace(one, table=table) for one in statistics.of_model(
            self.client._handle, self.name, _native.whole(count, "count", 1, 100), counted).hot_rows]

    def limits(self) -> Dict[str, Limits]:
        """The limits of each table stack, by its name (`tables[table].stack`), and what batches have needed."""
        return statistics.limits(self.client._handle, self.name)

    def set_limits(self, stack: str, *, max_ids_per_partition: Optional[int] = None,
                   max_unique_ids_per_partition: Optional[int] = None, max_ids_per_chip_per_sample: Optional[int] = None,
                   max_minibatches_per_sparsecore: Optional[int] = None) -> None:
        """Changes limits of a stack, of the live model: batches from now on keep to them, by more mini-batches; results stay the same.

        max_ids_per_partition, max_unique_ids_per_partition: 0 to 2^31 - 1, where 0 is no limit; None: as it is.
        max_ids_per_chip_per_sample, max_minibatches_per_sparsecore: see `PlanConfig`; None: as it is.
        NotFound for an unknown stack.
        """
        statistics.set_limits(self.client._handle, self.name, stack, max_ids_per_partition=max_ids_per_partition,
                              max_unique_ids_per_partition=max_unique_ids_per_partition,
                              max_ids_per_chip_per_sample=max_ids_per_chip_per_sample,
                              max_minibatches_per_sparsecore=max_minibatches_per_sparsecore)

    def reset_limits(self) -> None:
        """All stacks get the limits of the model's description again."""
        statistics.administer(self.client._handle, "SetLimits", model=self.name, declared=True)

    def lookup(self, ids: Mapping[str, Ids], *, train: bool = False, partial: bool = False, deadline: Optional[float] = None) -> "Lookup":
        """Looks every feature up: a mapping from its name to float32 [samples, embedding_dim], or to the shape that its
        `output_shape` gives the samples; of Sequences [samples, positions], [samples, positions, embedding_dim].

        ids: for every feature an array [samples] or [samples, k] of ids, or as `FeatureConfig.output_shape` says; Dense, Ragged, Sparse
        or Sequences. What supports the buffer protocol or DLPack is read without a copy.
        train: the batch is kept on the server for `Lookup.apply`.
        partial: features may be missing, as those of users where items are looked up for serving. They are neither in the result, nor
        does an update change a row for them.
        deadline: seconds, all retries included; default: that of `connect`.
        InvalidArgument if a feature is missing, OutOfRange for an id beyond its table.
        """
        rows, count, kept, asked = _records.pack_batch(ids, self._dims, partial)
        call = _native.lib().lookup_begin(self.client._handle.get(), self._handle.get(), rows, count, 0 if train else 1,
                                          _native.milliseconds(deadline, "deadline", optional=True))
        return Lookup(self, Call(call, kept).take("lookup"), asked)

    def compile(self, /, kind: str = "lookup", features: Optional[Sequence[str]] = None, *, samples: Optional[int] = None, dynamic: bool = False,
                **fields: Any) -> Program:
        """A program of this model; compiling the same one again finds it. What does not fit it is refused when it is compiled, or a batch prepared.

        kind: "lookup", or "update", which applies gradients to the result of a lookup.
        features: of the batch, or with gradients; None: all. Others have no ids.
        samples: of each of the `features`, exactly, or with `dynamic` at most; None: FeatureConfig.batch_size, times the replicas.
        fields: others of ProgramSpec in program_service.proto, as inference=True, limits=[{"stack": "s", "max_ids_per_partition": 64}],
          allow_id_dropping=True, activation_dtype="BFLOAT16".
        InvalidArgument names the field that is wrong; ResourceExhausted if it allows more ids than its buffers hold.
        """
        names = list(self.features) if features is None else features
        return programs.compile_for(self.client, self.name, kind, names, samples, dynamic, fields)

    def train(self, group: str, rank: int = 0, size: int = 1, *, consistency: str = "sync", pipelined: bool = False,
              staleness_bound: int = 0, first_step: int = 0, step_timeout: float = 60.0) -> "TrainStream":
        """Joins a group of trainers, or begins one: see TrainStream. Waits until all ranks are there.

        consistency: "sync" (all ranks form one batch per step), "async", or "bounded" with `staleness_bound`.
        pipelined: of "sync": lookup k sees the updates of the steps before k - 1, so that updates overlap computing.
        first_step: the number of the first step of a group that is new, which optimizers that count steps see; a group that there is goes on from its own.
        step_timeout: seconds that a step waits for the other ranks.
        """
        from .train import open_stream
        return open_stream(self, group, rank, size, consistency, pipelined, staleness_bound, first_step, step_timeout)

    def read_rows(self, table: str, ids: Any, *, slot: str = "") -> Floats:
        """Rows in the order of `ids`, which may repeat: float32 [ids, embedding_dim], or [ids, 1]
        of a slot with one value per row.

        slot: of the optimizer (`tables[table].slots`); "": the weights.
        OutOfRange for an id beyond the table, NotFound for an unknown table, InvalidArgument for an
        unknown slot.
        """
        array = arrays.as_row_ids(ids)
        call = _native.lib().read_rows(self.client._handle.get(), self._handle.get(), _native.text(table, "table"),
                                       array.ctypes.data, array.size, _native.text(slot, "slot"))
        return _rows(Call(call, array))

    def assign_rows(self, table: str, ids: Any, values: Any, *, slot: str = "") -> None:
        """Overwrites rows: ids [n], none twice, and values [n, embedding_dim] in their order, or
        [n, 1] of a slot with one value per row. On all shards or on none.

        OutOfRange, NotFound and InvalidArgument as in `read_rows`; InvalidArgument also for an id
        that is given twice, another number of values, and one that is not finite.
        FailedPrecondition if the model serves a checkpoint. Many rows are given by `load_table`.
        """
        array = arrays.as_row_ids(ids)
        floats = arrays.as_given_rows(values, "values")
        if floats.ndim != 2 or len(floats) != len(array):
            raise ValueError(f"values: the shape {list(floats.shape)} is not allowed for ids of the shape {list(array.shape)}; it "
                             f"must be [{len(array)}, embedding_dim], or [{len(array)}, 1] of a slot with one value per row")
        call = _native.lib().assign_rows(self.client._handle.get(), self._handle.get(), _native.text(table, "table"),
                                         array.ctypes.data, array.size, floats.ctypes.data, floats.size, _native.text(slot, "slot"))
        Call(call, (array, floats))

    def load_table(self, table: str, weights: Any, slots: Optional[Mapping[str, Any]] = None, *, first_row: int = 0,
                   progress: Optional[ProgressCallback] = None) -> None:
        """Overwrites rows from `first_row` on, with slots, by arrays or tensors of any size, 8 MiB at a time: those of torch.nn.Embedding with Adagrad are
        load_table("t", embedding.weight, {"accumulator": optimizer.state[embedding.weight]["sum"]}). With Adam {"momentum": state["exp_avg"], "velocity": state["exp_avg_sq"]}
        go on as they would where the group begins at first_step=int(state["step"]), for bias_correction counts steps.

        weights: [rows, embedding_dim]. slots: by name, [rows, embedding_dim] each, or [rows, 1] of a slot with one value per row; default: they stay.
        progress: called after each part, with how far it is.
        Errors as in `assign_rows`; of wrong names and shapes before anything has changed. Others see rows of before and after meanwhile.
        """
        _loading.load(self, table, weights, {} if slots is None else slots, first_row, progress)

    def copy_from(self, source: "Model", *, strict: bool = True, progress: Optional[ProgressCallback] = None) -> List[str]:
        """Overwrites rows and slots by those of the tables of the same names of another model, which may be of another cluster: so tables are added to a
        trained model, dropped, or get more rows, by a new model of another name. Returns what was not taken.

        strict: InvalidArgument, and nothing has changed, if that is anything: tables that only one of both has, or with another embedding_dim, rows that
        only one has, and slots of another optimizer.
        progress: called after each part, with how far it is.
        Neither model should be trained meanwhile. Steps of groups are not copied: see `first_step` of `train`.
        """
        if not isinstance(source, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(source, "source", "an emberd.Model")
        left = _loading.copy(self, source, strict, progress)
        self._known = True
        return left

    def restore_tables(self, name: Optional[str] = None, tables: Optional[Sequence[str]] = None, *, of: Optional[str] = None, strict: bool = False,
                       progress: Optional[ProgressCallback] = None) -> List[str]:
        """Overwrites weights by those of the tables of the same names in a checkpoint, as far as they fit, and returns what was not taken, slots among it.

        Where `Client.restore` wants the same tables, here some may be missing, have more rows or fewer, or another embedding_dim. Weights alone come: slots, and
        steps of groups, stay as they are. To have the slots, too, restore the model on a cluster that does not have it, and `Client.change_model` the result.

        name: of the checkpoint; None: the newest. of: the model that it is of; None: this one.
        tables: names of those to take; None: all. NotFound for one that this model does not have.
        strict: InvalidArgument, and nothing has changed, if that is anything but slots, of all `tables`.
        progress: called now and then with how far it is.
        The checkpoint is checked and served as a model NAME.restore_tables, which needs memory for its weights, and dropped in the end. Others see rows of before and
        after meanwhile; after a failure call it again.
        """
        left = _changing.restore_tables(self, name, tables, of, strict, progress)
        self._known = True
        return left

    def save_checkpoint(self, name: Optional[str] = None, *, incremental: bool = False,
                        progress: Optional[ProgressCallback] = None) -> Checkpoint:
        """Saves rows, slots and groups of one moment while training goes on.

        name: letters, digits and _-.; None: the cluster chooses one. AlreadyExists if there is one of this name.
        incremental: save only what has changed since the newest checkpoint, if that is possible.
        progress: called now and then with how far it is.
        To save the state after a certain step, ask on the stream: `TrainStream.update(..., checkpoint=name)`.
        """
        return checkpoints.save(self.client._handle, self.name, name, incremental, progress)

    def export(self, table: str, *, slot: str = "", first_row: int = 0, row_count: Optional[int] = None,
               rows_at_a_time: Optional[int] = None) -> Iterator[Tuple[int, Floats]]:
        """A whole table, or some of its rows, run after run, in the order of ids: (first row,
        float32 [rows, embedding_dim]), or [rows, 1] of a slot with one value per row.

        OutOfRange for rows beyond the table, NotFound for an unknown table, InvalidArgument for an
        unknown slot.
        """
        names = _native.text(table, "table"), _native.text(slot, "slot")
        if table not in self.tables:
            raise errors.NotFound(f"table: model {self.name!r} has no table {table!r}; it has {', '.join(self.tables)}")
        info = self.tables[table]
        rows = info.vocabulary_size
        first = _native.whole(first_row, "first_row", low=-2**63)
        end = rows if row_count is None else first + _native.whole(row_count, "row_count", low=-2**63)
        if not 0 <= first <= end <= rows:
            raise errors.OutOfRange(f"first_row, row_count: {first_row} and {row_count} are not allowed; table {table!r} has "
                                    f"{rows} rows")
        run = max(1, (32 << 20) // (4 * info.embedding_dim)) if rows_at_a_time is None else _native.whole(
            rows_at_a_time, "rows_at_a_time", low=1)

        def runs() -> Iterator[Tuple[int, Floats]]:
            for begin in range(first, end, run):
                call = _native.lib().export_rows(self.client._handle.get(), self._handle.get(), names[0], begin,
                                                 min(run, end - begin), names[1])
                yield begin, _rows(Call(call))

        return runs()

    def table(self, name: str, *, slot: str = "") -> Floats:
        """A whole table as one array, float32 [vocabulary_size, embedding_dim], or
        [vocabulary_size, 1] of a slot with one value per row. Read large tables in parts: `export`,
        which has the errors too."""
        return np.concatenate([values for _, values in self.export(name, slot=slot)])


def _quantization(lower: float = 0, upper: float = 0, num_buckets: float = 0) -> Optional[QuantizationConfig]:
    return QuantizationConfig(lower, upper, int(num_buckets)) if num_buckets else None


def _rows(call: Call) -> Floats:
    rows = call.take("rows")
    library = _native.lib()
    shape = (library.rows_count(rows.get()), library.rows_dim(rows.get()))
    return _records.view(library.rows_values(rows.get()), shape, rows)


class Lookup(_native.Uncopied, Mapping[str, Floats]):
    """Activations by feature, float32 [samples, embedding_dim], or [samples / 16, 16, embedding_dim] of a feature with
    `output_shape` [64, 16], or of the shape of Sequences: arrays over the memory into which they were received."""

    def __init__(self, model: Model, handle: Handle, asked: _records.Asked) -> None:
        self.model = model
        self._handle = handle
        self._row_shapes = asked.rows(model._row_shapes)
        self._activations, self._concat = _records.unpack_activations(handle, asked.sent)
        for name in asked.sent[asked.wanted:]:
            del self._activations[name]
        for name, inner in model._inner_shapes.items():
            if name in self._activations and name not in asked.shapes:
                one = self._activations[name]
                self._activations[name] = one.reshape(len(one) // math.prod(inner), *inner, one.shape[1])
        for name, shape in asked.shapes.items():
            self._activations[name] = self._activations[name].reshape(shape)

    def __repr__(self) -> str:
        return f"emberd.Lookup({', '.join(f'{name}: {list(one.shape)}' for name, one in self._activations.items())})"

    def __getitem__(self, feature: str) -> Floats:
        return self._activations[feature]

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    @property
    def step(self) -> int:
        """On a training stream: its step. Otherwise -1."""
        return int(_native.lib().lookup_step(self._handle.get()))

    @property
    def concat(self) -> Floats:
        """All features side by side, [samples, sum of embedding_dim]: a copy, unless the lookup asked for it."""
        if self._concat is not None:
            return self._concat
        return np.concatenate([one.reshape(-1, one.shape[-1]) for one in self._activations.values()], axis=1)

    @property
    def statistics(self) -> Dict[str, Any]:
        """What the batch needed: see statistics.proto; on a training stream also where the time went."""
        result: Dict[str, Any] = json.loads(_native.lib().lookup_statistics_json(self._handle.get()))
        return result

    def apply(self, gradients: Mapping[str, npt.ArrayLike], *, step: Optional[int] = None, hyper: Optional[Hyper] = None,
              deadline: Optional[float] = None) -> Applied:
        """One update of every row that the batch touched. A feature that is missing has a zero gradient.

        gradients: by feature, of the shape of its activations; float32 is read where it lies.
        step: the number of the step, from 0, for optimizers that count.
        hyper: for this step only, {"learning_rate": 0.1}, or by table {"users": {"learning_rate": 0.1}}; those of a stack
          (`Model.tables`) share their optimizer, and need the same values. PlanConfig(auto_stack=False) leaves tables unstacked.
        deadline: as in Model.lookup.
        NotFound if the batch has been applied or released before, or has expired.
        """
        rows, _, count, kept = _records.pack_gradients(gradients, self._row_shapes)
        hypers, hyper_count, kept_too = _records.pack_hyper(hyper, self.model.tables)
        call = _native.lib().apply(self.model.client._handle.get(), self.model._handle.get(), self._handle.get(), rows,
                                   count, hypers, hyper_count, -1 if step is None else _native.whole(step, "step"),
                                   _native.milliseconds(deadline, "deadline", optional=True))
        update = Call(call, (kept, kept_too)).update()
        return Applied(update.step, update.rows_updated, update.rows_skipped, bool(update.replayed))

    def release(self) -> None:
        """Releases a batch of `lookup(train=True)` to which no gradients will be applied."""
        Call(_native.lib().release(self.model.client._handle.get(), self.model._handle.get(), self._handle.get()))
