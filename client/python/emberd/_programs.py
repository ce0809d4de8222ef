"""The programs of the package as commands: `emberd` and `emberctl`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._native import program_path


def _run(name: str) -> NoReturn:
    path = program_path(name)
    os.execv(path, [name, *sys.argv[1:]])


def emberd() -> NoReturn:
    _run("emberd")


def emberctl() -> NoReturn:
    _run("emberctl")
