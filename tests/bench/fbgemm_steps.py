"""The peer of step_bench: FBGEMM's table-batched embeddings with exact Adagrad.

Usage and output are those of torch_steps.py. A step is forward, and backward with a given gradient, which applies the
update, too. Exits with status 3 where fbgemm_gpu is not installed.
"""

import sys

from torch_steps import measure, torch

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except ImportError:
    sys.exit(3)


class Bags:
    """Tables with values and slots as those of torch_steps.py. Ids are not checked, which would take 1 or 2 %."""

    def __init__(self, rows, width, tables):
        self.rows, self.width, self.tables = rows, width, tables
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows // tables, width, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=0.01,
            eps=1e-10,  # as PyTorch has it
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        for weights in self.module.split_embedding_weights():
            weights.fill_(0.01)
        for (slot,) in self.module.split_optimizer_states():
            slot.fill_(0.1)

    def works(self, batch):
        """(forward, step) as functions. The module takes table after table, and gives their activations side by side."""
        parts = batch.of_tables(self.rows, self.tables)
        ids = torch.cat([ids for ids, _, _ in parts])
        offsets = torch.cat([batch.begins, torch.tensor([len(ids)])])
        gradient = torch.cat([gradient for _, _, gradient in parts], dim=1)

        def forward():
            with torch.no_grad():
                self.module(ids, offsets)

        def step():
            self.module(ids, offsets).backward(gradient)

        return forward, step


if __name__ == "__main__":
    measure(Bags)
