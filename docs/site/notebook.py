"""The notebook: as a page, and run from top to bottom.

python -m docs.site.notebook                # run it; fail if a cell fails, or if the output differs from the stored one
python -m docs.site.notebook --write        # run it, and store its output in the notebook
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
VARYING = r"sha256:\w+|\d\.\de-\d+"  # in the output: digests, and errors, which depend on the machine


def notebook_page() -> str:
    """The notebook (nbformat 4) as Markdown: its cells of text, and its cells of code with their output."""
    return "\n".join(part for cell in _read()["cells"] for part in _parts(cell))


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return found


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [f"{source}\n"]
    printed = _printed(cell).rstrip()
    return [f"```python\n{source}\n```\n"] + ([f"```text\n{printed}\n```\n"] if printed else [])


def _printed(cell: dict[str, Any]) -> str:
    """The stored output of a cell of code."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(cells: list[dict[str, Any]]) -> list[str]:
    """Run cells of code in order, in one namespace, and return the output of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(cells, 1):
        with redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
        printed.append(out.getvalue())
    return printed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the output")
    args = parser.parse_args(argv)
    notebook = _read()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    printed = run(cells)
    if args.write:
        for number, (cell, text) in enumerate(zip(cells, printed), 1):
            output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [output] if text else []}
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0
    wrong = 0
    for number, (cell, text) in enumerate(zip(cells, printed), 1):
        if re.sub(VARYING, "", text) != re.sub(VARYING, "", _printed(cell)):
            print(f"cell {number} of code prints\n{text}and the notebook shows\n{_printed(cell)}")
            wrong += 1
    if wrong:
        print("`python -m docs.site.notebook --write` stores what is printed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
