"""Does the next item fit the last ones? Sequences whose padding is no row, in a jitted function of JAX, with two tables in emberd.

usage: sequences_jax.py [--address HOST:PORT]

Without an address a cluster is started for the run. Each user likes one of four kinds of items, and 9 of 10 in a history are of it; half of the next items are.
"right" are held-out users.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import emberd
import emberd.jax

ITEMS, DIM, LAST, BATCH, STEPS, KINDS = 200, 16, 12, 128, 300, 4  # the kind of an item is its id modulo 4
PADDING = -1
# The learning rate of each table by step, as optax has schedules.
RATES = {"seen": optax.cosine_decay_schedule(0.05, STEPS), "next": optax.linear_schedule(0.05, 0.01, STEPS)}


def users(count, seed):
    """Histories of 4 to 12 items, the item that comes next, and whether it is of the user's kind."""
    random = np.random.default_rng(seed)
    kind = random.integers(0, KINDS, (count, 1))

    def items(chance, places):
        of = np.where(random.random((count, places)) < chance, kind, random.integers(0, KINDS, (count, places)))
        return (random.integers(0, ITEMS // KINDS, (count, places)) * KINDS + of).astype(np.int32)

    history, after = items(0.9, LAST), items(1 / 3, 1)
    history[np.arange(LAST) >= random.integers(4, LAST + 1, (count, 1))] = PADDING
    return {"seen": emberd.Sequences(history, padding_idx=PADDING), "next": after[:, 0]}, (after % KINDS == kind)[:, 0].astype(np.float32)


def rates_of(step):
    return {name: {"learning_rate": schedule(step)} for name, schedule in RATES.items()}


def scores_of(emb, bias, token, ids):
    found = emb.in_jit(token, ids, hyper=rates_of)  # where padding stands a row is zero, and none is updated
    count = (ids["seen"].ids != PADDING).sum(1, keepdims=True)
    return (found["seen"].sum(1) / count * found["next"]).sum(1) + bias


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a coordinator; default: a cluster is started")
    address = parser.parse_args().address
    with (emberd.connect(address) if address else emberd.local().connect()) as client:
        tables = [emberd.TableConfig(name, ITEMS, DIM, initializer=emberd.Normal(0.0, 0.3), optimizer=emberd.Adam()) for name in RATES]
        model = client.declare(emberd.ModelConfig("sequences-jax", tables, [emberd.FeatureConfig(name, name) for name in RATES],
                                                  plan=emberd.PlanConfig(auto_stack=False)))  # tables of a stack would share one rate
        emb = emberd.jax.Embedding(model, group="run")

        def loss_of(bias, token, ids, fits):
            return optax.sigmoid_binary_cross_entropy(scores_of(emb, bias, token, ids), fits).mean()

        step_of = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))
        bias = jnp.zeros(())
        with emb.typed_errors():  # an error is emberd's own, and not one of JAX
            for step in range(STEPS):
                loss, (gradient, _) = step_of(bias, emb.token(), *users(BATCH, step))
                bias -= 0.1 * gradient
        ids, fits = users(1000, STEPS)
        right = ((scores_of(emb, bias, emb.token(), ids) > 0) == fits).mean()
        try:
            with emb.typed_errors():  # JAX logs the error, too
                step_of(bias, emb.token(), {**ids, "next": ids["next"] + ITEMS}, fits)
        except IndexError as error:
            print(f"refused: {error}")
        emb.finish()
        print(f"sequences: loss={float(loss):.3f} right={float(right):.3f}")


if __name__ == "__main__":
    main()
