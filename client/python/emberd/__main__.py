"""`python -m emberd`: what is there, and how to begin."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Dict, Iterator

from . import __version__, _native

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "keras": "Keras", "ray": "Ray"}
TEXT = """\
emberd {version}, Python {python}: embedding tables of any size for PyTorch, JAX, Keras or NumPy, on a cluster of emberd.

{parts}
  import emberd
  with emberd.local(shards=2) as cluster, cluster.connect() as client:   # the real server, for as long as the block
      ...
  client = emberd.connect("host:7400")                                    # a running one

  help(emberd)                 the package: models, lookups, rows, streams of training, checkpoints
  help(emberd.TableConfig)     every field with its range and default
  emberd --help                the server: emberd up, coordinator, shard
  emberctl --help              what operators ask a cluster
"""


def _documents() -> Dict[str, Path]:
    """Where examples and documents are: in the package, or in the tree of its sources."""
    inside, sources = _native.HERE / "_docs", _native.HERE.parent
    if inside.exists():
        return {"examples": inside / "examples", "tutorials": inside / "tutorials", "README": inside / "README.md", "COMING_FROM": inside / "COMING_FROM.md",
                "issues": inside / "issues.md", "proto": inside / "proto"}
    return {"examples": sources / "examples", "tutorials": sources / "docs" / "tutorials", "README": sources / "README.md",
            "COMING_FROM": sources.parent / "COMING_FROM.md", "issues": sources / "docs" / "issues.md", "proto": sources.parent.parent / "proto"}


def _parts() -> Iterator[str]:
    """A line for each of them."""
    library = _native.library_path()
    yield f"  {'library':<13}{library}" + ("" if library.exists() else ", which is not there; install the wheel, or set EMBERD_LIBRARY")
    for name in ("emberd", "emberctl"):
        try:
            yield f"  {name:<13}{_native.program_path(name)}"
        except FileNotFoundError as error:
            yield f"  {name:<13}{error}"
    for name, path in _documents().items():
        yield f"  {name:<13}{path}"
    for module, name in FRAMEWORKS.items():
        yield f"  {name:<13}" + (f"import emberd.{module}" if importlib.util.find_spec(module) else "is not installed")


def main() -> None:
    print(TEXT.format(version=__version__, python=platform.python_version(), parts="".join(f"{line}\n" for line in _parts())), end="")


if __name__ == "__main__":
    main()
