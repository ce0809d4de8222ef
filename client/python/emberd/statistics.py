"""What a cluster does and holds: what `Model.statistics`, `Model.hot_rows`, `Model.limits` and `Client.memory` give.

Counts grow from the start of the servers on: rates are differences of two of them, as `emberd.watch` shows them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Dict, List, Optional, Tuple

from . import _native, _tables, errors
from ._native import Call, Handle


@dataclass(frozen=True)
class HotRow:
    """One of the rows of a table that are looked up most, estimated from a sample of the lookups."""

    table: str
    id: int
    lookups: int  # since its shard was started
    error: int  # by which this may be too high, besides the sampling
    share: float  # of all lookups of the table, 0 to 1


@dataclass(frozen=True)
class ModelStatistics:
    """What the coordinator that answered has done with a model since it was started, and what all shards hold of it."""

    model: str
    time: datetime  # UTC
    examples: int  # looked up: of each batch, the samples of the feature that has most
    batches: int
    ids: int  # one that a sample has twice counts once
    unique_ids: int  # of each batch and table stack
    dropped_ids: int  # lost because they were over a limit: 0 unless the model's plan allows it
    updates: int  # of training groups
    failures: int  # streams of training that ended with an error
    wait_seconds: float  # that the ranks of groups spent waiting for each other, in all
    table_bytes: int  # of rows and slots, on all shards
    serves: str  # the checkpoint that it serves, "MODEL/NAME"; "": none
    lost: str  # why every call on it fails, where a shard has lost its rows; "": none has
    hot_rows: Tuple[HotRow, ...] = ()  # by table, the hottest first

    def _repr_html_(self) -> str:
        rows = [("examples", _tables.count(self.examples)), ("ids", _tables.count(self.ids)), ("dropped ids", _tables.count(self.dropped_ids)),
                ("updates", _tables.count(self.updates)), ("memory of tables", _tables.size(self.table_bytes))]
        rows += [("serves", self.serves)] * bool(self.serves) + [("lost", self.lost)] * bool(self.lost)
        rows += [(f"hot row of {one.table}", f"{one.id}: {_tables.share(one.share)}") for one in self.hot_rows]
        return _tables.in_html(f"emberd model {self.model}", (), rows)


@dataclass(frozen=True)
class ShardMemory:
    """The memory of a shard, in bytes."""

    shard: int
    address: str
    error: str  # why it does not answer, and all numbers are 0; "": it does
    table_bytes: int  # of rows and slots of all models
    table_budget_bytes: int  # what they may have at most
    resident_bytes: int  # of the process, with whatever else it serves; shards of one process have its address "in-process"
    memory_bytes: int  # of the machine or the cgroup, divided by the shards there


@dataclass(frozen=True)
class Limits:
    """Of a table stack, for each partition and mini-batch, or for the batch as `PlanConfig` has it; 0: there is no limit. And the largest
    need that this coordinator has seen since it was started, as a limit would have to allow it."""

    stack: str
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    largest_ids_per_partition: int
    largest_unique_ids_per_partition: int
    max_ids_per_chip_per_sample: int
    max_minibatches_per_sparsecore: int
    largest_ids_per_chip_per_sample: int
    largest_minibatches: int


@dataclass(frozen=True)
class CallStatistics:
    """How long calls of one kind took, in seconds: the newest 1024 that succeeded. percentiles: 25, 50, 80, 90, 95 and 99."""

    total: int  # since the coordinator was started
    count: int  # those that count here
    min: float
    max: float
    mean: float
    standard_deviation: float
    percentiles: Dict[float, float]


@dataclass(frozen=True)
class MemoryChange:
    """What a shard did with its models, and what that leaves, in bytes of each of its SparseCores."""

    shard: int
    changed: bool  # pin and unpin: it was not so already
    returned: bool  # pin: the model had been evicted
    evicted: Tuple[str, ...]  # models that left, first the one that was not used for the longest time
    evicted_bytes: int
    moved_tables: int  # that have another address now
    free_bytes: int
    pinned_bytes: int


def administer(client: Handle, method: str, **request: Any) -> Dict[str, Any]:
    """A call of AdminService. 64-bit integers come as texts."""
    library = _native.lib()
    answer = Call(library.call_program(client.get(), method.encode(), json.dumps(request).encode(), None, 0, None)).take("answer")
    said: Dict[str, Any] = json.loads(library.answer_json(answer.get()))
    return said


def of_model(client: Handle, model: str, hot_rows: int, table: Optional[str] = None) -> ModelStatistics:
    _native.whole(hot_rows, "hot_rows", 0, 100)
    status = next((one for one in administer(client, "GetStatus")["models"] if one["name"] == model), None)
    if status is None:
        raise errors.NotFound(f"name: there is no model {model!r}")
    said = administer(client, "GetStats", hot_rows=hot_rows)

    def of(kind: str) -> List[Dict[str, Any]]:
        return [one for one in said[kind] if one["model"] == model]

    stacks, groups = of("stacks"), of("groups")

    def total(parts: List[Dict[str, Any]], field: str) -> int:
        return sum(int(one[field]) for one in parts)

    return ModelStatistics(
        model, datetime.fromtimestamp(int(said["time_ms"]) / 1000, timezone.utc), total(of("models"), "examples"),
        max((int(one["batches"]) for one in stacks), default=0), total(stacks, "ids"), total(stacks, "unique_ids"), total(stacks, "dropped_ids"),
        total(groups, "updates"), total(groups, "failures"), sum(float(one["wait_seconds"]) for one in groups), int(status["table_bytes"]),
        status["serves"], status["lost"], tuple(_hot_rows(said["shards"], model, hot_rows, table)))


def training(client: Handle, model: str) -> Tuple[Dict[str, int], bool, bool]:
    """What a coordinator knows, since it was started, of the training of the rows that a model has now: the steps of each group; whether models have been
    dropped or reset, and none restored, so that the newest checkpoint may be of earlier rows; and whether anybody has updated rows, as before the cluster
    was started again with its log."""
    said = administer(client, "GetStats")
    calls = {one["method"].partition("/")[2]: int(one["codes"].get("OK", 0)) for one in said["methods"]}
    # Batches are counted anew with the rows; updates of groups are not, so that those of more steps were made before.
    batches = max((int(one["batches"]) for one in said["stacks"] if one["model"] == model), default=0)
    steps = {one["group"]: int(one["updates"]) // max(1, len(one["dropped_ids"])) for one in said["groups"] if one["model"] == model}
    anew = bool(calls.get("DropModel") or calls.get("ResetModel"))
    alone = {one["model"] for one in said["stacks"]} == {model}  # shards count the rows of all models
    return ({group: number for group, number in steps.items() if 0 < number <= batches}, anew and not calls.get("RestoreCheckpoint"),
            alone and not anew and any(int(one["rows_updated"]) for one in said["shards"]))


def _hot_rows(shards: List[Dict[str, Any]], model: str, most: int, only: Optional[str]) -> List[HotRow]:
    """Each row is on one shard; all of them have looked some up."""
    lookups: Dict[str, int] = {}
    found: Dict[str, List[Dict[str, Any]]] = {}
    for shard in shards:
        mine: Dict[str, int] = {}
        for one in shard["hot_rows"]:
            if one["model"] == model and only in (None, one["table"]):
                found.setdefault(one["table"], []).append(one)
                mine[one["table"]] = int(one["table_lookups"])
        for table, number in mine.items():
            lookups[table] = lookups.get(table, 0) + number
    result: List[HotRow] = []
    for table in sorted(found):
        hottest = sorted(found[table], key=lambda one: (-int(one["lookups"]), int(one["id"])))[:most]
        result += [HotRow(table, int(one["id"]), int(one["lookups"]), int(one["error"]), min(1.0, int(one["lookups"]) / max(1, lookups[table])))
                   for one in hottest]
    return result


def memory(client: Handle) -> List[ShardMemory]:
    return [ShardMemory(one["index"], one["address"], "" if one["reachable"] else one["error"] or "it does not answer",
                        *(int(one[name]) for name in ("table_bytes", "table_budget_bytes", "resident_bytes", "memory_bytes")))
            for one in administer(client, "GetStatus")["shards"]]


def limits(client: Handle, model: str) -> Dict[str, Limits]:
    def largest(sketch: Optional[Dict[str, Any]]) -> int:
        return int(sketch["max"]) if sketch else 0

    return {one["stack"]: Limits(one["stack"], one["max_ids_per_partition"], one["max_unique_ids_per_partition"], largest(one.get("ids")),
                                 largest(one.get("unique_ids")), one["max_ids_per_chip_per_sample"], one["max_minibatches_per_sparsecore"],
                                 largest(one.get("ids_per_sample")), largest(one.get("minibatches")))
            for one in administer(client, "GetLimits", model=model)["stacks"]}


def set_limits(client: Handle, model: str, stack: str, **wanted: Optional[int]) -> None:
    now = limits(client, model)
    _native.text(stack, "stack")
    if stack not in now:
        raise errors.NotFound(f"stack: model {model!r} has no stack {stack!r}; it has {', '.join(now)}")
    most = {"max_ids_per_chip_per_sample": 65536, "max_minibatches_per_sparsecore": 64}
    administer(client, "SetLimits", model=model, limits=[{"stack": stack, **{
        name: getattr(now[stack], name) if value is None else _native.whole(value, name, 0, most.get(name, 2**31 - 1))
        for name, value in wanted.items()}}])


def calls(client: Handle, names: str) -> Dict[str, CallStatistics]:
    _native.text(names, "names")
    return {one["name"]: CallStatistics(
        int(one["total"]), int(one["count"]), one["min"], one["max"], one["mean"], one["standard_deviation"],
        {each["percent"]: each["value"] for each in one["percentiles"]}) for one in administer(client, "GetMetrics", regex=names)["metrics"]}


def change_memory(client: Handle, operation: str, model: str) -> List[MemoryChange]:
    _native.choice(operation, "operation", {"pin": 1, "unpin": 2, "compact": 3, "release": 4})
    _native.text(model, "model")
    return [MemoryChange(one["shard"], one["changed"], one["returned"], tuple(one["evicted"]), int(one["evicted_bytes"]), one["moved_tables"],
                         int(one["memory"]["free_bytes"]), int(one["memory"]["pinned_bytes"]))
            for one in administer(client, "ChangeMemory", operation=operation.upper(), model=model)["shards"]]
