"""`python -m benchmarks`: run the benchmarks and print their tables. `--write` puts them into the pages of docs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import engine, imports, log, peers, stores
from benchmarks.tables import Row, machine, table

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- the table below is written by `python -m benchmarks --write` -->"
PEERS_MARK = "<!-- the table below is written by `python -m benchmarks --peers --write` -->"
STORES_MARK = "<!-- the table below is written by `python -m benchmarks --stores --write` -->"
PAGES = {MARK: "performance.md", PEERS_MARK: "performance.md", STORES_MARK: "scaling.md"}

OWN: dict[str, Callable[[Path], list[Row]]] = {"engine": engine.run, "log": log.run, "imports": imports.run}
PEERS, STORES = "peers", "stores"


def put(page: str, mark: str, text: str) -> str:
    """The page with `text` between the mark and the next heading."""
    head, rest = page.split(mark, 1)
    end = rest.find("\n## ")
    return f"{head}{mark}\n\n{text}{rest[end:] if end >= 0 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=Path.cwd(), help="where the logs are written; its disk is measured"
    )
    parser.add_argument("--peers", action="store_true", help="measure the peers as well, which are installed for it")
    parser.add_argument("--stores", action="store_true", help="measure the shared stores as well, on servers of ours")
    parser.add_argument("--only", choices=[*OWN, PEERS, STORES], help="measure nothing else")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md, docs/scaling.md")
    given = parser.parse_args()
    if given.write and given.only in OWN:
        parser.error("--write wants a whole table: leave out --only, or take --only peers or --only stores")
    chosen = [name for name in OWN if given.only in (None, name)]
    tables: dict[str, str] = {}
    if chosen:
        rows = [row for name in chosen for row in OWN[name](given.directory)]
        tables[MARK] = f"{machine(given.directory)}\n\n{table(rows)}\n"
        print(tables[MARK])
    if given.peers or given.only == PEERS:
        tables[PEERS_MARK] = f"{machine(given.directory)}\n\n{peers.table(peers.run(given.directory))}\n"
        print(tables[PEERS_MARK])
    if given.stores or given.only == STORES:
        tables[STORES_MARK] = f"{machine(given.directory)}\n\n{table(stores.run(given.directory))}\n"
        print(tables[STORES_MARK])
    if given.write:
        for mark, text in tables.items():
            page = DOCS / PAGES[mark]
            page.write_text(put(page.read_text("utf-8"), mark, text), "utf-8")


if __name__ == "__main__":
    main()
