"""Write the tables of `docs/performance.md` from the figures that the benchmarks have left.

    python bench/report.py FOLDER

FOLDER holds `overhead.json` and the others. What stands between a pair of comments,
`<!-- bench: NAME -->` and `<!-- end -->`, is replaced; what has no figures stays.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from compare import WORDS, cells, gate_cells

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PLACE = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(folder: Path) -> None:
    """Replace each part that has figures."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(PLACE.sub(lambda found: _replaced(found, folder), page), "utf-8")


def _replaced(found: re.Match[str], folder: Path) -> str:
    file = folder / f"{found[2]}.json"
    if not file.exists():
        return found[0]
    figures = json.loads(file.read_text("utf-8"))
    facts = ", ".join(f"{key} {value}" for key, value in figures["machine"].items())
    trial = " (a trial with few rounds)" if figures["quick"] else ""
    tables = "\n\n".join(map(_markdown, figures["tables"]))
    return f"{found[1]}\n{tables}\n\nMeasured{trial} with {facts}.\n\n{found[3]}"


def _markdown(table: dict[str, Any]) -> str:
    title = table["title"]
    parts = [f"**{title[:1].upper()}{title[1:]}** ({table['unit']})"]
    parts += [_lines(part) for part in (cells(table["rows"]), gate_cells(table.get("gates", [])))]
    return "\n\n".join(filter(None, parts))


def _lines(lines: list[list[str]]) -> str:
    if not lines:
        return ""
    head, *rows = lines
    rule = ["---" if i < WORDS else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
