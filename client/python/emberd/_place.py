"""The cluster that a layer without a client uses."""

from __future__ import annotations

import atexit
import math
import os
from typing import Optional, Sequence

from . import _native, errors
from .client import Client, Model, connect, open_client
from .local import LocalCluster, local

_client: Optional[Client] = None
_cluster: Optional[LocalCluster] = None


def planned_samples(shape: Sequence[Optional[int]]) -> Optional[int]:
    """FeatureConfig.batch_size of activations of a shape, without their last dimension; None: it is not known."""
    known = [one for one in shape if one]
    return min(math.prod(known), 2**31 - 1) if len(known) == len(shape) > 0 else None


def default_client() -> Client:
    """Of the cluster at the addresses in EMBERD_ADDRESS ("host:7400,other:7400"), or of one that is started and ends with this
    process."""
    global _client, _cluster
    if _client is None:
        address = os.environ.get("EMBERD_ADDRESS")
        if address:
            _client = connect(address.split(","))
        else:
            _cluster = local(shards=2)
            atexit.register(_cluster.close)
            _client = _cluster.connect()
        atexit.register(_client.close)
    return _client


def checked(client: Optional[Client]) -> Optional[Client]:
    """A client that a layer was given."""
    if client is not None and not isinstance(client, Client):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _native.refuse_kind(client, "client", "an emberd.Client, as cluster.connect() and emberd.connect(addresses) give it")
    return client


def serves(model: Model, trained: str) -> bool:
    """Whether it is for lookups alone, of a checkpoint of this model."""
    if any(table.optimizer != "none" for table in model.tables.values()):
        return False
    return any(one.name == model.name and one.serves.startswith(f"{trained}/") for one in model.client.models())


def find_again(client: Optional[Client], addresses: Sequence[str], model: str) -> Client:
    """Of the cluster where the tables of a saved layer are: a client that is given; the one at EMBERD_ADDRESS; one of this process
    to these addresses; or a new one. The tables must be there: new ones would be untrained."""
    address = os.environ.get("EMBERD_ADDRESS")
    there = client.addresses if client else address.split(",") if address else addresses
    try:
        client = client or open_client(there) or connect(there, connect_timeout=5.0)
        client.model(model)
    except errors.Error as error:
        raise type(error)(
            f"the tables of this layer are model {model!r} of the cluster at {', '.join(addresses)}; at {', '.join(there)} they "
            f"cannot be found: {error}. Start that cluster, or set EMBERD_ADDRESS to one onto which a checkpoint of the model was "
            "restored, or connect to it, with its token, before you load") from error
    return client
