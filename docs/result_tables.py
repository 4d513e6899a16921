"""The tables of docs/results, from its records: ``python docs/result_tables.py`` writes them into the pages.

``result_tables/pages.py`` describes them. A table is what stands between ``<!-- table: NAME -->`` and
``<!-- end of table -->``; its rows whose cells do not change stay as they are. With ``--check`` no page is changed.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from result_tables.pages import TABLES

from numpyro_fspace.experiments.records import read

PAGES = Path(__file__).parent / "results"
BEGIN, END = re.compile(r"<!-- table: (.*) -->"), "<!-- end of table -->"


def cells_of(line: str) -> tuple[str, ...]:
    """The cells of a row, without the spaces around them."""
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def updated(page: str, text: str, records: str | Path) -> str:
    """The text of a page with the tables that the records in a folder give.

    Raises:
        ValueError: the page does not have the tables that are described, or a run has two records.
    """
    lines, found, done = text.split("\n"), [], list[str]()
    while lines:
        done.append(line := lines.pop(0))
        if begin := BEGIN.fullmatch(line):
            name, table = begin[1], TABLES[page].get(begin[1])
            end = next((i for i, row in enumerate(lines) if row and not row.startswith("|")), -1)
            if table is None or lines[end] != END:
                raise ValueError(f"{page}.md: the table {name!r} is not described, or {END!r} does not follow it.")
            as_written = {cells_of(row): row for row in lines[:end]}
            path = Path(records) / f"{table.records or page}.jsonl"
            rows = table.rows_of(read(path) if path.exists() else [])
            done += ["", *(as_written.get(cells_of(row), row) for row in rows), ""]
            lines, found = lines[end:], [*found, name]
    if sorted(found) != sorted(TABLES[page]):
        raise ValueError(f"{page}.md has the tables {found}, and {[*TABLES[page]]} are described.")
    return "\n".join(done)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description="Write the tables of the results pages from the records.")
    parser.add_argument("page", nargs="*", metavar="PAGE", help=f"all, or of {', '.join(TABLES)}")
    parser.add_argument("--records", default=PAGES, metavar="FOLDER", help="folder of the records (docs/results)")
    parser.add_argument("--check", action="store_true", help="print what would change, and change nothing")
    asked = parser.parse_args(arguments)
    if unknown := [page for page in asked.page if page not in TABLES]:
        parser.error(f"unknown page {', '.join(unknown)}; choose from {', '.join(TABLES)}.")
    differs = False
    for page in asked.page or TABLES:
        path = PAGES / f"{page}.md"
        old = path.read_text(encoding="utf-8")
        new = updated(page, old, asked.records)
        if new != old and asked.check:
            differs = True
            names = (str(path), f"{path}, from the records")
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *names))
        elif new != old:
            path.write_text(new, encoding="utf-8")
            print(f"{page}: new tables")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
