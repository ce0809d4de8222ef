"""Checkpoints of Orbax of a model with an embedding layer, which jax-tpu-embedding reads, and which may come from there.

They hold the rows and slots of the tables, whose stacks lie as the specifications say; restoring writes them to the cluster, whatever the
topology was. All go through this process: for tables beyond its memory there are checkpoints of the cluster, `model_of(variables)`.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple, Union

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from emberd.client import Model
from emberd.compat.jax_tpu_embedding._tables import model_of
from ...nn import embedding, table_stacking
from ...proto import embedding_spec_pb2
from . import embed

PathLike = Union[str, "os.PathLike[str]"]


def decompress_checkpoint(checkpoint_path: str) -> str:
    """Unpacks a .tgz into the folder that TEST_UNDECLARED_OUTPUTS_DIR names, and gives the path of what was in it."""
    outputs = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
    if not outputs:
        raise ValueError("the environment variable TEST_UNDECLARED_OUTPUTS_DIR must name a folder for the contents of the archive")
    folder = os.path.join(outputs, "decompressed_checkpoints", os.path.basename(checkpoint_path)[:-len(".tgz")])
    os.makedirs(folder, exist_ok=True)
    shutil.unpack_archive(checkpoint_path, folder)
    return folder


def create_checkpoint_manager(*, cp_path: PathLike, cp_options: Any, model_key: str = "model", optimizer_key: str = "optimizer",
                              embedding_spec_key: str = "embedding_spec") -> Any:
    registry, arrays, protos = ocp.DefaultCheckpointHandlerRegistry(), ocp.StandardCheckpointHandler(), ocp.ProtoCheckpointHandler()
    for key, handler, kinds in ((model_key, arrays, (ocp.args.StandardSave, ocp.args.StandardRestore)),
                                (optimizer_key, arrays, (ocp.args.StandardSave, ocp.args.StandardRestore)),
                                (embedding_spec_key, protos, (ocp.args.ProtoSave, ocp.args.ProtoRestore))):
        for kind in kinds:
            registry.add(key, kind, handler)
    return ocp.CheckpointManager(os.path.abspath(cp_path), options=cp_options, handler_registry=registry)


def save_checkpoint(*, cp_manager: Any, step: int, model: nnx.Module, optimizer: Any, feature_specs: Any, num_global_devices: int,
                    num_sc_per_device: int, model_key: str = "model", optimizer_key: str = "optimizer",
                    embedding_spec_key: str = "embedding_spec") -> None:
    """Saves where the manager's options say that step is to be saved."""
    if not cp_manager.should_save(step):
        return
    spec = embedding.create_proto_from_feature_specs(feature_specs, num_global_devices, num_sc_per_device)
    state = nnx.map_state(lambda _, one: one.replace(_stacks(one.get_value(), spec)) if _is_of_tables(one) else one, nnx.state(model))
    cp_manager.save(step, args=ocp.args.Composite(**{
        model_key: ocp.args.StandardSave(state), optimizer_key: ocp.args.StandardSave(nnx.state(optimizer, nnx.OptState)),
        embedding_spec_key: ocp.args.ProtoSave(spec)}))


def restore_checkpoint(*, cp_manager: Any = None, input_checkpoint_path: Optional[PathLike] = None, step: Optional[int] = None,
                       model: nnx.Module, optimizer: Any, model_key: str = "model", optimizer_key: str = "optimizer",
                       embedding_spec_key: str = "embedding_spec") -> None:
    """Of a manager or a folder; of neither: does nothing. step: default: the newest. Optimizers that count the steps of the group of
    trainers, LaProp and F2A, begin to count anew."""
    if cp_manager is None and input_checkpoint_path is None:
        return
    manager = cp_manager or create_checkpoint_manager(
        cp_path=input_checkpoint_path, cp_options=ocp.CheckpointManagerOptions(read_only=True),  # type: ignore[arg-type]
        model_key=model_key, optimizer_key=optimizer_key, embedding_spec_key=embedding_spec_key)
    steps = manager.all_steps()
    if not steps or step not in (None, *steps):
        raise ValueError(f"step: {step} is not in {manager.directory}; there are {sorted(steps) or 'none'}")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    restored = manager.restore(max(steps) if step is None else step, args=ocp.args.Composite(**{
        model_key: ocp.args.StandardRestore(fallback_sharding=here), optimizer_key: ocp.args.StandardRestore(fallback_sharding=here),
        embedding_spec_key: ocp.args.ProtoRestore(embedding_spec_pb2.EmbeddingSpecProto)}))

    tables = []

    def found(path: Tuple[Any, ...], one: Any, held: Any) -> Any:
        for part in path:
            held = held[part if isinstance(held, (list, tuple)) else str(part)]
        held = held["value"] if isinstance(held, Mapping) and set(held) == {"value"} else held
        if _is_of_tables(one):
            tables.append((model_of(one.get_value()), held))
            return one
        if np.shape(held) != one.get_value().shape:
            raise ValueError(f"{'/'.join(map(str, path))}: the checkpoint has the shape {list(np.shape(held))}; the model {list(one.get_value().shape)}")
        return one.replace(jax.device_put(held, one.get_value().sharding))

    states = [nnx.map_state(lambda path, one, held=restored[key]: found(path, one, held), state)
              for key, state in ((model_key, nnx.state(model)), (optimizer_key, nnx.state(optimizer, nnx.OptState)))]
    for on_cluster, held in tables:
        _assign(on_cluster, held, restored[embedding_spec_key])
    nnx.update(model, states[0])
    nnx.update(optimizer, states[1])
    if cp_manager is None:
        manager.close()


def restore_cross_topology_checkpoint(*, cross_topology_checkpoint_restore_path: Optional[PathLike], model: nnx.Module, optimizer: Any,
                                      target_feature_specs: Any = None, num_global_devices: int = 0, num_sc_per_device: int = 0,
                                      model_key: str = "model", optimizer_key: str = "optimizer",
                                      embedding_spec_key: str = "embedding_spec", embedding_layer_name: Optional[str] = None,
                                      restore_step: Optional[int] = None) -> None:
    """The same as restore_checkpoint: the rows are on the cluster, whatever the topology is."""
    restore_checkpoint(input_checkpoint_path=cross_topology_checkpoint_restore_path, step=restore_step, model=model, optimizer=optimizer,
                       model_key=model_key, optimizer_key=optimizer_key, embedding_spec_key=embedding_spec_key)


def _is_of_tables(variable: Any) -> bool:
    return embed.is_embedding_variables(None, variable)


def _places(spec: Any) -> Iterator[Tuple[Any, Any, Any]]:
    """The stack and the description of each table, and where its rows lie in the stack: by SparseCore, then by table."""
    for stack in spec.stacked_table_specs:
        for table in stack.table_specs:
            yield stack, table, table_stacking.rows_in_stack(stack, table)


def _stacks(variables: Any, spec: Any) -> Dict[str, Any]:
    """The tables as they lie on SparseCores, filled up with zeros."""
    model = model_of(variables)
    result: Dict[str, Any] = {}
    for stack, table, rows in _places(spec):
        names = ("", *model.tables[table.table_name].slots)
        held = result.setdefault(stack.stack_name, {name: np.zeros((stack.stack_vocab_size, stack.stack_embedding_dim), np.float32)
                                                    for name in names})
        for name in names:
            held[name][rows, :table.embedding_dim] = model.table(table.table_name, slot=name)
    return {name: {"table": held.pop(""), "slot": held} for name, held in result.items()}


def _assign(model: Model, stacks: Mapping[str, Any], spec: Any) -> None:
    """Writes what a checkpoint holds to the cluster. All is checked before anything is written."""
    writes = []
    for stack, table, rows in _places(spec):
        info = model.tables.get(table.table_name)
        if info is None or (info.vocabulary_size, info.embedding_dim) != (table.vocab_size, table.embedding_dim):
            raise ValueError(f"the checkpoint has table {table.table_name!r} of {table.vocab_size} x {table.embedding_dim}; the model "
                             f"{'has none of this name' if info is None else f'{info.vocabulary_size} x {info.embedding_dim}'}")
        slots = stacks[stack.stack_name]["slot"] or {}
        if set(slots) != set(info.slots):
            raise ValueError(f"table {table.table_name!r}: the checkpoint has the slots {', '.join(slots) or 'none'}; the optimizer {info.optimizer} "
                             f"has {', '.join(info.slots) or 'none'}")
        for slot, values in (("", stacks[stack.stack_name]["table"]), *slots.items()):
            writes.append((table.table_name, np.asarray(values)[rows, :table.embedding_dim], slot))
    missing = set(model.tables) - {name for name, _, _ in writes}
    if missing:
        raise ValueError(f"the checkpoint has no table {sorted(missing)[0]!r}")
    if jax.process_index() == 0:
        for name, values, slot in writes:
            wide = values.shape[1] == model.read_rows(name, [0], slot=slot).shape[1]
            model.assign_rows(name, np.arange(len(values)), values if wide else values[:, :1], slot=slot)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("emberd_restored")
