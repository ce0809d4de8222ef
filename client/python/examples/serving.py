"""Scores for requests that come one by one, on asyncio: the tables of the newest checkpoint are served, and a newer one takes their place
without a failed request.

usage: serving.py [--requests N]

A cluster is started for the run, and a model is trained on it meanwhile. A web server calls `Scorer.score` in a handler; with FastAPI:

    @app.get("/score")
    async def score(user: int, item: int):
        return await scorer.score(user, item)
"""

import argparse
import asyncio
import tempfile

import numpy as np

import emberd
import emberd.aio

USERS = ITEMS = 200
CONFIG = emberd.ModelConfig("scores", tables=[emberd.TableConfig(name, USERS, 8, initializer=emberd.Normal(0.0, 0.1)) for name in ("user", "item")],
                            features=[emberd.FeatureConfig(name, name) for name in ("user", "item")], optimizer=emberd.Adagrad(learning_rate=0.2))


def train(model, steps, seed):
    """A user likes the items whose number is odd or even as theirs: scores go to 1 and 0."""
    random = np.random.default_rng(seed)
    with model.train("scores") as stream:
        for _ in range(steps):
            ids = {"user": random.integers(USERS, size=256), "item": random.integers(ITEMS, size=256)}
            found = stream.lookup(ids)
            score = 1 / (1 + np.exp(-(found["user"] * found["item"]).sum(1)))
            error = (score - ((ids["user"] + ids["item"]) % 2 == 0))[:, None]
            stream.update({"user": error * found["item"], "item": error * found["user"]})
        return stream.next_step


class Scorer:
    """Requests that come at the same time go to the cluster as one batch."""

    def __init__(self, model, most=256):
        self.model, self.most, self.waiting, self.batches = model, most, asyncio.Queue(), 0

    async def score(self, user, item):
        """The chance that this user likes this item."""
        answer = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((user, item, answer))
        return await answer

    async def run(self):
        while True:
            batch = [await self.waiting.get()]
            while not self.waiting.empty() and len(batch) < self.most:
                batch.append(self.waiting.get_nowait())
            users, items, answers = zip(*batch)
            try:
                found = await self.model.lookup({"user": np.array(users), "item": np.array(items)})
                results = 1 / (1 + np.exp(-(found["user"] * found["item"]).sum(1)))
                for answer, score in zip(answers, results):
                    if not answer.done():  # the caller may have gone
                        answer.set_result(float(score))
            except (emberd.Error, ValueError) as error:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error)
            self.batches += 1


async def serve(address, requests):
    async with await emberd.aio.connect(address) as client:
        trained = await client.declare(CONFIG)
        right = []
        for version in range(2):  # an hour apart, for instance
            await asyncio.to_thread(train, trained.blocking, 60, version)
            await trained.save_checkpoint(f"version-{version}")
            live = await client.serve("scores", serve_as="scores-live")
            scorer = Scorer(live)
            loop = asyncio.create_task(scorer.run())
            random = np.random.default_rng(9)
            asked = [(int(random.integers(USERS)), int(random.integers(ITEMS))) for _ in range(requests)]
            scores = await asyncio.gather(*(scorer.score(*one) for one in asked))
            loop.cancel()
            right.append(np.mean([(score > 0.5) == ((user + item) % 2 == 0) for score, (user, item) in zip(scores, asked)]))
            print(f"serving {(await live.statistics()).serves}: right={right[-1]:.3f}, {requests} requests in {scorer.batches} batches")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, emberd.local(shards=2, data=folder) as cluster:
        asyncio.run(serve(cluster.address, options.requests))


if __name__ == "__main__":
    main()
