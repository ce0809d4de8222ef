"""Files of rows as the public package safetensors sees them.

usage: open_with_safetensors.py WRITE_CHECKPOINT_SAMPLE    (the program of sample_main.cc)
"""

import os
import subprocess
import sys
import tempfile
import unittest

import numpy
import safetensors
import safetensors.numpy

PROGRAM = sys.argv.pop()
# Rows in the order in which the program writes them.
EXPECTED = numpy.array([[16 * row + column for column in range(16)] for row in (3, 4, 5, 1)], dtype=numpy.float32)


class OpenTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        subprocess.run([PROGRAM, cls.folder.name], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def test_rows_of_float32_and_float16(self):
        for dtype in ("float32", "float16"):
            tensors = safetensors.numpy.load_file(self.path(f"{dtype}.weights.p0001.safetensors"))
            self.assertEqual(set(tensors), {"values", "row_ranges"})
            self.assertEqual(tensors["values"].dtype, dtype)
            self.assertTrue(numpy.array_equal(tensors["values"].astype(numpy.float32), EXPECTED))
            self.assertEqual(tensors["row_ranges"].dtype, numpy.int32)
            self.assertEqual(tensors["row_ranges"].tolist(), [[3, 6], [1, 2]])

    # NumPy has no bfloat16, so it gets the bits.
    def test_rows_of_bfloat16(self):
        with open(self.path("bfloat16.weights.p0001.safetensors"), "rb") as file:
            tensors = dict(safetensors.deserialize(file.read()))
        values = tensors["values"]
        self.assertEqual((values["dtype"], list(values["shape"])), ("BF16", [4, 16]))
        bits = numpy.frombuffer(bytes(values["data"]), dtype="<u2").astype(numpy.uint32) << 16
        self.assertTrue(numpy.array_equal(bits.view(numpy.float32).reshape(4, 16), EXPECTED))

    def test_metadata(self):
        with safetensors.safe_open(self.path("float32.weights.p0001.safetensors"), framework="numpy") as file:
            self.assertEqual(file.metadata(), {
                "format": "emberd.checkpoint.1", "model": "m", "stack": "float32", "array": "weights",
                "partition": "1", "partitions": "2", "variable": "float32", "full_shape": "[20, 16]",
                "slice_spec": "20 16 10,10:0,16"})

    def test_a_file_without_rows(self):
        tensors = safetensors.numpy.load_file(self.path("empty.accumulator.p0000.safetensors"))
        self.assertEqual(tensors["values"].shape, (0, 1))
        self.assertEqual(tensors["row_ranges"].shape, (0, 2))


if __name__ == "__main__":
    unittest.main()
