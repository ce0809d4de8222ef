"""Runs a tutorial cell by cell and writes NAME.md beside its plots: the text, the code, and what the code printed and drew.

usage: render.py FOLDER [SOURCE]

SOURCE: by default tutorial.py. FOLDER is `docs`, or `docs/tutorials` for those there, to renew what the repository shows.
"""

import ast
import contextlib
import io
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def cells(source):
    """(is it text, lines without the markers, lines above them) of each cell; the module's docstring is not one."""
    docstring, *parts = re.split(r"^# %%", source, flags=re.MULTILINE)
    above = docstring.count("\n")
    for part in parts:
        kind, _, body = part.partition("\n")
        text = kind.strip() == "[markdown]"
        yield text, re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip() if text else body.strip(), above + 1
        above += part.count("\n")


def render(folder, path):
    with open(path, encoding="utf-8") as file:
        source = file.read()
    name = os.path.splitext(os.path.basename(path))[0]
    parts = ["# " + ast.get_docstring(ast.parse(source)).split("\n")[0].rstrip("."),
             f"Made by `render.py` from [`{name}.py`]({name}.py), which runs as it stands."]
    sys.argv = [path, folder]
    sys.path.insert(0, os.path.dirname(path))
    scope = {"__name__": "__main__", "__file__": path}
    for text, body, above in cells(source):
        if text:
            parts.append(body)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * above + body, path, "exec"), scope)  # tf.function reads the lines of its functions in the file
        parts.append(f"```python\n{body}\n```")
        lines = [line for line in printed.getvalue().splitlines() if folder not in line]
        if lines:
            parts.append("```text\n" + "\n".join(lines) + "\n```")
        parts += [f"![{plot}]({plot}.png)" for plot in re.findall(r'^ *(?:show|draw)\("(\w+)\.png"', body, re.MULTILINE)]
    with open(os.path.join(folder, f"{name}.md"), "w", encoding="utf-8") as file:
        file.write("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not os.path.isdir(sys.argv[1]):
        sys.exit(__doc__)
    render(os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2] if len(sys.argv) == 3 else os.path.join(HERE, "tutorial.py")))
