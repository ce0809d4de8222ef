"""A word model in JAX and Flax with its table on a cluster, from the first lookup to the cost on chips.

Each `# %%` begins a cell: open this file as a notebook (VS Code, Jupyter with jupytext), or run it as it stands.

usage: tutorial.py [FOLDER]     plots go to FOLDER, learning.png, hot_rows.png and chips.png, if matplotlib is installed

It needs `pip install "emberd[jax,flax]" matplotlib`.
"""

# %% [markdown]
# ## A cluster
#
# `emberd.local()` starts the real server in a child process, with two shards. In production it runs elsewhere, and
# `emberd.connect("host:7400")` takes its place; nothing else changes.

# %%
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import emberd
import emberd.jax.nnx

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

FOLDER = sys.argv[1] if len(sys.argv) > 1 and os.path.isdir(sys.argv[1]) else tempfile.mkdtemp(prefix="emberd_tutorial_")


def show(name):
    """Saves the plot that has been drawn."""
    plt.tight_layout()
    plt.savefig(os.path.join(FOLDER, name), dpi=100)
    plt.close()


cluster = emberd.local(shards=2)
client = cluster.connect()
print(f"cluster: emberd {client.status()['version']}, {len(client.status()['shards'])} shards")

# %% [markdown]
# ## The data
#
# 22 sonnets of Shakespeare. The model predicts a word from the 16 words before it. A guess by frequency alone would have a loss
# of the *entropy* of the words, in nats: a model with a lower loss has learned from the words before.

# %%
SEQUENCE, BATCH, WIDTH, STEPS = 16, 32, 128, 240
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "sonnets.txt"), encoding="utf-8") as file:
    words = re.findall(r"[a-z'-]+", file.read().lower())
vocabulary = [word for word, _ in Counter(words).most_common()]
numbers = np.array([vocabulary.index(word) for word in words], np.int32)
share = np.bincount(numbers) / len(numbers)
entropy = float(-(share * np.log(share)).sum())
print(f"data: {len(words)} words, {len(vocabulary)} different ones, entropy {entropy:.3f}")

random = np.random.default_rng(0)


def batch():
    begin = random.integers(0, len(numbers) - SEQUENCE, BATCH)
    return {"ids": {"word": numbers[begin[:, None] + np.arange(SEQUENCE)].reshape(-1)}, "next": numbers[begin + SEQUENCE]}


batches = [batch() for _ in range(STEPS)]

# %% [markdown]
# ## The table
#
# A description says which tables there are, which features look them up, and how they learn. `declare` creates the tables; if
# they exist already, it finds them, and training continues from their rows.

# %%
config = emberd.ModelConfig(
    "tutorial",
    tables=[emberd.TableConfig("words", vocabulary_size=1024, embedding_dim=WIDTH, combiner="sum",
                               initializer=emberd.Normal(0.0, 1.0), optimizer=emberd.SGD(learning_rate=0.05))],
    features=[emberd.FeatureConfig("word", "words", batch_size=BATCH * SEQUENCE)], seed=1)
model = client.declare(config)
before = model.table("words")
print(f"table: {before.shape[0]} rows of {before.shape[1]}")

# %% [markdown]
# ## The model
#
# `emberd.jax.nnx.Embed` is a layer: ids in, rows out. Under `nnx.value_and_grad` the forward pass receives the rows and the
# backward pass sends their gradients, and the cluster applies the update. `prefetch` sends the ids of the next batch ahead.

# %%
embedding = emberd.jax.Embedding(model, group="tutorial")


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = emberd.jax.nnx.Embed(embedding)
        self.hidden = nnx.Linear(SEQUENCE * WIDTH, WIDTH, rngs=rngs)
        self.output = nnx.Linear(WIDTH, len(vocabulary), rngs=rngs)

    def __call__(self, ids, step=None):
        rows = self.embed(ids, step)["word"]
        return self.output(self.hidden(rows.reshape(-1, SEQUENCE * WIDTH)))


def loss_of(network, batch, step=None):
    return optax.softmax_cross_entropy_with_integer_labels(network(batch["ids"], step), batch["next"]).mean()


@nnx.jit
def train_step(network, optimizer, batch, step):
    loss, gradients = nnx.value_and_grad(loss_of)(network, batch, step)
    optimizer.update(network, gradients)
    return loss


network = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(network, optax.sgd(0.05), wrt=nnx.Param)
losses = np.array(jnp.stack([train_step(network, optimizer, batch, step) for step, batch in embedding.prefetch(batches)]))
embedding.finish()
print(f"training: loss {losses[0]:.3f} at first, {losses[-20:].mean():.3f} at the end")

# %% [markdown]
# ## The learning curve

# %%
if plt:
    plt.figure(figsize=(7, 4))
    plt.plot(losses, linewidth=0.8, label="loss of each step")
    plt.axhline(entropy, color="gray", linestyle="--", label="guessing by frequency")
    plt.xlabel("step")
    plt.ylabel("nats")
    plt.legend()
    show("learning.png")

# %% [markdown]
# ## Hot rows
#
# Few words make most lookups. The rows of frequent words move farthest; a row that is never looked up is never touched, and
# costs no time at all. `read_rows` and `table` show rows as they are on the cluster now.

# %%
lookups = np.bincount(np.concatenate([one["ids"]["word"] for one in batches]), minlength=1024)
moved = np.linalg.norm(model.table("words") - before, axis=1)
hottest = np.argsort(-lookups)[:10]
print("hot rows: " + ", ".join(f"{vocabulary[row]} {lookups[row]}" for row in hottest))
print(f"hot rows: the first 10 make {100 * lookups[hottest].sum() / lookups.sum():.0f} % of the lookups; "
      f"{int((moved == 0).sum())} rows were never touched")
if plt:
    plt.figure(figsize=(7, 4))
    seen = lookups > 0
    plt.loglog(lookups[seen], moved[seen], ".", markersize=3)
    for row in hottest[:5]:
        plt.annotate(vocabulary[row], (lookups[row], moved[row]))
    plt.xlabel("lookups of the row")
    plt.ylabel("how far it has moved")
    show("hot_rows.png")

# %% [markdown]
# ## What it costs on chips
#
# The cluster lays rows out as the SparseCores of TPUs do, so its planner says what each chip would hold (a TPU v6e has 2 SparseCores):
# here of the same table with 50 million words and Adagrad, whose accumulator doubles it. No chip is needed for that.

# %%
large = emberd.ModelConfig(
    "large", tables=[emberd.TableConfig("words", 50_000_000, WIDTH, combiner="sum", optimizer=emberd.Adagrad(learning_rate=0.05))],
    features=[emberd.FeatureConfig("word", "words", batch_size=BATCH * SEQUENCE)])
with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    file.write(large.to_json())
    file.flush()
    chips, gigabytes = [1, 2, 4, 8, 16, 32], []
    for count in chips:
        # From the wheel there is the command emberctl.
        argv = [str(emberd._native.program_path("emberctl")), "--json", "plan", "--model", file.name, "--shards", str(count),
                "--sparsecores", "2"]
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)  # status 1: more than this machine has
        gigabytes.append(json.loads(said.stdout)["memory"]["shard_bytes"] / 2 ** 30)
for count, one in zip(chips, gigabytes):
    print(f"chips: {count:2d} hold {one:6.2f} GiB each")
if plt:
    plt.figure(figsize=(7, 4))
    plt.loglog(chips, gigabytes, "o-", base=2)
    plt.axhline(32, color="gray", linestyle="--", label="HBM of a v6e, 32 GiB")
    plt.xlabel("chips")
    plt.ylabel("GiB on each")
    plt.legend()
    show("chips.png")

# %% [markdown]
# ## The end
#
# Next steps would be a checkpoint (`model.save_checkpoint`, on a cluster with a folder) and lookups without training. The end
# of the program stops the server that was started above.

# %%
score = float(nnx.jit(loss_of)(network, batches[-1]))
print(f"evaluation: loss {score:.3f}, and no step was made: the next is {embedding.next_step}")
embedding.finish()
client.close()
cluster.close()
if plt:
    print(f"plots: {FOLDER}")
