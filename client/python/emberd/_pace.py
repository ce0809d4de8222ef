"""How far ahead ids are sent."""

from __future__ import annotations

import time
from typing import Dict, List, Optional

from . import _native


class Pace:
    """How many batches are sent before one is given: `depth`, or no more than `least` where that makes faster steps. A trainer that takes all
    cores of the cluster's machine has little of lookups beside it, and its own threads wait for the one whose core is taken. Which way
    is faster is found out by turns, now and then."""

    FIRST, UNCOUNTED, COUNTED, AGAIN = 20, 2, 8, 1000  # steps: before the first trial; of a turn; between trials
    TURNS = 4  # of a trial: most, least, most, least

    def __init__(self, depth: int, least: int = 1) -> None:
        self._most = self.depth = _native.whole(depth, "depth", 1, 4)
        self._least = least
        self._left = self.FIRST if depth > least else 0  # steps to the next event; 0: there is none
        self._turn = -1
        self._began: Optional[float] = None  # what counts of a turn
        self._seconds: List[float] = []  # of turns

    def pause(self) -> None:
        """What comes before the next step is none: a trial under way begins anew, later."""
        if self._turn >= 0:
            self.depth, self._left = self._most, self.FIRST
            self._turn, self._seconds, self._began = -1, [], None

    def step(self) -> None:
        """A step has ended."""
        self._left -= 1
        if self._left != 0:
            return
        if self._turn >= 0 and self._began is None:
            self._began, self._left = time.perf_counter(), self.COUNTED
            return
        if self._began is not None:
            self._seconds.append(time.perf_counter() - self._began)
            self._began = None
        self._turn += 1
        if self._turn < self.TURNS:
            alone, self._left = self._turn % 2 == 1, self.UNCOUNTED
        else:
            alone, self._left = min(self._seconds[1::2]) < 0.98 * min(self._seconds[::2]), self.AGAIN
            self._turn, self._seconds = -1, []
        self.depth = self._least if alone else self._most


class Paces:
    """Of a trainer, by depth: what was found out in one loop over batches holds in the next. The update of a pipelined one waits for
    the lookup after it, which then is always sent ahead."""

    def __init__(self, pipelined: bool = False) -> None:
        self._paces: Dict[int, Pace] = {}
        self._least = 2 if pipelined else 1

    def of(self, depth: int) -> Pace:
        """InvalidArgument for a depth that is not allowed."""
        return self._paces.setdefault(depth, Pace(depth, self._least))
