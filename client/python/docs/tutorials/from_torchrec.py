"""Moving from torchrec: an EmbeddingBagCollection whose tables are on a cluster.

It needs `pip install "emberd[torch]"`, and matplotlib for its plot; torchrec need not be installed.
"""

# %% [markdown]
# ## The imports
#
# They are what changes. With torchrec they were
#
#     from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
#     from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

# %%
import torch
from plots import draw

from emberd.compat.torchrec import (EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor, KeyedTensor,
                                    PoolingType, apply_optimizer_in_backward)

# %% [markdown]
# ## The model
#
# It is as it was. The cluster is the one at `EMBERD_ADDRESS`; without that, one is started for this process.

# %%
ROWS, DIM, BATCH = 1000, 16, 256
torch.manual_seed(0)
bags = EmbeddingBagCollection(tables=[
    EmbeddingBagConfig(name="t_user", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["user"], pooling=PoolingType.SUM),
    EmbeddingBagConfig(name="t_tags", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["tags"], pooling=PoolingType.MEAN)])
apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.3})
net = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
dense = torch.optim.Adam(net.parameters(), lr=0.01)

# %% [markdown]
# ## The same model in plain PyTorch
#
# To compare with: `torch.nn.EmbeddingBag` with the rows that the tables have on the cluster. `state_dict` reads them.

# %%
state = bags.state_dict()
plain = {name: torch.nn.EmbeddingBag.from_pretrained(state[f"embedding_bags.t_{name}.weight"].clone(), freeze=False, mode=mode)
         for name, mode in (("user", "sum"), ("tags", "mean"))}
plain_net = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
plain_net.load_state_dict(net.state_dict())
plain_dense = torch.optim.Adam(plain_net.parameters(), lr=0.01)
plain_sparse = torch.optim.Adagrad([one.weight for one in plain.values()], lr=0.3)


def batch(seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.ones(BATCH, dtype=torch.int64), torch.randint(1, 5, (BATCH,), generator=random)])
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=random)
    return KeyedJaggedTensor(["user", "tags"], values, lengths=lengths), (values[:BATCH] % 2).float()


# %% [markdown]
# ## Training
#
# `backward` updates the tables: there is no step for them. The two curves lie on each other.

# %%
losses, plain_losses = [], []
for step in range(120):
    features, label = batch(step)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(net(bags(features).values())[:, 0], label)
    dense.zero_grad()
    loss.backward()
    dense.step()
    losses.append(float(loss))

    found = [plain[key](features[key].values(), features[key].offsets()[:-1]) for key in ("user", "tags")]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(plain_net(torch.cat(found, 1))[:, 0], label)
    for one in (plain_dense, plain_sparse):
        one.zero_grad()
    loss.backward()
    for one in (plain_dense, plain_sparse):
        one.step()
    plain_losses.append(float(loss))
apart = max(abs(one - other) for one, other in zip(losses, plain_losses))
print(f"from torchrec: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end; plain PyTorch is at most {apart:.1e} away")
draw("from_torchrec_learning.png", {"on the cluster": losses, "torch.nn.EmbeddingBag": plain_losses}, "step", "loss")

# %% [markdown]
# ## Groups of features
#
# As in torchrec: `KeyedTensor.regroup` puts the features of each group side by side, here the tags for one part of a model and both for another.

# %%
bags.eval()
features, _ = batch(0)
tags, both = KeyedTensor.regroup([bags(features)], [["tags"], ["tags", "user"]])
print(f"groups: {list(tags.shape)} and {list(both.shape)}; the tags of both are equal: {torch.equal(tags, both[:, :DIM])}")
bags.finish()

# %% [markdown]
# ## Rows that are not pooled
#
# An `EmbeddingCollection` gives a `JaggedTensor` for each feature: a row for each id, and the lengths that the ids came with. Here each sample
# has a history of ids; the model looks at the last one of them.

# %%
items = EmbeddingCollection(tables=[EmbeddingConfig(name="t_item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["history"])])
apply_optimizer_in_backward(torch.optim.Adam, items.parameters(), {"lr": 0.05})
head = torch.nn.Linear(DIM, 1)
for step in range(60):
    lengths = torch.randint(1, 6, (BATCH,))
    ids = torch.randint(ROWS, (int(lengths.sum()),))
    history = items(KeyedJaggedTensor(["history"], ids, lengths=lengths))["history"]
    last = history.offsets()[1:] - 1
    loss = torch.nn.functional.binary_cross_entropy_with_logits(head(history.values()[last])[:, 0], (ids[last] % 2).float())
    loss.backward()
    first = loss.item() if step == 0 else first
items.finish()
print(f"history: {sum(history.lengths())} rows of {len(history.lengths())} samples; loss {first:.3f} at first, {loss.item():.3f} at the end")
