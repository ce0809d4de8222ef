"""The peer of step_bench: FBGEMM's table-batched embeddings with exact Adagrad, on one thread.

Usage and output are those of torch_steps.py. A step is forward, and backward with a given gradient,
which applies the update, too. Exits with status 3 where fbgemm_gpu is not installed.
"""

import sys

from torch_steps import median_seconds, read_batches, torch

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


def make_tables(rows, width):
    """One table with all rows, values and slots as in torch_steps.py.

    What is fairer to FBGEMM was tried with the batches of step_bench. With a table for each of the
    26 features a step takes 3 % longer (1 id each) or as long (20 ids), so it is one table.
    Checking ids takes 1 or 2 %, so they are not checked.
    """
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.01,
        eps=1e-10,  # as PyTorch has it
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    tables.split_embedding_weights()[0].fill_(0.01)
    tables.split_optimizer_states()[0][0].fill_(0.1)
    return tables


def main():
    rows, width = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    tables = make_tables(rows, width)
    for name, ids, begins, gradient in read_batches(width):
        offsets = torch.cat([begins, torch.tensor([len(ids)])])

        def forward():
            with torch.no_grad():
                tables(ids, offsets)

        def step():
            tables(ids, offsets).backward(gradient)

        print(name, median_seconds(forward), median_seconds(step), flush=True)


if __name__ == "__main__":
    main()
