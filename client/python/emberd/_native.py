"""The C interface of the client (emberd.h) by ctypes: the library, waits that Ctrl-C ends, and who holds memory.

Nothing here copies activations or gradients.
"""

from __future__ import annotations

import ctypes
import json
import math
import operator
import os
import threading
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from . import errors

ABI = 1
WAIT_MS = 100  # between two looks at signals
MOST_SECONDS = 10**9  # of a time-out: some 30 years
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
HERE = Path(__file__).resolve().parent


class ClientOptions(ctypes.Structure):
    _fields_ = [("size", c_uint64), ("addresses", POINTER(c_char_p)), ("address_count", c_int32), ("tls", c_int32),
                ("ca_file", c_char_p), ("certificate_file", c_char_p), ("key_file", c_char_p),
                ("server_name", c_char_p), ("token", c_char_p), ("token_file", c_char_p),
                ("connect_timeout_ms", c_int64), ("deadline_ms", c_int64), ("activation_type", c_int32),
                ("gradient_type", c_int32), ("transport", c_int32)]


class TrainOptions(ctypes.Structure):
    _fields_ = [("size", c_uint64), ("group", c_char_p), ("rank", c_int32), ("ranks", c_int32),
                ("consistency", c_int32), ("pipelined", c_int32), ("staleness_bound", c_int64),
                ("first_step", c_int64), ("step_timeout_ms", c_int64)]


class Update(ctypes.Structure):
    _fields_ = [("step", c_int64), ("rows_updated", c_int64), ("rows_skipped", c_int64), ("replayed", c_int64)]


# Name, result, arguments. Records that come as arrays (_records.py) are untyped.
_P = c_void_p
_FUNCTIONS: List[Tuple[str, Any, List[Any]]] = [
    ("abi_version", c_int32, []), ("version", c_char_p, []),
    ("error_code", c_int32, [_P]), ("error_message", c_char_p, [_P]), ("error_free", None, [_P]),
    ("call_wait", c_int32, [_P, c_int64]), ("call_error", _P, [_P]), ("call_free", None, [_P]),
    ("call_take_client", _P, [_P]), ("call_take_model", _P, [_P]), ("call_take_lookup", _P, [_P]),
    ("call_take_rows", _P, [_P]), ("call_take_text", _P, [_P]), ("call_take_stream", _P, [_P]),
    ("call_take_progress", _P, [_P]), ("call_take_answer", _P, [_P]),
    ("call_update", c_int32, [_P, POINTER(Update)]),
    ("connect", _P, [POINTER(ClientOptions)]), ("client_cancel", None, [_P]), ("client_free", None, [_P]),
    ("client_status", _P, [_P]),
    ("declare_from", _P, [_P, c_char_p, c_char_p]), ("declare_filled", _P, [_P, c_char_p, c_uint64]), ("describe", _P, [_P, c_char_p]), ("model_json", c_char_p, [_P]),
    ("model_free", None, [_P]),
    ("lookup_begin", _P, [_P, _P, _P, c_int32, c_int32, c_int64]),
    ("lookup_activations", c_int32, [_P, _P, c_int32]),
    ("lookup_concat", c_int32, [_P, _P]), ("lookup_block", c_int32, [_P, _P]),
    ("numpy_addresses", c_int32, [_P, _P, c_int32, _P, c_int64, c_int64]), ("lookup_step", c_int64, [_P]),
    ("lookup_statistics_json", c_char_p, [_P]), ("lookup_free", None, [_P]),
    ("apply", _P, [_P, _P, _P, _P, c_int32, _P, c_int32, c_int64, c_int64]),
    ("release", _P, [_P, _P, _P]),
    ("read_rows", _P, [_P, _P, c_char_p, _P, c_int64, c_char_p]),
    ("export_rows", _P, [_P, _P, c_char_p, c_int64, c_int64, c_char_p]),
    ("assign_rows", _P, [_P, _P, c_char_p, _P, c_int64, _P, c_int64, c_char_p]),
    ("rows_values", _P, [_P]), ("rows_count", c_int64, [_P]), ("rows_dim", c_int64, [_P]), ("rows_free", None, [_P]),
    ("save_checkpoint", _P, [_P, c_char_p, c_char_p, c_int32]),
    ("restore_checkpoint", _P, [_P, c_char_p, c_char_p, c_char_p]), ("list_checkpoints", _P, [_P, c_char_p]),
    ("serve_checkpoint", _P, [_P, c_char_p, c_char_p, c_char_p, c_char_p]),
    ("delete_checkpoint", _P, [_P, c_char_p, c_char_p]),
    ("drop_group", _P, [_P, c_char_p, c_char_p]),
    ("text_string", c_char_p, [_P]), ("text_free", None, [_P]),
    ("call_program", _P, [_P, c_char_p, c_char_p, _P, c_int32, _P]), ("answer_json", c_char_p, [_P]), ("answer_tensors", c_int32, [_P, _P, c_int32]),
    ("answer_take_kept", _P, [_P, c_int32]), ("answer_free", None, [_P]), ("kept_free", None, [_P]),
    ("train", _P, [_P, _P, POINTER(TrainOptions)]), ("stream_next_step", c_int64, [_P]),
    ("stream_generation", c_uint64, [_P]), ("stream_made_generation", c_uint64, [_P]),
    ("stream_send_lookup", _P, [_P, c_int64, _P, c_int32]),
    ("stream_send_lookup_concat", _P, [_P, c_int64, _P, c_int32]),
    ("stream_send_update_strided", _P, [_P, c_int64, _P, _P, c_int32, _P, c_int32, c_char_p, POINTER(c_void_p)]),
    ("stream_allocate_gradients", _P, [_P, c_int64, POINTER(c_void_p)]), ("floats_data", _P, [_P]), ("floats_free", None, [_P]),
    ("stream_send_skip", _P, [_P, c_int64, c_char_p]),
    ("stream_take_checkpoint", _P, [_P]),
    ("lease_released", c_int32, [_P]), ("lease_free", None, [_P]),
    ("stream_receive_lookup", c_int32, [_P, c_int64, POINTER(c_void_p), POINTER(c_void_p)]),
    ("stream_receive_update", c_int32, [_P, c_int64, POINTER(Update), POINTER(c_void_p)]),
    ("stream_finish", _P, [_P]), ("stream_free", None, [_P]),
]


def library_path() -> Path:
    """EMBERD_LIBRARY, or the library of this package."""
    named = os.environ.get("EMBERD_LIBRARY")
    return Path(named) if named else HERE / "_lib" / "libemberd_client.so.1"


def program_path(name: str = "emberd") -> Path:
    """A program of this package, or of the folder EMBERD_PROGRAMS."""
    named = os.environ.get("EMBERD_PROGRAMS")
    path = (Path(named) if named else HERE / "_bin") / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; install the wheel of emberd, or set EMBERD_PROGRAMS to the "
                                f"folder of {name}")
    return path


def _keep_freed_memory() -> None:
    """A step's activations arrive in some 30 MB of buffers, which glibc would give back to the system after each step and ask for
    again, at a page fault for every 4 KiB: a third of the CPU time of a step. Settings of malloc in the
    environment take precedence."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 256 << 20)


class _State:
    library: Optional[Any] = None
    process = 0  # that has loaded it
    forked = False
    lock = threading.Lock()


def _load() -> Any:
    path = library_path()
    if not path.exists():
        raise ImportError(f"{path} is not there; install the wheel of emberd, or set EMBERD_LIBRARY to "
                          "libemberd_client.so of a build")
    # Its names stay its own, whatever this process loads later; and it looks among its own first, for TensorFlow gives its
    # Abseil and protobuf to the whole process under the same names.
    library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW | os.RTLD_DEEPBIND)
    for name, result, arguments in _FUNCTIONS:
        function = getattr(library, "emberd_" + name)
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    if library.abi_version() != ABI:
        raise ImportError(f"{path} has version {library.abi_version()} of the interface; this package needs {ABI}")
    _keep_freed_memory()
    return library


def lib() -> Any:
    """The library, loaded at the first call. ForkedProcess in a child of a process that has used it."""
    if _State.forked:
        raise errors.ForkedProcess("emberd was used before this process was forked; start workers by spawn, or connect in "
                                   "the child process only")
    if _State.library is None:
        with _State.lock:
            if _State.library is None:
                _State.library, _State.process = _load(), os.getpid()
    return _State.library


def forked() -> bool:
    return _State.forked


def _after_fork() -> None:
    _State.forked = _State.library is not None
    _State.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Uncopied:
    """What has a handle of the library. A copy would free it a second time, so there is none."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"emberd: a {type(self).__name__} cannot be copied or pickled; copy the arrays that it gave, or make "
                        "another one")


class _Owned(Uncopied):
    """A handle, which is freed when neither an object nor a call in progress uses it any more; in a forked child, where
    nothing of it works, never."""

    __slots__ = ("_as_parameter_", "_free")

    def __init__(self, value: int, free: str) -> None:
        self._as_parameter_, self._free = value, free

    def __del__(self) -> None:
        # In a forked child garbage may be collected before `forked` is set: threading, for one, is told of the fork earlier.
        if _State is None:  # pyright: ignore[reportUnnecessaryComparison]  # at the end of the program
            return
        if not _State.forked and _State.library is not None and os.getpid() == _State.process:
            getattr(_State.library, self._free)(self._as_parameter_)


class Handle(Uncopied):
    """Owns a handle of the library until it is closed."""

    __slots__ = ("_owned", "__weakref__")

    def __init__(self, value: int, free: str) -> None:
        self._owned: Optional[_Owned] = _Owned(value, free)

    @property
    def open(self) -> bool:
        return self._owned is not None

    def get(self) -> _Owned:
        """For calls of the library, which keep it until they return, even if another thread closes this one."""
        owned = self._owned
        if _State.forked:
            lib()
        if owned is None:
            raise ValueError("this client, model, stream or program has been closed")
        return owned

    def close(self) -> None:
        self._owned = None


def refuse_kind(value: Any, what: str, allowed: str) -> TypeError:
    given = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    return TypeError(f"{what}: {given} is not allowed; it must be {allowed}")


def text(value: Any, what: str, *, optional: bool = False, path: bool = False) -> bytes:
    """A name, as C takes it. optional: None is none. path: it is that of a file."""
    if optional and value is None:
        return b""
    given: Any = os.fspath(value) if path and isinstance(value, os.PathLike) else value  # pyright: ignore
    if not isinstance(given, str):
        raise refuse_kind(given, what, "a str")
    if "\0" in given:
        raise ValueError(f"{what}: {given!r} is not allowed; a NUL would end it")
    try:
        return given.encode(errors="surrogateescape" if path else "strict")
    except UnicodeEncodeError:
        raise ValueError(f"{what}: {given!r} is not allowed; it cannot be encoded in UTF-8") from None


def whole(value: Any, what: str, low: int = 0, high: int = 2**63 - 1) -> int:
    """An integer, as C takes it: ctypes would cut off what does not fit. A bool is none: as padding_idx, True would be the id 1."""
    if isinstance(value, bool):
        raise refuse_kind(value, what, "an int")
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse_kind(value, what, "an int") from None
    if not low <= number <= high:
        raise errors.InvalidArgument(f"{what}: {number} is not allowed; it must be in [{low}, {high}]")
    return number


def choice(value: Any, what: str, allowed: Mapping[str, int]) -> int:
    if not isinstance(value, str) or value not in allowed:
        raise errors.InvalidArgument(f"{what}: {value!r} is not allowed; it must be one of {', '.join(map(repr, allowed))}")
    return allowed[value]


def real(value: Any, what: str) -> float:
    try:
        number = float(None if isinstance(value, (str, bytes)) else value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise refuse_kind(value, what, "a number") from None
    if not math.isfinite(number):
        raise errors.InvalidArgument(f"{what}: {number} is not allowed; it must be finite")
    return number


def milliseconds(seconds: Any, what: str, *, optional: bool = False) -> int:
    """Of a time-out. optional: None is 0."""
    if optional and seconds is None:
        return 0
    number = real(seconds, what)
    if not 0 <= number <= MOST_SECONDS:
        raise errors.InvalidArgument(f"{what}: {seconds} is not allowed; it must be in [0, {MOST_SECONDS}] seconds")
    return max(1, round(number * 1000))


def null() -> c_void_p:
    """An empty handle, which the library fills."""
    return c_void_p()


def check(error: Optional[int]) -> None:
    """Raises what an emberd_error* says; None is none."""
    if not error:
        return
    library = lib()
    code = library.error_code(error)
    message = library.error_message(error).decode("utf-8", "replace")
    library.error_free(error)
    raise errors.make(code, message)


# Calls that were interrupted, and updates on their way, with what their memory is: Python must not free it before the
# library has done with it.
_abandoned: List[Tuple[int, Any]] = []
_leases: List[Tuple[int, Any]] = []
_held_lock = threading.Lock()  # of who removes some; not to be waited for, see _sweep


def _sweep() -> None:
    # The handler of a signal runs anywhere, also where its own thread has the lock: it would wait without end. Whoever has it sweeps.
    if _held_lock.locked():
        return
    library = lib()

    def ended(call: int) -> bool:
        return bool(library.call_wait(call, 0))

    with _held_lock:
        for held, over, free in ((_abandoned, ended, library.call_free), (_leases, library.lease_released, library.lease_free)):
            for entry in [entry for entry in held if over(entry[0])]:
                held.remove(entry)  # first: where Ctrl-C comes between the two, nothing is freed twice
                free(entry[0])


def hold(lease: Optional[int], memory: Any) -> None:
    """Keeps `memory` alive until the library says that it is no longer read."""
    if lease:
        _leases.append((lease, memory))


def held() -> int:
    """How many updates or calls still hold memory of this process."""
    _sweep()
    return len(_abandoned) + len(_leases)


def text_of(text: Handle) -> Any:
    """What a text of the library says in JSON."""
    return json.loads(lib().text_string(text.get()))


class Call(Uncopied):
    """A call that has ended well, for its result. `memory` is what its arguments point at; `progress` is told how far it
    is."""

    def __init__(self, call: int, memory: Any = None, progress: Optional[Callable[[Any], object]] = None) -> None:
        self._handle: Optional[Handle] = None
        library = lib()
        try:
            ended = False
            while not ended:  # between two waits Python looks at signals
                ended = bool(library.call_wait(call, WAIT_MS))
                text = library.call_take_progress(call) if progress is not None else None
                if text and progress is not None:
                    progress(text_of(Handle(text, "text_free")))
        except BaseException:
            # Ctrl-C, or what `progress` raised. The call goes on by itself, and nobody hears of its end.
            _abandoned.append((call, memory))
            raise
        self._handle = Handle(call, "call_free")
        if _abandoned or _leases:
            _sweep()
        check(library.call_error(call))

    def take(self, kind: str) -> Handle:
        assert self._handle is not None
        value = getattr(lib(), "call_take_" + kind)(self._handle.get())
        assert value, kind
        return Handle(value, kind + "_free")

    def text(self) -> Any:
        return text_of(self.take("text"))

    def update(self) -> Update:
        assert self._handle is not None
        update = Update()
        lib().call_update(self._handle.get(), ctypes.byref(update))
        return update


def sweep_leases() -> None:
    """Frees the memory of updates that are over, oldest first, up to the first that is still read."""
    if _held_lock.locked():
        return
    library = lib()
    with _held_lock:
        while _leases and library.lease_released(_leases[0][0]):
            library.lease_free(_leases.pop(0)[0])
    if len(_leases) > 16:  # another stream's may be in the way
        _sweep()
