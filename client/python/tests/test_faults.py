"""PyTorch trainers whose coordinator, process or connection is killed again and again: no step may be lost or doubled.

Three trainers train at once: two ranks of a synchronous group, and one that is pipelined. The rows that a step touches and
the sums that they reach tell which steps were made, and how often; what a lookup shows tells after which of them it ran.
Some steps are skipped, as by a GradScaler.

EMBERD_ROUNDS=100 is the long run; EMBERD_TEST_SEED chooses the moments.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
import unittest

from cluster import emberd, main
from proxy import Proxy
from test_train import coordinator

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed (deploy/packages.txt: python3-torch)")
    sys.exit(77)

import emberd.torch  # noqa: E402

ROWS = 64
PATIENCE = 120  # seconds without a step
TRAINERS = [("group", 0, 2, False), ("group", 1, 2, False), ("pipelined", 0, 1, True)]  # model, rank, size, pipelined
FAULTS = ("coordinator", "trainer", "connection")


def row_of(step):
    return 1 + step % (ROWS - 1)


def is_skipped(step):
    return step % 7 == 3


def sums_after(steps, size):
    """Row 0 counts all steps, and the others those of their own."""
    rows = [0] * ROWS
    for step in range(steps):
        if not is_skipped(step):
            for row in (0, row_of(step)):
                rows[row] -= size
    return rows


def train(address, model, rank, size, pipelined, board, place):
    """board: the step to stop at, 0: none yet; then the step that each trainer has reached."""
    torch.set_num_threads(1)
    with emberd.connect(address, deadline=PATIENCE, connect_timeout=PATIENCE) as client:
        table = emberd.TableConfig("t", ROWS, 4, combiner="sum", initializer=emberd.Zeros(),
                                   optimizer=emberd.SGD(learning_rate=1.0))
        ebc = emberd.torch.EmbeddingBagCollection([table], client=client, model=model, group="run", rank=rank, size=size,
                                                  pipelined=pipelined, patience=PATIENCE)
        sparse = ebc.optimizer()

        def batches():
            step = ebc.next_step
            while not 0 < board[0] <= step:
                yield {"ids": {"t": torch.tensor([0, row_of(step)])}, "step": step}
                step += 1

        for batch in emberd.torch.Prefetcher(batches(), ebc):
            step = batch["step"]
            found = ebc(batch["ids"])["t"]
            # One step less may have been made where a pipelined group sees it later.
            allowed = [sums_after(made, size) for made in range(max(0, step - int(pipelined)), step + 1)]
            seen = [float(found[0, 0]), float(found[1, 0])]
            assert seen in [[rows[0], rows[row_of(step)]] for rows in allowed], (model, step, seen)
            found.sum().backward()
            if not is_skipped(step):
                sparse.step()
            sparse.zero_grad()
            board[place] = step + 1
            time.sleep(0.002)
        ebc.finish()


class FaultsTest(unittest.TestCase):
    def setUp(self):
        self.context = multiprocessing.get_context("forkserver")  # torch is read once
        self.context.set_forkserver_preload(["torch", "emberd.torch"])
        self.board = self.context.RawArray("q", 1 + len(TRAINERS))
        self.processes = {}

    def start(self, place):
        self.processes[place] = self.context.Process(
            target=train, args=(self.address, *TRAINERS[place - 1], self.board, place), daemon=True)
        self.processes[place].start()

    def wait_until(self, done, what):
        end = time.monotonic() + PATIENCE
        while not done():
            self.assertLess(time.monotonic(), end, f"{what}; steps {list(self.board)}")
            for place, process in self.processes.items():
                self.assertIn(process.exitcode, (None, 0), f"trainer {TRAINERS[place - 1]} has failed")
            time.sleep(0.005)

    def inject(self, fault, choice, cluster, proxy):
        if fault == "coordinator":
            os.kill(coordinator(cluster), signal.SIGKILL)
        elif fault == "connection":
            proxy.cut()
        else:
            place = choice.choice(list(self.processes))
            self.processes[place].kill()
            self.processes[place].join()
            self.start(place)

    def test_no_step_is_lost_or_doubled(self):
        rounds, seed = int(os.environ.get("EMBERD_ROUNDS", "9")), int(os.environ.get("EMBERD_TEST_SEED", "1"))
        choice = random.Random(seed)
        print(f"seed {seed}, {rounds} rounds")
        with emberd.local(shards=2, processes=True) as cluster, Proxy(cluster.address) as proxy:
            self.address = proxy.address
            for place in range(1, len(TRAINERS) + 1):
                self.start(place)
            for number in range(rounds):
                fault = FAULTS[number % len(FAULTS)]
                reached = list(self.board)
                self.wait_until(lambda: all(now >= then + 3 for now, then in zip(self.board[1:], reached[1:])),
                                f"round {number}: not all trainers go on")
                time.sleep(choice.uniform(0, 0.05))
                self.inject(fault, choice, cluster, proxy)
            self.board[0] = steps = max(self.board) + 30 + is_skipped(max(self.board) + 29)
            for process in self.processes.values():
                made = None
                while process.is_alive() and made != list(self.board):
                    made = list(self.board)
                    process.join(PATIENCE)
            self.assertEqual([process.exitcode for process in self.processes.values()], [0] * len(TRAINERS))
            print(f"{steps} steps of each trainer")
            with cluster.connect() as client:
                for name, size in (("group", 2), ("pipelined", 1)):
                    model = client.model(name)
                    self.assertEqual(model.table("t")[:, 0].tolist(), sums_after(steps, size), name)


if __name__ == "__main__":
    main()
