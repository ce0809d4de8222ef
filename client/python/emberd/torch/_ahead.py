"""What a module of PyTorch knows of the ids of a step before the step begins."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional

from ..arrays import Ids, copied
from ..steps import Step


class Ahead:
    """Ids of a step: as they were given, and in memory of their own; and the step, once they have been sent."""

    def __init__(self, ids: Any, read: Callable[[Any], Dict[str, Ids]], loop: Optional[object] = None) -> None:
        self.ids = ids
        self._parts = list(ids.values()) if isinstance(ids, Mapping) else []
        self.loop = loop  # over a Prefetcher
        self.step: Optional[Step] = None
        self.own: Dict[str, Ids] = {}
        self.failure: Optional[Exception] = None  # in their place
        try:
            self.own = {name: copied(value) for name, value in read(ids).items()}
        except Exception as error:
            self.failure = error

    def is_of(self, ids: Any) -> bool:
        """Whether they are the very ids, and none of a dict has been replaced."""
        parts: List[Any] = list(ids.values()) if isinstance(ids, Mapping) else []
        return self.ids is ids and len(parts) == len(self._parts) and all(one is other for one, other in zip(parts, self._parts))

    def check(self) -> None:
        """Raises what they failed with."""
        try:
            if self.failure is not None:
                raise self.failure
        finally:
            self.failure = None  # which refers to this frame
