"""The cluster of layers that were given no client."""

from __future__ import annotations

import os
from typing import Optional

from .client import Client, connect
from .local import LocalCluster, local

_client: Optional[Client] = None
_cluster: Optional[LocalCluster] = None


def default_client() -> Client:
    """A client of the cluster at the address in EMBERD_ADDRESS, or of one that is started and ends with this process."""
    global _client, _cluster
    if _client is None:
        address = os.environ.get("EMBERD_ADDRESS")
        if address:
            _client = connect(address)
        else:
            _cluster = local(shards=2)
            _client = _cluster.connect()
    return _client
