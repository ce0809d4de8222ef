"""What a model does just now, as a line or a small table that keeps itself up to date: in a terminal, in a notebook, in TensorBoard.

    with emberd.watch(model):              # on stderr, or below the cell
        for batch in loader: …

    watch = emberd.watch(model)            # or without a thread, where you ask for it
    watch.write(writer, step)              # a SummaryWriter of torch.utils.tensorboard, or what has its add_scalar
    print(watch)
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import time
from typing import Any, Dict, List, Optional, TextIO, Tuple

from . import _native, _tables, errors
from .client import Model
from .statistics import ModelStatistics, ShardMemory

# What ends the table, not the program that is watched.
_FAILURES = (errors.Error, ValueError, errors.ForkedProcess)


class Watch(_native.Uncopied):
    """Made by `watch`. In a `with` block it shows itself every `interval` seconds. Thread-safe."""

    def __init__(self, model: Model, interval: float = 1.0, hot_rows: int = 3, file: Optional[TextIO] = None) -> None:
        self.model = model
        self.interval = _native.milliseconds(interval, "interval") / 1000
        self.hot_rows = _native.whole(hot_rows, "hot_rows", 0, 100)
        self._file = file
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._display: Any = None  # of the notebook
        self._before, self._now, self._memory = self._ask(), self._ask(), self._ask_memory()

    def _ask(self) -> Tuple[float, ModelStatistics]:
        return time.monotonic(), self.model.statistics(self.hot_rows)

    def _ask_memory(self) -> List[ShardMemory]:
        return self.model.client.memory()

    def refresh(self) -> "Watch":
        """Asks the cluster; rates are those since the time before. Gives itself."""
        now, memory = self._ask(), self._ask_memory()
        with self._lock:
            self._before, self._now, self._memory = self._now, now, memory
        return self

    @property
    def statistics(self) -> ModelStatistics:
        """As of the last time that the cluster was asked."""
        return self._now[1]

    def scalars(self) -> Dict[str, float]:
        """The figures of the table by name: rates are a second's, between the last two times that the cluster was asked; `dropped_ids` and
        `failures` count from the start of the coordinator on; `table_bytes` are the model's, `resident_bytes` those of all shards;
        `hottest_share` is the share of the lookups of its table that the hottest row has, 0 to 1."""
        with self._lock:
            (began, before), (ended, now), memory = self._before, self._now, self._memory
        seconds = max(ended - began, 1e-9)

        def rate(name: str) -> float:
            return float(max(0, getattr(now, name) - getattr(before, name))) / seconds  # less than 0: it was started again

        rates = {f"{name}_per_second": rate(name) for name in ("examples", "ids", "unique_ids", "batches", "updates")}
        processes = {one.address if one.address != "in-process" else "": one.resident_bytes for one in memory}
        return {**rates, "dropped_ids": now.dropped_ids, "failures": now.failures, "table_bytes": now.table_bytes,
                "resident_bytes": sum(processes.values()), "hottest_share": max((one.share for one in now.hot_rows), default=0.0)}

    def write(self, writer: Any, step: int) -> None:
        """Asks the cluster, and writes `scalars` as "emberd/…" of this step. writer: what has TensorBoard's add_scalar(tag, value, step)."""
        number = _native.whole(step, "step")
        if not callable(getattr(writer, "add_scalar", None)):
            raise _native.refuse_kind(writer, "writer", "a SummaryWriter, which has add_scalar")
        for name, value in self.refresh().scalars().items():
            writer.add_scalar(f"emberd/{name}", value, number)

    def _rows(self) -> List[Tuple[str, str]]:
        now, found = self.statistics, self.scalars()
        rows = [("examples / s", _tables.count(found["examples_per_second"])),
                ("ids / s", f"{_tables.count(found['ids_per_second'])}, {_tables.count(found['unique_ids_per_second'])} of them unique in their batch"),
                ("updates / s", _tables.count(found["updates_per_second"])),
                ("ids lost", _tables.count(now.dropped_ids)),
                ("memory", f"{_tables.size(now.table_bytes)} of tables; processes: {_tables.size(found['resident_bytes'])}")]
        rows += [("serves", now.serves)] * bool(now.serves) + [("rows are lost", now.lost)] * bool(now.lost)
        rows += [("failures", _tables.count(now.failures))] * bool(now.failures)
        rows += [(f"shard {one.shard}", one.error) for one in self._memory if one.error]
        tables = dict.fromkeys(one.table for one in now.hot_rows)
        return rows + [(f"hot rows of {table}", ", ".join(f"{one.id} ({_tables.share(one.share)})" for one in now.hot_rows if one.table == table))
                       for table in tables]

    def __repr__(self) -> str:
        return f"emberd.Watch({self.model.name!r})"

    def _asked(self) -> "Watch":
        """With figures to show. Rates of a few milliseconds are chance: a thread that shows itself has those of its last interval, and who has none waits for them."""
        if self._thread is None:
            time.sleep(max(0.0, self._now[0] + self.interval - time.monotonic()))
        if self._thread in (None, threading.current_thread()):
            self.refresh()
        return self

    def __str__(self) -> str:
        """The table, with the rates of the last `interval`."""
        return f"{self.model.name}\n{_tables.in_text(self._asked()._rows())}"

    def _repr_html_(self) -> str:
        try:
            return _tables.in_html(f"emberd model {self.model.name}", (), self._asked()._rows())
        except _FAILURES as error:
            return _tables.in_html(f"emberd model {self.model.name}", (), [(error,)])

    def __enter__(self) -> "Watch":
        if self._thread is not None:
            raise RuntimeError("this watch shows itself already")
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="emberd.watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shows itself for a last time, and no more."""
        thread = self._thread
        if thread is not None and not _native.forked():
            self._stop.set()
            thread.join()
        self._thread = None

    def _run(self) -> None:
        while True:
            stopped = self._stop.wait(self.interval)
            try:
                self._show(stopped)
            except _FAILURES as error:
                self._write(f"{self.model.name}: {error}", over=not stopped)
            if stopped:
                return

    def _show(self, last: bool) -> None:
        file = self._file or sys.stderr
        if self._file is None and _in_notebook():
            display: Any = importlib.import_module("IPython.display").display
            if self._display is None:
                self._display = display(self, display_id=True)
            else:
                self._display.update(self)
        elif last and file.isatty():
            self._write(str(self), over=False)
        else:
            rows = [f"{name}: {value}" for name, value in self.refresh()._rows()]
            if file.isatty():  # what matters most is not cut
                found = self.scalars()
                rows[:4] = [f"{_tables.count(found['dropped_ids'])} ids lost"] + [
                    f"{_tables.count(found[f'{name}_per_second'])} {name}/s" for name in ("examples", "ids", "updates")]
            self._write(f"{self.model.name}: " + "; ".join(rows), over=not last)

    def _write(self, text: str, over: bool) -> None:
        """On a terminal in place of the line in which the cursor is, and no more: the program that is watched may have written those above. over: the next one comes
        in place of this one, which is cut to the width of the terminal, and ends with a mark before what the program may write behind it."""
        file = self._file or sys.stderr
        if file.isatty():
            file.write("\r\x1b[K" + (f"{text[:_width(file) - 4]} | " if over else f"{text}\n"))
        else:
            file.write(f"{text}\n")
        file.flush()


def _width(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, AttributeError):  # what is no real one, as of a test or an IDE
        return shutil.get_terminal_size().columns


def watch(model: Model, interval: float = 1.0, hot_rows: int = 3, file: Optional[TextIO] = None) -> Watch:
    """The rates of a model, the ids that it lost, its hot rows and its memory, as a small table.

    In a `with` block it shows itself every `interval` seconds: in a notebook below the cell, in a terminal on stderr as one line in place of the one before, and
    at the end as a table, elsewhere as a line. Printed, or as the last line of a cell, it shows what is now, once `interval` has passed since it asked before. `Watch.write` writes to TensorBoard.

    hot_rows: that are shown of each table, 0 to 100. file: instead of stderr.
    Counts are those of the coordinator that the client calls. NotFound if the model has been dropped.
    """
    if not isinstance(model, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(model, "model", "an emberd.Model, as Client.declare gives it")
    if file is not None and not (callable(getattr(file, "write", None)) and callable(getattr(file, "isatty", None))):
        raise _native.refuse_kind(file, "file", "a file that texts are written to")
    return Watch(model, interval, hot_rows, file)


def _in_notebook() -> bool:
    """Whether what IPython displays is a page, not a terminal."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")
