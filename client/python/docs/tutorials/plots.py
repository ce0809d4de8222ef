"""What the tutorials draw; nothing, where matplotlib is not installed. Plots go to the folder that is the first argument, or to the current one."""

import os
import sys

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    plt = None


def draw(name, lines, x, y, at=None, log=False):
    """A plot with a line for each of `lines`, by its label; at: where its points are, default: 0, 1, 2 ..."""
    if plt is None:
        return
    plt.figure(figsize=(7, 4))
    for label, values in lines.items():
        plt.plot(range(len(values)) if at is None else at, values, "-" if len(values) > 10 else "o-", linewidth=0.9, label=label)
    if log:
        plt.xscale("log", base=2)
    plt.xlabel(x)
    plt.ylabel(y)
    plt.legend()
    plt.tight_layout()
    plt.savefig(os.path.join(sys.argv[1] if len(sys.argv) > 1 else ".", name), dpi=80)
    plt.close()
