"""The click model with torchrec, as its documents have the parts: documents 1 to 3 of compared.md. It is not run here."""

import os

import torch
import torch.distributed
from data import BATCH, ITEMS, USERS, clicks
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


class Clicks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name="t_user", embedding_dim=16, num_embeddings=USERS, feature_names=["user"]),
            EmbeddingBagConfig(name="t_item", embedding_dim=16, num_embeddings=ITEMS, feature_names=["item"])])
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, ids):
        return self.net(self.ebc(ids).values()).squeeze(1)


os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
torch.distributed.init_process_group("gloo")
model = Clicks()
apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
model = DistributedModelParallel(model, device=torch.device("cpu"))
dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), lambda given: torch.optim.Adam(given, lr=0.01))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.from_numpy, clicks())), BATCH)
for epoch in range(2):
    for users, items, clicked in loader:
        ids = KeyedJaggedTensor(["user", "item"], torch.cat([users, items]), lengths=torch.ones(2 * len(users), dtype=torch.int32))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), clicked)
        loss.backward()
        dense.step()
        dense.zero_grad()
print(f"loss {float(loss):.3f}")
