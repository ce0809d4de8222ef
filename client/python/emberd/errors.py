"""The exceptions of the package: one class for each gRPC code, with the server's text unchanged.

Classes that have a counterpart in Python also derive from it: ``except ValueError`` catches InvalidArgument.
"""

from __future__ import annotations

from typing import Dict, Type


class Error(Exception):
    """The base of all. ``str(error)`` is the message of the server, or of the client for what cannot be sent."""

    code: int = 2  # gRPC's number
    name: str = "UNKNOWN"

    @property
    def message(self) -> str:
        """What went wrong, where, and what to do."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return self.message


class Cancelled(Error):
    """The call was cancelled, by this client or by the server."""

    code, name = 1, "CANCELLED"


class Unknown(Error):
    """Of a code that gRPC does not name."""

    code, name = 2, "UNKNOWN"


class InvalidArgument(Error, ValueError):
    """Malformed: a wrong name, type, shape or order, or a value that is not finite."""

    code, name = 3, "INVALID_ARGUMENT"


class DeadlineExceeded(Error, TimeoutError):
    """Not done within the time that the call had. Whether an update was applied is not known."""

    code, name = 4, "DEADLINE_EXCEEDED"


class NotFound(Error, LookupError):
    """An unknown model or table, or a batch that was already applied, was released, or has expired."""

    code, name = 5, "NOT_FOUND"


class AlreadyExists(Error):
    """Another model of this name is declared; the message names the first field that differs."""

    code, name = 6, "ALREADY_EXISTS"


class PermissionDenied(Error, PermissionError):
    """The token's role does not allow it."""

    code, name = 7, "PERMISSION_DENIED"


class ResourceExhausted(Error):
    """Over a budget or a limit; the message gives the figures needed and allowed."""

    code, name = 8, "RESOURCE_EXHAUSTED"


class FailedPrecondition(Error):
    """Not in this state: for instance a model that serves a checkpoint is to be changed, a group
    with active ranks is dropped, or a stream is asked for an answer that needs another request
    first."""

    code, name = 9, "FAILED_PRECONDITION"


class Aborted(Error):
    """Another rank of the group failed (the message names it and its reason), or the model was
    reset, restored, or dropped and declared again since the batch was looked up or the stream
    began."""

    code, name = 10, "ABORTED"


class OutOfRange(Error, IndexError):
    """An id or a row outside of its range."""

    code, name = 11, "OUT_OF_RANGE"


class Unimplemented(Error, NotImplementedError):
    """The server is older than this package, or is none of emberd's."""

    code, name = 12, "UNIMPLEMENTED"


class Internal(Error):
    """An answer that does not match its request, or a bug in the server."""

    code, name = 13, "INTERNAL"


class Unavailable(Error, ConnectionError):
    """No server can be reached, or it is stopping. The call was retried until its deadline."""

    code, name = 14, "UNAVAILABLE"


class DataLoss(Error):
    """A shard has lost its rows: restore the model from a checkpoint, reset it or drop it. Or a
    file of a checkpoint is damaged; the message names it."""

    code, name = 15, "DATA_LOSS"


class Unauthenticated(Error, PermissionError):
    """The token or the certificate is not known."""

    code, name = 16, "UNAUTHENTICATED"


class ForkedProcess(RuntimeError):
    """emberd was used before this process was forked, and its connections do not survive a fork.

    Start workers by ``spawn``, or connect in each worker only.
    """


BY_CODE: Dict[int, Type[Error]] = {
    kind.code: kind
    for kind in (Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists, PermissionDenied,
                 ResourceExhausted, FailedPrecondition, Aborted, OutOfRange, Unimplemented, Internal, Unavailable,
                 DataLoss, Unauthenticated)
}


def make(code: int, message: str) -> Error:
    return BY_CODE.get(code, Unknown)(message)
