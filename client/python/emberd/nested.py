"""Features in nested structures: the name of one is the path to it.

    ids = {"user": {"id": users, "history": [items, shops]}, "time": hours}
    flat = nested.flatten(ids)                 # "time", "user/history/0", "user/history/1", "user/id"
    found = model.lookup(flat, train=True)
    activations = nested.pack(ids, found)      # of the structure of ids
    found.apply(nested.flatten(gradients, like=ids))

Mappings are taken in the order of their sorted keys, lists and tuples in their own.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple


def flatten(tree: Any, *, like: Any = None) -> Dict[str, Any]:
    """What stands in a structure, by its path.

    like: a structure that `tree` must have, but for None in place of any part; ValueError names the path where it has not.
    """
    if like is not None:
        _check(tree, like, "")
    return dict(_leaves(tree, ""))


def pack(like: Any, flat: Mapping[str, Any]) -> Any:
    """The structure of `like`, with what `flat` has for each path in it. ValueError names what is missing or too much."""
    paths = [path for path, _ in _leaves(like, "")]
    for path in paths:
        if path not in flat:
            raise ValueError(f'"{path}" is missing; there are {_names(flat)}')
    for path in flat:
        if path not in paths:
            raise ValueError(f'"{path}" is not in the structure, which has {_names(paths)}')
    return _pack(like, flat, "")


def _names(paths: Any) -> str:
    return ", ".join(f'"{path}"' for path in paths) or "none"


def _under(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


# They leave the type of their argument as it is, Any: nothing is known of what a structure holds.
def _is_mapping(tree: Any) -> bool:
    return isinstance(tree, Mapping)


def _is_sequence(tree: Any) -> bool:
    return isinstance(tree, (list, tuple))


def _parts(tree: Any, path: str) -> Optional[List[Tuple[Any, Any]]]:
    """Key and value of each part of a structure; None: it is no structure."""
    if _is_mapping(tree):
        for key in tree:
            if not isinstance(key, str) or not key or "/" in key:
                raise ValueError(f'{path or "the structure"}: the key {key!r} is not allowed; keys are texts without "/"')
        return [(key, tree[key]) for key in sorted(tree)]
    if _is_sequence(tree):
        sequence: List[Any] = tree
        return list(enumerate(sequence))
    return None


def _leaves(tree: Any, path: str) -> Iterator[Tuple[str, Any]]:
    parts = _parts(tree, path)
    if parts is None:
        if not path:
            raise ValueError(f"a structure is a mapping, a list or a tuple; got {_kind(tree)}")
        yield path, tree
        return
    for key, part in parts:
        yield from _leaves(part, _under(path, key))


def _pack(like: Any, flat: Mapping[str, Any], path: str) -> Any:
    parts = _parts(like, path)
    if parts is None:
        return flat[path]
    packed = [(key, _pack(part, flat, _under(path, key))) for key, part in parts]
    if _is_mapping(like):
        made = dict(packed)
        return {key: made[key] for key in like}
    values = [part for _, part in packed]
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*values)
    return tuple(values) if isinstance(like, tuple) else values


def _kind(tree: Any) -> str:
    if _is_mapping(tree):
        return f"a mapping with the keys {_names(sorted(map(str, tree)))}"
    if _is_sequence(tree):
        length = len(tree)
        return f"a {'list' if isinstance(tree, list) else 'tuple'} of {length}"
    return f"a {type(tree).__name__}"


def _check(tree: Any, like: Any, path: str) -> None:
    if tree is None:
        return
    wanted, given = _parts(like, path), _parts(tree, path)
    if wanted is None and given is None:
        return
    if wanted is None or given is None or [key for key, _ in wanted] != [key for key, _ in given]:
        raise ValueError(f"{path or 'the structure'}: got {_kind(tree)}; it must be like {_kind(like)}")
    found = dict(given)
    for key, part in wanted:
        _check(found[key], part, _under(path, key))
