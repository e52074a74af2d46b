"""`python -m benchmarks`: run every benchmark and print one table. `--write` puts it into docs/performance.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import engine
from benchmarks.tables import machine, table

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
MARK = "<!-- the table below is written by `python -m benchmarks --write` -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where the logs are written; its disk is measured")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    given = parser.parse_args()
    rows = engine.run(given.directory)
    text = f"{machine(given.directory)}\n\n{table(rows)}\n"
    print(text)
    if given.write:
        page = PAGE.read_text("utf-8")
        PAGE.write_text(page[: page.index(MARK)] + f"{MARK}\n\n{text}", "utf-8")


if __name__ == "__main__":
    main()
