"""The cluster that a layer without a client uses."""

from __future__ import annotations

import atexit
import os
from typing import Optional

from .client import Client, connect
from .local import LocalCluster, local

_client: Optional[Client] = None
_cluster: Optional[LocalCluster] = None


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
