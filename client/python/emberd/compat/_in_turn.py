"""What the packages for other libraries share: where their tables are made, and steps for APIs in which a lookup may be of training or not."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import numpy as np

from .._filling import Parts
from .._place import checked, default_client
from ..arrays import Floats, Hyper, Ragged, are_same
from ..client import Client, Model
from ..errors import NotFound
from ..trainer import Trainer

Ids = Mapping[str, Ragged]


class Place:
    """Where the next tables are made: in models of one name, then with _1 and so on behind it."""

    def __init__(self, model: str) -> None:
        self.use(None, model, "train")

    def use(self, client: Optional[Client], model: str, group: str, **options: Any) -> None:
        """options: of Steps."""
        self._client, self.group, self.options = checked(client), group, options
        self._model, self._made = model, 0

    def take(self) -> Tuple[Client, str]:
        """Where a model is declared later, and by which name."""
        name = self._name()
        self._made += 1
        return self._client or default_client(), name

    def declare(self, make: Any, parts: Optional[Parts] = None) -> Model:
        """make: gives the description of a model of a name. parts: rows of tables whose initializer is Assigned()."""
        model = (self._client or default_client())._declare_filled(make(self._name()), parts=parts)
        self._made += 1
        return model

    def find(self) -> Optional[Model]:
        """The model of the next name, if it is there."""
        try:
            model = (self._client or default_client()).model(self._name())
        except NotFound:
            return None
        self._made += 1
        return model

    def _name(self) -> str:
        return self._model + (f"_{self._made}" if self._made else "")


class InTurn:
    """Steps, by the ids of their update. Thread-safe."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._lock = threading.Lock()
        self._ids: Optional[Ids] = None  # of the step that has been received and has no update yet
        self._number = -1

    def look_up(self, ids: Ids) -> Dict[str, Floats]:
        """The first lookup after an update begins a step. Those after it see the same rows."""
        with self._lock:
            if self._ids is not None:
                return dict(self.trainer.look_up(ids))
            return self._begin(ids)

    def update(self, ids: Ids, gradients: Mapping[str, Any], hyper: Optional[Hyper] = None,
               sent: Callable[[], object] = lambda: None) -> None:
        """An update of the rows of these ids: the step that has begun is used where it has the same. sent: is called unless it
        is refused, after which it may be given again."""
        with self._lock:
            if self._ids is None or not are_same(self._ids, ids):
                self._begin(ids)
            try:
                self.trainer.update(self._number, gradients, hyper, own=False)
            finally:
                if self.trainer.ids_in_progress(self._number) is None:  # its update has been sent, also where waiting for it was interrupted
                    self._ids = None
                    sent()

    def _begin(self, ids: Ids) -> Dict[str, Floats]:
        self._ids = None
        copied = {name: Ragged(*(None if array is None else np.array(array) for array in (one.values, one.row_splits, one.weights)))
                  for name, one in ids.items()}
        self._number, found = self.trainer.begin(copied)
        self._ids = copied
        return dict(found)
