"""One cluster for all tests of a file, and the environment in which the package finds what was built.

usage of each test file: test_….py FOLDER_OF_PROGRAMS LIBRARY
"""

import contextlib
import os
import sys
import unittest
import unittest.mock

if len(sys.argv) > 2 and os.path.isdir(sys.argv[1]):
    os.environ["EMBERD_PROGRAMS"], os.environ["EMBERD_LIBRARY"] = sys.argv[1:3]
    del sys.argv[1:3]
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import emberd  # noqa: E402
import emberd.errors  # noqa: E402

SGD = emberd.SGD(learning_rate=1.0)


def counting_model(name, tables=("t",), dim=4, rows=64, optimizer=SGD, initializer=emberd.Zeros(), **table):
    """Tables of zeros and SGD at rate 1: sums of small integers, which floats hold exactly."""
    return emberd.ModelConfig(
        name,
        tables=[emberd.TableConfig(one, rows, dim, combiner="sum", initializer=initializer, optimizer=optimizer, **table)
                for one in tables],
        features=[emberd.FeatureConfig(one, one) for one in tables])


@contextlib.contextmanager
def parts_of_rows(rows, columns):
    """What is read and assigned in parts has so many rows in each, where they have so many columns; and no message has more."""
    with unittest.mock.patch("emberd._loading.STRETCH_BYTES", rows * columns * 4), contextlib.ExitStack() as patches:
        calls = [patches.enter_context(unittest.mock.patch.object(emberd.Model, name, autospec=True, side_effect=getattr(emberd.Model, name)))
                 for name in ("read_rows", "assign_rows")]
        yield
    assert max((len(call.args[2]) for one in calls for call in one.call_args_list), default=0) == rows


@contextlib.contextmanager
def interrupted_sending(what, around=lambda send: send()):
    """The request is sent, and Ctrl-C comes meanwhile."""
    library = emberd._native.lib()
    send = getattr(library, f"stream_send_{what}")

    def interrupted(*arguments):
        around(lambda: send(*arguments))
        raise KeyboardInterrupt

    try:
        with unittest.mock.patch.object(library, f"stream_send_{what}", interrupted):
            yield
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not interrupted")


def has_torch():
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.__version__)


class ClusterTest(unittest.TestCase):
    """`self.client` reaches a cluster of two shards; `self.declare` makes a model of the test's own name."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = emberd.local(shards=2)
        cls.addClassCleanup(cls.cluster.close)
        cls.client = cls.cluster.connect()
        cls.addClassCleanup(cls.client.close)

    def declare(self, **options):
        return self.client.declare(counting_model(self.id().split(".")[-1], **options))


def main():
    unittest.main(module="__main__")
