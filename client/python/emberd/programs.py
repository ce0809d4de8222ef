"""Compiled programs: lookups and updates whose shapes, limits and buffers are settled beforehand, batches that wait on the coordinator, and several
programs in one call. client/PROGRAMS.md has what programs are, program_service.proto the fields of each.

    lookup, update = model.compile("lookup"), model.compile("update")
    found = lookup({"user": users})
    for users, gradient in batches:
        chain = emberd.Chain()
        chain.add(update, found, {"user": gradient})
        chain.add(lookup, {"user": users})
        applied, found = chain.run()                  # both in one call

What a coordinator keeps for a Program, a PreparedBatch or a ProgramResult stays while it is referred to, or until it is closed, however long that takes.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import itertools
import json
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union, cast

import numpy as np
import numpy.typing as npt

from . import _native, _records, arrays, errors
from ._native import Call, Handle
from .arrays import Dense, Hyper, Ids, Ragged, Sequences, Sparse

if TYPE_CHECKING:
    from .client import Applied, Client

Array = npt.NDArray[Any]
Argument = Union["PreparedBatch", "ProgramResult", "BundlePart", "ChainedResult", Mapping[str, Any]]

_DTYPES: Dict["np.dtype[Any]", str] = {np.dtype(np.float32): "FLOAT32", np.dtype(np.int32): "INT32", np.dtype(np.int64): "INT64"}
_NUMPY: Dict[str, "np.dtype[Any]"] = {name: dtype for dtype, name in _DTYPES.items()}
_BYTES = struct.Struct("Pq")  # emberd_bytes


@functools.lru_cache(maxsize=1024)
def _place(place: int) -> str:
    """The data of a tensor in JSON: its place among those that go beside it."""
    return base64.b64encode(str(place).encode()).decode()


class _Tensors:
    """What goes beside the JSON of a request."""

    def __init__(self) -> None:
        self.arrays: List[Array] = []

    def add(self, array: Array) -> Dict[str, Any]:
        self.arrays.append(np.asarray(array, order="C"))
        return {"dtype": _DTYPES[array.dtype], "shape": array.shape, "data": _place(len(self.arrays) - 1)}

    def features(self, ids: Mapping[str, Ids]) -> List[Dict[str, Any]]:
        _records.check_mapping(ids, "ids")
        return [self._feature(name, value) for name, value in ids.items()]

    def _feature(self, name: str, ids: Ids) -> Dict[str, Any]:
        _native.text(name, "feature")
        what = f'feature "{name}"'
        if isinstance(ids, Sequences):
            ids = ids.unrolled(what)
        weights = getattr(ids, "weights", None) if isinstance(ids, (Dense, Ragged, Sparse)) else None
        if isinstance(ids, Ragged):
            kind, values = "ragged", arrays.as_ints(ids.values, what + ": values")
            splits = arrays.as_ints(ids.row_splits, what + ": row_splits")
            arrays.check_shape(splits, what + ": row_splits", splits.ndim == 1, "[samples + 1]")
            fields: Dict[str, Any] = {"row_splits": self.add(splits), "values": self.add(values)}
        elif isinstance(ids, Sparse):
            kind, values = "sparse", arrays.as_ints(ids.values, what + ": values")
            samples = _native.whole(ids.samples, what + ": samples")
            indices = arrays.sparse_indices(ids.indices, values.size, samples, what + ": indices", type(ids.indices).__module__ == "torch")
            fields = {"indices": self.add(indices), "values": self.add(values), "sample_count": samples}
        else:
            kind, values = "dense", arrays.as_ints(ids.ids if isinstance(ids, Dense) else ids, what)
            if values.ndim == 2 and not values.shape[1]:
                return self._feature(name, arrays.without_ids(values, weights, what))
            fields = {"ids": self.add(values)}
        dense = kind == "dense"
        arrays.check_shape(values, what, values.ndim > 0 and 0 not in values.shape[1:] if dense else values.ndim == 1, "[samples] or [samples, ids of a sample]" if dense else "[ids]")
        if weights is not None:
            floats = arrays.as_weights(weights, what + ": weights", values.shape)
            fields["weights"] = self.add(floats if floats.shape == values.shape else floats.reshape(-1))
        return {"feature": name, kind: fields}

    def gradients(self, given: Mapping[str, Any], like: Optional[Mapping[str, Tuple[int, ...]]]) -> List[Dict[str, Any]]:
        """like: `_shapes` of the activations, as far as they are known; the coordinator compares the others with those that it has. None: those that they
        are of come later."""
        _records.check_mapping(given, "gradients")
        found: List[Dict[str, Any]] = []
        for name, value in given.items():
            _native.text(name, "feature")
            if value is not None:
                what = f'gradient of feature "{name}"'
                array = arrays.as_array(value, what)
                if like is not None and name in like:
                    _check_leading(array.shape[:-1], like[name], array.shape, what)
                tensor = self.add(arrays.as_rows(array, what)[0])
                if like is not None and name not in like:
                    tensor["shape"] = array.shape
                found.append({"name": name, "tensor": tensor})
        return found

    def tuple(self, given: Mapping[str, Any]) -> List[Dict[str, Any]]:
        _records.check_mapping(given, "tensors")
        found: List[Dict[str, Any]] = []
        for name, value in given.items():
            _native.text(name, "tensors")
            what = f'tensor "{name}"'
            array = arrays.as_array(value, what)
            array = arrays.as_ints(array, what) if array.dtype.kind in "iu" else arrays.as_floats(array, what)
            found.append({"name": name, "tensor": self.add(array)})
        return found


class _Answer:
    """The answer to a call, whose tensors are read where they lie: each array keeps it."""

    def __init__(self, client: "Client", method: str, request: Mapping[str, Any], tensors: Sequence[Array], at: Optional[Handle]) -> None:
        library = _native.lib()
        try:
            text = json.dumps(request, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"spec: {error}") from error
        places = b"".join(_BYTES.pack(_records.address_of(one), one.nbytes) for one in tensors)
        call = library.call_program(client._handle.get(), method.encode(), text.encode(), places, len(tensors), None if at is None else at.get())
        self.handle = Call(call, (tensors, places)).take("answer")
        self.message: Dict[str, Any] = json.loads(library.answer_json(self.handle.get()))
        count = library.answer_tensors(self.handle.get(), None, 0)
        found = ctypes.create_string_buffer(max(1, count * _BYTES.size))
        library.answer_tensors(self.handle.get(), found, count)
        self._places = [_BYTES.unpack_from(found, place * _BYTES.size) for place in range(count)]

    def kept(self, place: int) -> Optional[Handle]:
        kept = _native.lib().answer_take_kept(self.handle.get(), place)
        return Handle(kept, "kept_free") if kept else None

    def arrays(self, values: Sequence[Mapping[str, Any]]) -> List[Tuple[str, Array]]:
        return [(one.get("name", ""), self._array(one["tensor"])) for one in values]

    def _array(self, tensor: Mapping[str, Any]) -> Array:
        address, _ = self._places[int(base64.b64decode(tensor["data"]))]
        shape = tuple(map(int, tensor.get("shape", ())))
        if tensor["dtype"] == "BFLOAT16":
            halves: Array = _records.view(address, shape, self.handle, dtype=np.dtype(np.uint16))
            floats: Array = (halves.astype(np.uint32) << 16).view(np.float32)
            return floats
        return _records.view(address, shape, self.handle, dtype=_NUMPY[tensor["dtype"]])


def _statistics(said: Mapping[str, Any]) -> Dict[str, Any]:
    """As `Lookup.statistics` has them, but for zeros, which are left out."""
    def number(value: Any) -> Any:
        return int(value) if isinstance(value, str) else value

    return {"num_minibatches": said.get("num_minibatches", 0), "stacks": [
        {name: value if name == "stack" else number(value) for name, value in one.items()} for one in said.get("stacks", ())]}


def _check_leading(given: Tuple[int, ...], wanted: Tuple[int, ...], shape: Sequence[Any], what: str) -> None:
    """All dimensions of a gradient but the last, beside those of the activations."""
    if given != wanted:
        raise errors.InvalidArgument(f"{what}: the shape [{', '.join(map(str, shape))}] is not allowed; it must be that of the activations, "
                                     f"[{', '.join(map(str, wanted))}, embedding_dim]")


class _Kept(_native.Uncopied):
    """Something that a coordinator keeps until this is closed, or nobody refers to it any more."""

    def __init__(self, client: "Client", kept: Optional[Handle], handle: str) -> None:
        self._client, self._kept, self._name = client, kept, handle

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives it back, without waiting for the coordinator. Closing twice does nothing."""
        if self._kept is not None:
            self._kept.close()

    def _use(self) -> str:
        """Its handle, while it has one."""
        self._client._handle.get()
        if self._kept is None:
            raise errors.FailedPrecondition("this result stays nowhere: it is of an inference or of a sum")
        self._kept.get()
        return self._name


class PreparedBatch(_Kept):
    """A batch that was checked and preprocessed, or tensors, on the coordinator. It may be run any number of times, by the program that made it."""

    def __init__(self, client: "Client", answer: _Answer, shapes: Mapping[str, Tuple[int, ...]]) -> None:
        super().__init__(client, answer.kept(0), answer.message["handle"])
        self.statistics: Dict[str, Any] = _statistics(answer.message.get("statistics", {}))
        self._shapes = shapes

    def __repr__(self) -> str:
        return "emberd.PreparedBatch()"

    def read(self, *, csr: bool = False) -> Dict[str, Array]:
        """What the coordinator keeps, by name: the tensors that were given to `prepare`; nothing of a batch.

        csr: of a batch, the arrays that TensorFlow would give to a chip, "STACK/row_pointers", "STACK/sorted_sample_ids",
        "STACK/sorted_token_ids" and "STACK/sorted_gains" of each stack, and "splits". InvalidArgument for what is no batch.
        """
        answer = _Answer(self._client, "ReadHandle", {"handle": self._use(), "csr": bool(csr)}, (), self._kept)
        return dict(_shaped(answer, answer.message, {} if csr else self._shapes))


class ProgramResult(_Kept, Mapping[str, Array]):
    """What a program gives, by name: activations by feature, float32 [samples, embedding_dim], or of the shape that `output_shape` or Sequences give
    them; of a sum its tensors, by the names of the first ones. An update of the batch takes it as its first argument, once, or with an alias again and again."""

    def __init__(self, client: "Client", answer: _Answer, place: int, shapes: Mapping[str, Tuple[int, ...]]) -> None:
        said = answer.message["results"][place]
        super().__init__(client, answer.kept(place), said.get("handle", "0"))
        self.statistics: Dict[str, Any] = _statistics(said.get("statistics", {}))
        found = _shaped(answer, said, shapes)
        self._shapes: Dict[str, Tuple[int, ...]] = {name: one.shape[:-1] for name, one in found if one.ndim > 1}
        self.tensors: Tuple[Array, ...] = tuple(one for _, one in found)
        self._arrays = dict(found)

    def read(self) -> Dict[str, Array]:
        """What the coordinator has of it, by name: nothing, unless an update was compiled with `aliases=[{}]` and was given this result. Then the
        activations of the same batch, with the rows as that update has left them. The arrays of this object stay as they were found."""
        answer = _Answer(self._client, "ReadHandle", {"handle": self._use()}, (), self._kept)
        return dict(_shaped(answer, answer.message, self._shapes))

    def __repr__(self) -> str:
        return f"emberd.ProgramResult({', '.join(f'{name}: {list(one.shape)}' for name, one in self._arrays.items())})"

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _shaped(answer: _Answer, said: Mapping[str, Any], shapes: Mapping[str, Tuple[int, ...]]) -> List[Tuple[str, Array]]:
    """shapes: but for the last dimension, of activations that have the shape of their ids, of others as far as they are known, and of gradients as they were given."""
    return [(name, one.reshape(*shapes[name], one.shape[-1]) if name in shapes else one)
            for name, one in answer.arrays(said.get("values", ()))]


class Bundle(_Kept):
    """Batches, results and tuples of tensors under one handle, as `Client.bundle` makes it; it keeps them when they are closed. [k] is element k, which a
    program takes as an argument, or of a tuple [k][j] its element j."""

    def __init__(self, client: "Client", elements: Sequence[Any]) -> None:
        tensors = _Tensors()
        at: List[Handle] = []
        given = [_element(client, one, f"element {place}", tensors, at) for place, one in enumerate(elements)]
        if not given:
            raise ValueError("elements: give at least one")
        request: Dict[str, Any] = {"ops": [{"literal": {"elements": given}, "outputs": [{}]}], "config": {}}
        answer = _Answer(client, "ExecuteChained", request, tensors.arrays, at[0] if at else None)
        super().__init__(client, answer.kept(0), answer.message["results"][0]["handle"])
        self._shapes = tuple(map(_shapes_in, elements))

    def __repr__(self) -> str:
        return "emberd.Bundle()"

    def __getitem__(self, place: int) -> "BundlePart":
        return BundlePart(self, (_native.whole(place, "place", 0),))

    def read(self) -> Tuple[Any, ...]:
        """What the coordinator has: of each element a dict of its arrays by name, which is empty for a batch, or of a tuple a tuple of these."""
        answer = _Answer(self._client, "ReadHandle", {"handle": self._use()}, (), self._kept)
        return cast(Tuple[Any, ...], _unbundled(answer, answer.message, self._shapes))


def _unbundled(answer: _Answer, said: Mapping[str, Any], shapes: Any) -> Any:
    elements = said.get("elements", ())
    if not elements:
        return dict(_shaped(answer, said, shapes))
    return tuple(_unbundled(answer, one, of_one) for one, of_one in zip(elements, shapes))


class BundlePart(_native.Uncopied):
    """An element of a Bundle, as an argument of a program; [k] is element k of it."""

    def __init__(self, bundle: Bundle, places: Tuple[int, ...]) -> None:
        self._bundle, self._places = bundle, places

    def __repr__(self) -> str:
        return f"emberd.BundlePart({', '.join(map(str, self._places))})"

    def __getitem__(self, place: int) -> "BundlePart":
        return BundlePart(self._bundle, (*self._places, _native.whole(place, "place", 0)))

    def _argument(self) -> Dict[str, Any]:
        first, *inner = (place + 1 for place in self._places)
        return {"handle": self._bundle._use(), "output_index": first, "inner": inner}


def _shapes_in(one: Any) -> Any:
    """Of an element of a bundle, a batch or its result: as `_shaped` takes them. Of a tuple: those of its elements."""
    if isinstance(one, (tuple, list)):
        return tuple(map(_shapes_in, cast(Sequence[Any], one)))
    if isinstance(one, ChainedResult):
        return next((shapes for _, _, shapes, _, place in one._chain._added if place == one._place), cast(Dict[str, Any], {}))
    if not isinstance(one, BundlePart):
        return one._shapes if isinstance(one, (PreparedBatch, ProgramResult, Bundle)) else {}
    found: Any = one._bundle._shapes
    try:
        for place in one._places:
            if isinstance(found, tuple):  # else it is a tensor, which has its name where it is alone, too
                found = cast(Sequence[Any], found)[place]
    except LookupError:  # there is no such element, as the coordinator says
        return {}
    return found


def _shapes_by_name(one: Any) -> Dict[str, Tuple[int, ...]]:
    """The same, where it is no tuple."""
    found = _shapes_in(one)
    return cast(Dict[str, Tuple[int, ...]], found) if isinstance(found, dict) else {}


def _element(client: "Client", one: Any, what: str, tensors: _Tensors, at: List[Handle]) -> Dict[str, Any]:
    """Of a bundle, as a ProgramArgument. at: of what is kept somewhere."""
    kept = one._bundle if isinstance(one, BundlePart) else one
    if isinstance(kept, (PreparedBatch, ProgramResult, Bundle)):
        if kept._client is not client:
            raise ValueError(f"{what}: it is of another client; handles are known to their own")
        argument = one._argument() if isinstance(one, BundlePart) else {"handle": kept._use()}
        at.append(cast(Handle, kept._kept))
        return argument
    if isinstance(one, (tuple, list)):
        return {"literal": {"elements": [_element(client, inner, f"{what}[{place}]", tensors, at) for place, inner in enumerate(cast(Sequence[Any], one))]}}
    if not isinstance(one, Mapping):
        raise _native.refuse_kind(one, what, "what `prepare`, a program or `bundle` gave, a mapping of tensors by name, or a tuple of these")
    return {"literal": {"tensors": tensors.tuple(cast(Mapping[str, Any], one))}}


class Program(_Kept):
    """A lookup, an update or a sum, as `Model.compile` and `Client.compile` make it.

    kind: "LOOKUP", "UPDATE" or "ELEMENTWISE". features: in the order of the results, or of a sum its arguments. fingerprint: of the program and the
    plan, in hexadecimal digits. cached: somebody had compiled it before. bytes_per_sparsecore: of its buffers. spec: all fields of it. stacks: what it
    reserves of each table stack.
    """

    def __init__(self, client: "Client", spec: Mapping[str, Any]) -> None:
        for name, value in spec.items():
            if isinstance(value, (list, tuple)) and not all(isinstance(one, Mapping) for one in cast(Sequence[Any], value)):
                raise TypeError(f"spec: {name}: {value!r:.200} is not allowed; it must be a list of mappings")
        try:
            answer = _Answer(client, "Compile", {"spec": spec}, (), None)
        except errors.InvalidArgument as error:
            raise errors.InvalidArgument(re.sub("^request: ", "spec: ", str(error))) from None
        said = answer.message
        super().__init__(client, answer.kept(0), said["program_handle"])
        self.spec: Dict[str, Any] = said["spec"]
        self.kind: str = self.spec["kind"]
        self.features: Tuple[str, ...] = tuple(one.get("feature", "") for one in self.spec.get("inputs", ()))
        self.fingerprint: str = said["fingerprint"]
        self.cached: bool = said.get("cached", False)
        self.bytes_per_sparsecore = int(said.get("bytes_per_sparsecore", 0))
        self.stacks: List[Dict[str, Any]] = said.get("stacks", [])
        self._inner_shapes: Optional[Dict[str, Tuple[int, ...]]] = None  # of the model's features, once they are asked for

    def __repr__(self) -> str:
        return f"emberd.Program({self.kind}, {', '.join(self.features)})"

    def prepare(self, ids: Mapping[str, Any]) -> PreparedBatch:
        """Checks and preprocesses a batch on the coordinator, to be run later.

        ids: for every feature of a lookup as in `Model.lookup`; gradients of an update; tensors of a sum.
        InvalidArgument for a shape that the program does not have, ResourceExhausted for more ids than its buffers hold.
        """
        tensors = _Tensors()
        literal = self._literal(ids, None, tensors)
        answer = _Answer(self._client, "PrepareBatch", {"program_handle": self._use(), "batch": literal}, tensors.arrays, self._kept)
        return PreparedBatch(self._client, answer, self._shapes((ids,)))

    def __call__(self, *arguments: Argument, step: Optional[int] = None, hyper: Optional[Hyper] = None) -> Union[ProgramResult, "Applied"]:
        """Runs the program: of a lookup, with a batch, its ProgramResult; of an update, with the result of a lookup and gradients by feature, where
        one that is missing is zero, Applied; of a sum, with as many tuples of tensors as it has inputs, its ProgramResult.

        Arguments are what `prepare` takes, or gave. step, hyper: of an update, as in `Lookup.apply`.
        An aliased argument of a sum has the new values afterwards: `PreparedBatch.read`. So has, of an update that was compiled with `aliases=[{}]`,
        the result of the lookup: `ProgramResult.read`; its batch must have come from `prepare`, and be there still, or the lookup be in the same chain.
        """
        tensors = _Tensors()
        given = [self._argument(place, arguments, tensors) for place in range(len(arguments))]
        request = {"program_handle": self._use(), "arguments": given, "update": _update(step, hyper), "config": {"return_values": True}}
        answer = _Answer(self._client, "Execute", request, tensors.arrays, self._kept)
        if self.kind == "UPDATE":
            return _applied(answer.message["updates"][0], step)
        return ProgramResult(self._client, answer, 0, self._shapes(arguments))

    def _argument(self, place: int, arguments: Sequence[Any], tensors: _Tensors) -> Dict[str, Any]:
        one = arguments[place]
        like = _shapes_by_name(arguments[0]) if self.kind == "UPDATE" and place == 1 else {}
        if self.kind == "UPDATE" and place == 1 and isinstance(one, (PreparedBatch, BundlePart)):
            for name, shape in _shapes_by_name(one).items():
                _check_leading(shape, like.get(name) or self._of_output_shape(name, shape), (*shape, "embedding_dim"), f'gradient of feature "{name}"')
        if isinstance(one, (PreparedBatch, ProgramResult)) and (one._kept is not None or self.kind == "UPDATE"):
            if one._client is not self._client:
                raise ValueError(f"argument {place}: it is of another client; handles are known to their own")
            return {"handle": one._use()}
        if isinstance(one, BundlePart):
            return _element(self._client, one, f"argument {place}", tensors, [])
        if not isinstance(one, Mapping):
            raise _native.refuse_kind(one, f"argument {place}", "a mapping by name, or what `prepare` or a program gave")
        return {"literal": self._literal(cast(Mapping[str, Any], one), like, tensors)}

    def _of_output_shape(self, name: str, shape: Tuple[int, ...]) -> Tuple[int, ...]:
        """What activations of as many rows have where nothing but the model is known of them: the shape, unless the feature has an output_shape of several
        dimensions."""
        if self._inner_shapes is None:
            self._inner_shapes = self._client.model(self.spec["model"])._inner_shapes
        inner = self._inner_shapes.get(name, ())
        return (math.prod(shape) // math.prod(inner), *inner) if inner else shape

    def _literal(self, given: Mapping[str, Any], like: Optional[Mapping[str, Tuple[int, ...]]], tensors: _Tensors) -> Dict[str, Any]:
        if self.kind == "LOOKUP":
            return {"features": tensors.features(given)}
        return {"tensors": tensors.gradients(given, like) if self.kind == "UPDATE" else tensors.tuple(given)}

    def _shapes(self, arguments: Sequence[Any]) -> Dict[str, Tuple[int, ...]]:
        """Of activations that have the shape of their ids, but for the last dimension; and of gradients for `prepare`."""
        if self.kind == "ELEMENTWISE" or not arguments:
            return {}
        if not isinstance(arguments[0], Mapping) or isinstance(arguments[0], ProgramResult):
            return _shapes_by_name(arguments[0]) if self.kind == "LOOKUP" else {}
        given = cast(Mapping[str, Any], arguments[0])
        if self.kind == "UPDATE":
            return {name: tuple(np.shape(one)[:-1]) for name, one in given.items() if one is not None}
        return {name: arrays.activation_shape(one, (), 0)[:-1] for name, one in given.items() if isinstance(one, Sequences)}


class ChainedResult(_native.Uncopied):
    """What an operation of a Chain will give; [name] is one of its tensors."""

    def __init__(self, chain: "Chain", place: int, names: Sequence[str], element: int = 0) -> None:
        self._chain, self._place, self._names, self._element = chain, place, names, element

    def __repr__(self) -> str:
        return f"emberd.ChainedResult({', '.join(self._names)})"

    def __getitem__(self, name: str) -> "ChainedResult":
        if name not in self._names:
            raise KeyError(f"{name!r} is not a result; there are {', '.join(self._names) or 'none'}")
        return ChainedResult(self._chain, self._place, self._names, self._names.index(name) + 1)


class Chain(_native.Uncopied):
    """A plan of several programs, which `add` collects and `run` has made in one call, in their order. It is checked as a whole before anything runs.
    Each update is made once: where `run` has failed, a second `run` goes on with those that were not made."""

    def __init__(self) -> None:
        self._ops: List[Dict[str, Any]] = []
        self._tensors = _Tensors()
        # Program; arguments, which must stay until it runs, but for results of this chain, whose references to it would be a cycle; shapes; step; its place in _ops.
        self._added: List[Tuple[Program, Sequence[Any], Dict[str, Tuple[int, ...]], Optional[int], int]] = []
        self._key: Optional[Dict[str, Any]] = None
        self._done = False

    def __repr__(self) -> str:
        return f"emberd.Chain({', '.join(program.kind for program, *_ in self._added)})"

    def add(self, program: Program, *arguments: Argument, step: Optional[int] = None, hyper: Optional[Hyper] = None) -> ChainedResult:
        """One more program, with the arguments that it takes, or with what an earlier `add` gave. Returns what its result can be used by."""
        if not isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _native.refuse_kind(program, "program", "an emberd.Program")
        if self._added and program._client is not self._added[0][0]._client:
            raise ValueError("program: it is of another client than the first one")
        handle, before = program._use(), len(self._ops)
        update = _update(step, hyper)
        try:
            inputs = [self._input(program, place, arguments) for place in range(len(arguments))]
        except BaseException:
            del self._ops[before:]
            raise
        self._ops.append({"program_handle": handle, "inputs": inputs, "update": update})
        kept = [one for one in arguments if not isinstance(one, ChainedResult)]
        self._added.append((program, kept, program._shapes(arguments), step, len(self._ops) - 1))
        return ChainedResult(self, len(self._ops) - 1, program.features if program.kind == "LOOKUP" else ())

    def _input(self, program: Program, place: int, arguments: Sequence[Any]) -> Dict[str, Any]:
        one = arguments[place]
        if isinstance(one, ChainedResult):
            if one._chain is not self:
                raise ValueError(f"argument {place}: it is of another chain")
            return {"op_index": one._place, "output_index": one._element}
        argument = program._argument(place, arguments, self._tensors)
        self._ops.append({"data_handle": argument.pop("handle")} if "handle" in argument else argument)
        place_in_it = {} if "literal" in argument else argument
        return {"op_index": len(self._ops) - 1, **place_in_it}

    def run(self) -> List[Any]:
        """Of each program that was added, in this order: its ProgramResult, or of an update Applied. An error names the updates that were made."""
        if not self._added or self._done:
            raise ValueError("the chain has run; make another one" if self._done else "the chain is empty; add programs")
        client = self._added[0][0]._client
        client._handle.get()
        self._key = self._key or client._mutation()
        results = [place for program, *_, place in self._added if program.kind != "UPDATE"]
        for number, place in enumerate(results):
            self._ops[place]["outputs"] = [{"result_index": number}]
        request = {"ops": self._ops, "config": {"return_values": True, "execution_instance_key": self._key}}
        answer = _Answer(client, "ExecuteChained", request, self._tensors.arrays, self._added[0][0]._kept)
        self._done = True
        updates = {one.get("op_index", 0): one for one in answer.message.get("updates", ())}
        found: List[Any] = [_applied(updates[place], step) if program.kind == "UPDATE"
                            else ProgramResult(client, answer, results.index(place), shapes)
                            for program, _, shapes, step, place in self._added]
        self._added.clear()
        return found


def _update(step: Optional[int], hyper: Optional[Hyper]) -> Dict[str, Any]:
    update: Dict[str, Any] = {} if step is None else {"step": _native.whole(step, "step")}
    if hyper is not None:
        flat = sorted(_records.flatten_hyper(hyper, None))
        update["hyperparameters"] = [{"table": table, "values": {name: number for _, name, number in some}}
                                     for table, some in itertools.groupby(flat, key=lambda one: one[0])]
    return update


def _applied(made: Mapping[str, Any], step: Optional[int]) -> "Applied":
    from .client import Applied
    return Applied(-1 if step is None else step, int(made.get("rows_updated", 0)), int(made.get("rows_skipped", 0)), made.get("replayed", False))


def compile_for(client: "Client", model: str, kind: str, features: Sequence[str], samples: Optional[int], dynamic: bool,
                fields: Mapping[str, Any]) -> Program:
    """As `Model.compile` says."""
    _native.choice(kind, "kind", {"lookup": 1, "update": 2})
    if not isinstance(features, (list, tuple)):
        raise _native.refuse_kind(features, "features", "a list of names")
    if not features:
        raise errors.InvalidArgument("features: [] is not allowed; name at least one, or give None for all")
    if isinstance(fields.get("activation_dtype"), str):
        dtype = fields["activation_dtype"].upper()
        _native.choice(dtype, "activation_dtype", {"FLOAT32": 1, "BFLOAT16": 2})
        fields = {**fields, "activation_dtype": dtype}
    bound = {"max_samples": 0 if samples is None else _native.whole(samples, "samples", 1, 2**31 - 1), "dynamic": bool(dynamic)}
    for name in features:
        _native.text(name, "features")
    return Program(client, {"kind": kind.upper(), "model": model, "inputs": [{"feature": name, **bound} for name in features], **fields})
