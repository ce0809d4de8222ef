"""Runs tutorial.py cell by cell and writes tutorial.md beside its plots: the text, the code, and what the code printed and drew.

usage: render.py FOLDER     FOLDER is `docs` itself to renew what the repository shows
"""

import contextlib
import io
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "tutorial.py")


def cells(source):
    """(is it text, lines without the markers) of each cell; the module's docstring is not one."""
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        text = kind.strip() == "[markdown]"
        yield text, re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip() if text else body.strip()


def render(folder):
    with open(SOURCE, encoding="utf-8") as file:
        source = file.read()
    parts = ["# A word model with its table on a cluster",
             "Made by `render.py` from [`tutorial.py`](tutorial.py), which runs as it stands."]
    sys.argv = [SOURCE, folder]
    scope = {"__name__": "__main__", "__file__": SOURCE}
    for text, body in cells(source):
        if text:
            parts.append(body)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, SOURCE, "exec"), scope)
        parts.append(f"```python\n{body}\n```")
        lines = [line for line in printed.getvalue().splitlines() if folder not in line]
        if lines:
            parts.append("```text\n" + "\n".join(lines) + "\n```")
        parts += [f"![{name}]({name}.png)" for name in re.findall(r'^ *show\("(\w+)\.png"\)', body, re.MULTILINE)]
    with open(os.path.join(folder, "tutorial.md"), "w", encoding="utf-8") as file:
        file.write("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit(__doc__)
    render(os.path.abspath(sys.argv[1]))
