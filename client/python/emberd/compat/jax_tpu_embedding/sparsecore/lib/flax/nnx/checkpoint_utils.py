"""Checkpoints of Orbax of a model with an embedding layer, which jax-tpu-embedding reads, and which may come from there.

They hold the rows and slots of the tables, whose stacks lie as the specifications say; restoring writes them to the cluster, whatever the
topology was. All go through this process: for tables beyond its memory there are checkpoints of the cluster, `model_of(variables)`.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple, Union

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from emberd._loading import assign_in_parts
from emberd.client import Model
from emberd.compat.jax_tpu_embedding._tables import model_of
from ...nn import embedding
from ...proto import embedding_spec_pb2
from . import _layouts, embed

PathLike = Union[str, "os.PathLike[str]"]


class TargetTopology(NamedTuple):
    """How many devices there are, and SparseCores of each. device_kind is for people to read."""

    num_global_devices: int
    num_sc_per_device: int
    device_kind: Optional[str] = None


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
    manager = cp_manager or _manager_of(input_checkpoint_path, model_key, optimizer_key, embedding_spec_key)
    restored = _read(manager, _step_of(manager, step), model_key, optimizer_key, embedding_spec_key)

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


def convert_cross_topology_checkpoint(*, input_checkpoint_path: Optional[PathLike], output_checkpoint_path: Optional[PathLike],
                                      target_topology: Optional[TargetTopology] = None, target_batch_size: Optional[int] = None,
                                      model_key: str = "model", optimizer_key: str = "optimizer",
                                      embedding_spec_key: str = "embedding_spec", restore_step: Optional[int] = None,
                                      save_step: Optional[int] = None, target_feature_specs: Any = None) -> None:
    """Writes a copy of a checkpoint whose stacks lie as another number of SparseCores has them. Needs no cluster; if a path is None: does nothing.

    target_topology: default: each table is a stack of its own, without padding, and the description says so.
    target_batch_size: of each feature, which stacking asks for; default: as in the description.
    restore_step: default: the newest. save_step: the same by default; it must not be there yet.
    target_feature_specs: prepared for the topology; default: by the description: tables are stacked as auto_stack_tables does, or, where their
      optimizers are not described, as they are; ValueError if activations of these stacks are above the limit then.
    """
    if input_checkpoint_path is None or output_checkpoint_path is None:
        return
    if target_topology is None and (target_batch_size, target_feature_specs) != (None, None):
        raise ValueError("target_topology: must be given with target_batch_size and target_feature_specs")
    keys = model_key, optimizer_key, embedding_spec_key
    with _manager_of(input_checkpoint_path, *keys) as manager:
        step = _step_of(manager, restore_step)
        restored = _read(manager, step, *keys)
    source = restored[embedding_spec_key]
    if target_topology is None:
        target = _layouts.alone(source)
    elif target_feature_specs is None:
        target = _layouts.planned(source, target_topology.num_global_devices, target_topology.num_sc_per_device, target_batch_size)
    else:
        target = embedding.create_proto_from_feature_specs(target_feature_specs, target_topology.num_global_devices, target_topology.num_sc_per_device)
    stacks = {stack.stack_name for stack in source.stacked_table_specs}
    found = []

    def is_of_stacks(node: Any) -> bool:
        return isinstance(node, Mapping) and set(node) == stacks and all(isinstance(one, Mapping) and "table" in one for one in node.values())

    def converted(node: Any) -> Any:
        if not is_of_stacks(node):
            return node
        found.append(node)
        return _layouts.restacked(node, source, target)

    model = jax.tree.map(converted, restored[model_key], is_leaf=is_of_stacks)
    if not found:
        raise ValueError(f"{input_checkpoint_path}: {model_key!r} of step {step} has no stacks {', '.join(sorted(stacks))}")
    with create_checkpoint_manager(cp_path=output_checkpoint_path, cp_options=ocp.CheckpointManagerOptions(), model_key=model_key,
                                   optimizer_key=optimizer_key, embedding_spec_key=embedding_spec_key) as manager:
        manager.save(step if save_step is None else save_step, force=True, args=ocp.args.Composite(**{
            model_key: ocp.args.StandardSave(model), optimizer_key: ocp.args.StandardSave(restored[optimizer_key]),
            embedding_spec_key: ocp.args.ProtoSave(target)}))


def _manager_of(path: Any, model_key: str, optimizer_key: str, embedding_spec_key: str) -> Any:
    """Of a folder that is there, for reading alone."""
    return create_checkpoint_manager(cp_path=path, cp_options=ocp.CheckpointManagerOptions(read_only=True), model_key=model_key,
                                     optimizer_key=optimizer_key, embedding_spec_key=embedding_spec_key)


def _step_of(manager: Any, step: Optional[int]) -> int:
    steps = manager.all_steps()
    if not steps or step not in (None, *steps):
        raise ValueError(f"step: {step} is not in {manager.directory}; there are {sorted(steps) or 'none'}")
    return int(max(steps)) if step is None else step


def _read(manager: Any, step: int, model_key: str, optimizer_key: str, embedding_spec_key: str) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return manager.restore(step, args=ocp.args.Composite(**{
        model_key: ocp.args.StandardRestore(fallback_sharding=here), optimizer_key: ocp.args.StandardRestore(fallback_sharding=here),
        embedding_spec_key: ocp.args.ProtoRestore(embedding_spec_pb2.EmbeddingSpecProto)}))


def _is_of_tables(variable: Any) -> bool:
    return embed.is_embedding_variables(None, variable)


def _stacks(variables: Any, spec: Any) -> Dict[str, Any]:
    """The tables as they lie on SparseCores, filled up with zeros."""
    model = model_of(variables)
    result: Dict[str, Any] = {}
    for stack, table, rows in _layouts.places(spec):
        names = ("", *model.tables[table.table_name].slots)
        held = result.setdefault(stack.stack_name, {name: np.zeros((stack.stack_vocab_size, stack.stack_embedding_dim), np.float32)
                                                    for name in names})
        for name in names:
            held[name][rows, :table.embedding_dim] = model.table(table.table_name, slot=name)
    return {name: {"table": held.pop(""), "slot": held} for name, held in result.items()}


def _assign(model: Model, stacks: Mapping[str, Any], spec: Any) -> None:
    """Writes what a checkpoint holds to the cluster. All is checked before anything is written."""
    writes = []
    for stack, table, rows in _layouts.places(spec):
        info = model.tables.get(table.table_name)
        if info is None or (info.vocabulary_size, info.embedding_dim) != (table.vocab_size, table.embedding_dim):
            raise ValueError(f"the checkpoint has table {table.table_name!r} of {table.vocab_size} x {table.embedding_dim}; the model "
                             f"{'has none of this name' if info is None else f'{info.vocabulary_size} x {info.embedding_dim}'}")
        slots = stacks[stack.stack_name]["slot"] or {}
        if set(slots) != set(info.slots):
            raise ValueError(f"table {table.table_name!r}: the checkpoint has the slots {', '.join(slots) or 'none'}; the optimizer {info.optimizer} "
                             f"has {', '.join(info.slots) or 'none'}")
        for slot, values in (("", stacks[stack.stack_name]["table"]), *slots.items()):
            held = np.asarray(values)[rows, :table.embedding_dim]
            if not np.isfinite(held).all():
                row, column = np.argwhere(~np.isfinite(held))[0]
                raise ValueError(f"the checkpoint has {held[row, column]} in row {row}, column {column} of "
                                 f"{f'slot {slot!r} of ' if slot else ''}table {table.table_name!r}; all values must be finite")
            writes.append((table.table_name, held, slot))
    missing = set(model.tables) - {name for name, _, _ in writes}
    if missing:
        raise ValueError(f"the checkpoint has no table {sorted(missing)[0]!r}")
    if jax.process_index() == 0:
        for name, values, slot in writes:
            wide = values.shape[1] == model.read_rows(name, [0], slot=slot).shape[1]
            assign_in_parts(model, name, np.arange(len(values)), values if wide else values[:, :1], slot)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("emberd_restored")
    model._known = True  # who restores goes on
