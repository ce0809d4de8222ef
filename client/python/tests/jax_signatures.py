"""The public names of jax-tpu-embedding, and how they are called: of the wheel, or of emberd.compat.jax_tpu_embedding.

usage: jax_signatures.py [PACKAGE] > ../../../tests/golden/jax/signatures.json

The recording is of jax-tpu-embedding 0.2.0, which needs Python 3.12.
"""

import importlib
import inspect
import json
import sys

MODULES = ("lib.fdo.csv_file_fdo_client", "lib.fdo.fdo_client", "lib.fdo.file_fdo_client", "lib.flax.linen.embed",
           "lib.flax.linen.embed_optimizer", "lib.flax.nnx.checkpoint_utils", "lib.flax.nnx.embed", "lib.nn.embedding",
           "lib.nn.embedding_proto_utils", "lib.nn.embedding_spec", "lib.nn.table_stacking", "utils.utils")


def parameters(function):
    """As behind `def`, without types. None: it is not called."""
    if not callable(function):
        return None
    result, by_name = [], False
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.KEYWORD_ONLY and not by_name:
            by_name = True
            result.append("*")
        default = getattr(one.default, "__name__", repr(one.default))  # of a function, its name
        if "object at" in default or default.startswith("<"):
            default = "..."  # what only says that nothing was given
        mark = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        result.append(mark + name + ("" if one.default is one.empty else f"={default}"))
    return ", ".join(result)


def signatures(package):
    """By "module.name" or "module.Class.name"."""
    result = {}
    for place in MODULES:
        module = importlib.import_module(f"{package}.sparsecore.{place}")
        for name, value in vars(module).items():
            if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)) or value.__module__ != module.__name__:
                continue
            result[f"{place}.{name}"] = parameters(value)
            for part in vars(value) if inspect.isclass(value) else ():
                if not part.startswith("_") and part not in inspect.signature(value).parameters:
                    result[f"{place}.{name}.{part}"] = parameters(getattr(value, part))
    return dict(sorted(result.items()))


if __name__ == "__main__":
    json.dump(signatures(*sys.argv[1:] or ["jax_tpu_embedding"]), sys.stdout, indent=0)
    print()
