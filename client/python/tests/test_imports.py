"""The library lives beside others that bring gRPC, protobuf or threads of their own, imported before or after it, and beside
workers of a DataLoader.

What this would catch: a symbol that leaks from one library into another, which ends the process; and a worker that hangs
because it was forked from a process that trains.
"""

import importlib.util
import os
import subprocess
import sys
import unittest

from cluster import ClusterTest, main

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed (deploy/packages.txt: python3-torch)")
    sys.exit(77)

PARTS = {
    "emberd": "import emberd; client = emberd.connect({address!r}); client.status()",
    "torch": "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()",
    "grpc": "import grpc; grpc.insecure_channel({address!r}).close()",
}
if importlib.util.find_spec("pyarrow"):  # Debian has none
    PARTS["pyarrow"] = "import pyarrow.compute; pyarrow.compute.sum(pyarrow.array([1, 2]))"
LOADER = """
import sys
import torch
import emberd, emberd.torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {{"ids": {{"t": i % 8}}}}

if __name__ == "__main__":
    client = emberd.connect({address!r})
    ebc = emberd.torch.EmbeddingBagCollection(
        [emberd.TableConfig("t", 8, 4, initializer=emberd.Zeros(), optimizer=emberd.SGD(learning_rate=1.0))],
        client=client, model="loader_{method}")
    sparse = ebc.optimizer()
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers={workers}, multiprocessing_context="{method}")
    for epoch in range(2):
        for batch in emberd.torch.Prefetcher(loader, ebc):
            ebc(batch["ids"])["t"].sum().backward()
            sparse.step()
    ebc.finish()
    print(ebc.model.table("t").sum())
"""


class ImportTest(ClusterTest):
    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "-B", *arguments], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def test_both_orders(self):
        for order in (list(PARTS), list(reversed(PARTS))):  # each before each other one
            script = "\n".join(PARTS[part].format(address=self.cluster.address) for part in order) + "\nclient.status()"
            done = self.run_script("-c", script)
            self.assertEqual(done.returncode, 0, (order, done.stderr))

    def test_workers_of_a_loader(self):
        for method, workers in (("fork", 2), ("spawn", 1)):  # which imports all anew
            path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"emberd_loader_{os.getpid()}.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(LOADER.format(address=self.cluster.address, method=method, workers=workers))
            self.addCleanup(lambda path=path: os.path.exists(path) and os.remove(path))
            done = self.run_script(path)
            self.assertEqual((done.returncode, done.stdout), (0, "-512.0\n"), done.stderr)


if __name__ == "__main__":
    assert torch.__version__
    main()
