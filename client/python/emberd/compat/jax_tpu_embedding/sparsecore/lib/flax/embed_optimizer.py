"""linen.embed_optimizer under the name that it had before."""

import sys

from .linen import embed_optimizer

sys.modules[__name__] = embed_optimizer
