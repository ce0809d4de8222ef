"""A cluster of emberd on an existing cluster of Ray: shards and coordinators on its nodes, watched and replaced.

    with emberd.ray.Cluster(shards=4, cpus_per_shard=2, memory_per_shard=16 << 30, data="/shared/emberd") as cluster:
        trainer = ray.train.torch.TorchTrainer(train, train_loop_config={"cluster": cluster}, ...)
        trainer.fit()

    def train(options):                                # on a worker
        with options["cluster"].connect() as client:
            ...

Each process has a bundle of a placement group, spread over the nodes. If a node dies, its processes start on another one.
Rows that a shard held come back from the newest checkpoint, which `data` is for: a folder that all nodes reach under this
path. Trainers of emberd.torch and emberd.jax then raise emberd.RowsLost or emberd.Aborted, and
begin again from their own checkpoint of the same step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from . import _native
from .client import Client
from .client import connect as _connect

__all__ = ["Cluster", "connect"]

_LOOK_SECONDS = 0.5  # between two looks at all processes
_SHARE_OF_ROWS = 0.75  # of a shard's memory
_RUNS, _ENDED, _GONE = range(3)  # a process; ended: its actor lives, and starts it again where it was
_READY = re.compile(r"\bgrpc=(\S+)")
# Before a command: it is killed when this process ends (PR_SET_PDEATHSIG), and has the signals that Python ignores. No preexec_fn: beside
# threads it may wait for ever. No setpriv: an image may be without it.
_WITH_PARENT = [sys.executable, "-ISc", "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, 9); "
                "[signal.signal(one, signal.SIG_DFL) for one in (signal.SIGPIPE, signal.SIGXFSZ)]; os.execv(sys.argv[1], sys.argv[1:])"]


class _Process:
    """An actor with one process of emberd, which ends with it."""

    def __init__(self) -> None:
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._folder = tempfile.TemporaryDirectory(prefix="emberd-ray-", dir=os.environ.get("RAY_TMPDIR"))

    def start(self, role: str, index: int, description: Dict[str, Any], address: str, listen: str, insecure: bool,
              timeout: float) -> Tuple[str, str, int]:
        """Where it serves, its node, and its pid. address: "" for a free port of `listen`, or of this node."""
        self.stop()
        folder, host = self._folder.name, listen or ray.util.get_node_ip_address()
        config, ready, log = (os.path.join(folder, name) for name in ("cluster.json", "ready", "log"))
        with open(config, "w", encoding="utf-8") as file:
            json.dump(description, file)
        if os.path.exists(ready):
            os.remove(ready)
        arguments = [str(_native.program_path()), role, "--config", config, "--index", str(index), "--http-address", "",
                     "--address", address or f"{host}:0", "--ready-file", ready]
        with open(log, "ab") as file:
            self._child = subprocess.Popen(_WITH_PARENT + arguments + ["--insecure"] * insecure, stdin=subprocess.DEVNULL,
                                           stdout=subprocess.DEVNULL, stderr=file)
        end = time.monotonic() + timeout
        while True:
            if os.path.exists(ready):
                with open(ready, encoding="utf-8") as file:
                    serves = _READY.search(file.read())
                if serves:
                    return serves[1], ray.get_runtime_context().get_node_id(), self._child.pid
            if self._child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{role} {index} did not become ready on {host}:\n{self.log()}")
            time.sleep(0.02)

    def runs(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def log(self) -> str:
        try:
            with open(os.path.join(self._folder.name, "log"), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def end(self) -> None:
        self.stop()
        self._folder.cleanup()


class _Member:
    """A process of the cluster, as its supervisor sees it."""

    def __init__(self, role: str, index: int, bundle: int, cpus: float, memory: int) -> None:
        self.role, self.index, self.bundle, self.cpus, self.memory = role, index, bundle, cpus, memory
        self.actor: Any = None
        self.address = self.node = ""
        self.pid = 0

    def describe(self) -> Dict[str, Any]:
        return {"address": self.address, "node": self.node, "pid": self.pid}


class _Supervisor:
    """An actor that places the processes, watches them and replaces those that die."""

    def __init__(self, settings: Dict[str, Any]) -> None:
        self._settings = settings
        self._shards = [_Member("shard", i, i, settings["cpus_per_shard"], settings["memory_per_shard"])
                        for i in range(settings["shards"])]
        self._coordinators = [_Member("coordinator", i, len(self._shards) + i, settings["cpus_per_coordinator"], 0)
                              for i in range(settings["coordinators"])]
        self._lock = threading.Lock()  # of what follows, and of starting
        self._restarts = 0
        self._error = ""
        self._stopping = threading.Event()
        self._group: Any = None

    def start(self) -> None:
        bundles = [{"CPU": one.cpus, **({"memory": one.memory} if one.memory else {})}
                   for one in self._shards + self._coordinators]
        timeout = self._settings["timeout"]
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(timeout):
            remove_placement_group(self._group)
            raise RuntimeError(f"Ray has no room for {len(bundles)} processes within {timeout} s: {bundles} are needed, and "
                               f"{ray.available_resources()} are free")
        with self._lock:
            self._start_all(self._shards + self._coordinators)
        threading.Thread(target=self._watch, daemon=True).start()

    def addresses(self) -> List[str]:
        with self._lock:  # not while they change
            return [one.address for one in self._coordinators]

    def status(self) -> Dict[str, Any]:
        """As Cluster.status."""
        with self._lock:
            return {"shards": [one.describe() for one in self._shards],
                    "coordinators": [one.describe() for one in self._coordinators], "restarts": self._restarts,
                    "error": self._error}

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            members = [one for one in self._coordinators + self._shards if one.actor is not None]
            if members:
                ray.wait([one.actor.end.remote() for one in members], num_returns=len(members), timeout=10)
            for one in members:
                self._give_up(one)
            if self._group is not None:
                remove_placement_group(self._group)

    def _description(self) -> Dict[str, Any]:
        """With the addresses that are known: shards need those of nobody, coordinators those of all shards."""
        return {**self._settings["description"],
                "shards": [{"address": one.address or "127.0.0.1:0"} for one in self._shards],
                "coordinators": [{"address": "127.0.0.1:0"} for _ in self._coordinators]}

    def _start_all(self, members: List[_Member]) -> None:
        """Shards first."""
        for role in ("shard", "coordinator"):
            starting = []
            for one in members:
                if one.role != role:
                    continue
                if one.actor is None:
                    strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=one.bundle)
                    resources: Dict[str, Any] = {"memory": one.memory} if one.memory else {}
                    one.actor = ray.remote(_Process).options(num_cpus=one.cpus, scheduling_strategy=strategy,
                                                             **resources).remote()
                    one.address = ""
                description = self._description()
                starting.append(one.actor.start.remote(role, one.index, description, one.address, self._settings["listen"],
                                                       self._settings["insecure"], self._settings["timeout"]))
            found = ray.get(starting, timeout=2 * self._settings["timeout"])
            for one, (address, node, pid) in zip([one for one in members if one.role == role], found):
                one.address, one.node, one.pid = address, node, pid

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            states = [(one, self._state(one)) for one in self._shards + self._coordinators]
            dead = [one for one, state in states if state != _RUNS]
            if not dead:
                continue
            with self._lock:
                if self._stopping.is_set():
                    return
                for one, state in states:
                    if state == _GONE:
                        self._give_up(one)
                # Coordinators hold no state: they begin again wherever a shard has a new address.
                moved = any(one.role == "shard" and one.actor is None for one in dead)
                try:
                    self._start_all([one for one in self._shards + self._coordinators
                                     if one in dead or (moved and one.role == "coordinator")])
                    self._restarts += len(dead)
                    self._error = ""
                except Exception as error:  # no node has room yet, for instance: tried again
                    self._error = str(error)
                    for one in dead:
                        self._give_up(one)

    def _give_up(self, member: _Member) -> None:
        if member.actor is not None:
            ray.kill(member.actor)
            member.actor = None

    def _state(self, member: _Member) -> int:
        if member.actor is None:
            return _GONE
        try:
            return _RUNS if ray.get(member.actor.runs.remote(), timeout=20) else _ENDED
        except ray.exceptions.RayError:
            return _GONE


def _actor_name(name: str) -> str:
    return f"emberd:{name}"


class Cluster:
    """Starts on the cluster of Ray that this process is connected to, and ends with `close`, or with this process. It can be
    pickled: a worker of Ray gets a handle, whose `close` does nothing.

    shards, sparsecores: their product is a power of two.
    cpus_per_shard: also the threads of a shard. memory_per_shard: bytes, three quarters of them for rows; None: Ray reserves
      none, and emberd takes the share of the machine that it does by itself.
    data: a folder that all nodes reach under this path, for checkpoints; rows of a node that dies come back from the newest.
      checkpoint_seconds, checkpoint_steps: how often one is saved without asking.
    description: other fields of ClusterConfig in cluster.proto, e.g. {"security": {...}}.
    listen: the host on whose ports processes listen; "": that of their node. "127.0.0.1" where all nodes are one machine.
    insecure: allows addresses beyond the loopback interface without TLS and tokens: whoever reaches them can do anything.
    """

    def __init__(self, shards: int = 2, *, cpus_per_shard: float = 1, memory_per_shard: Optional[int] = None,
                 coordinators: int = 1, cpus_per_coordinator: float = 1, sparsecores: int = 2,
                 data: Union[str, "os.PathLike[str]", None] = None, checkpoint_seconds: int = 600, checkpoint_steps: int = 0,
                 description: Optional[Mapping[str, Any]] = None, listen: str = "", insecure: bool = False,
                 name: str = "emberd", timeout: float = 60.0) -> None:
        if shards < 1 or coordinators < 1:
            raise ValueError(f"shards, coordinators: {shards} and {coordinators} are not allowed; each must be at least 1")
        described: Dict[str, Any] = {"sparsecores_per_shard": sparsecores, "shard_threads": max(1, int(cpus_per_shard)),
                                     "coordinator_threads": max(1, int(cpus_per_coordinator))}
        if memory_per_shard is not None:
            described["budgets"] = {"bytes_per_sparsecore": int(memory_per_shard * _SHARE_OF_ROWS) // sparsecores}
        if data is not None:
            described["storage"] = {"directory": os.path.abspath(data), "durability": "CHECKPOINT",
                                    "every_seconds": checkpoint_seconds, "every_steps": checkpoint_steps}
        described.update(description or {})
        self.name = name
        # Beside this process: it must not end with another node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._supervisor: Any = ray.remote(_Supervisor).options(
            name=_actor_name(name), num_cpus=0, max_concurrency=8, scheduling_strategy=here).remote(dict(
                shards=shards, cpus_per_shard=cpus_per_shard, memory_per_shard=memory_per_shard or 0,
                coordinators=coordinators, cpus_per_coordinator=cpus_per_coordinator, description=described,
                listen=listen, insecure=insecure, timeout=timeout))
        self._owner = True
        try:
            ray.get(self._supervisor.start.remote())
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> List[str]:
        """Of the coordinators, now."""
        found: List[str] = ray.get(self._supervisor.addresses.remote())
        return found

    def connect(self, **options: Any) -> Client:
        """A client: `emberd.connect` with the addresses of now. Connect again after a coordinator's node has died."""
        return _connect(self.addresses, **options)

    def status(self) -> Dict[str, Any]:
        """shards and coordinators with address, node and pid; restarts: of processes that had died; error: why the last try
        to replace one has failed."""
        found: Dict[str, Any] = ray.get(self._supervisor.status.remote())
        return found

    def close(self) -> None:
        if self._owner:
            self._owner = False
            try:
                ray.get(self._supervisor.stop.remote())
            finally:
                ray.kill(self._supervisor)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Tuple[Any, ...]:
        return _attach, (self.name,)


def _attach(name: str) -> Cluster:
    cluster = Cluster.__new__(Cluster)
    cluster.name, cluster._owner = name, False
    cluster._supervisor = ray.get_actor(_actor_name(name))
    return cluster


def connect(name: str = "emberd", **options: Any) -> Client:
    """A client of the Cluster of this name, from any process of the same cluster of Ray."""
    return _attach(name).connect(**options)
