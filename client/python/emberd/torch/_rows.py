"""A copy of a table's rows, as a tensor that raises where it is changed."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Optional, Tuple

import torch

# Functions of torch that change a tensor, and whose names do not end with one _.
_CHANGES = re.compile(r"__(set|setitem|i(add|and|floordiv|lshift|mod|mul|or|pow|rshift|sub|truediv|xor))__")
_below: Any = getattr(torch, "_C")  # noqa: B009 # without a type
as_it_is: Any = getattr(_below, "DisableTorchFunctionSubclass", _below.DisableTorchFunction)

HOW = ("collection.model.assign_rows(table, ids, rows) of the layer overwrites some rows and collection.model.load_table(table, rows) all; "
       "from_pretrained makes a layer of rows that you have, and requires_grad_(False) of the layer freezes them")


def changes(kind: Any, function: Any, arguments: Tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether the function would change a tensor of this kind."""
    name = getattr(function, "__name__", "")
    first: Any = named.get("out")
    if first is None and (_CHANGES.fullmatch(name) or (name.endswith("_") and not name.endswith("__"))):
        first = arguments[0] if arguments else next(iter(named.values()), None)
    return isinstance(first, kind) or (isinstance(first, (list, tuple)) and any(isinstance(one, kind) for one in first))


def _memory(tensor: torch.Tensor) -> Optional[int]:
    """Where it lies; None: it has no strides, or does not lie in the memory of the CPU."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return None
    whole: Any = tensor
    address: int = (whole.untyped_storage() if hasattr(whole, "untyped_storage") else whole.storage()).data_ptr()
    return address


class Rows(torch.Tensor):
    """Views of it are Rows, too; what is computed from it is a tensor as any other. A gradient that reaches it raises."""

    @staticmethod
    def read(values: Any, learned: bool) -> "Rows":
        """learned: it requires a gradient, as the weight of a layer of torch does that is not frozen."""
        kind: Any = torch.Tensor
        rows: Rows = kind._make_subclass(Rows, torch.from_numpy(values), learned)
        if learned:
            rows.register_hook(Rows._refuse_gradient)
        return rows

    @staticmethod
    def _refuse_gradient(_: torch.Tensor) -> None:
        raise RuntimeError("weight: it is a copy of rows of the cluster, so that its gradient would be lost; call the layer with the ids whose rows are to "
                           "learn, or take weight.detach()")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        named = kwargs or {}
        if changes(Rows, func, args, named):
            raise RuntimeError(f"weight: it is a copy of rows of the cluster, so that a change of it would be lost; {HOW}")
        with as_it_is():
            found = func(*args, **named)
            mine = [_memory(one) for one in (*args, *named.values()) if isinstance(one, Rows)]

            def marked(one: Any) -> Any:
                if type(one) is torch.Tensor and one.numel() and _memory(one) in mine:
                    return one.as_subclass(Rows)
                if isinstance(one, (list, tuple)) and type(one) in (list, tuple):
                    return type(one)(map(marked, one))
                if func in (torch.Tensor.numpy, torch.Tensor.__array__):
                    shared: Any = one
                    shared.flags.writeable = False
                return one

            return marked(found)

    def _plain(self) -> torch.Tensor:
        with as_it_is():
            return self.detach().clone()

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return self._plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)
