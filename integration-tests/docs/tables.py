"""The generated parts of the documentation: `python tables.py` says which pages are out of date, `--write` mends them.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a module `table_NAME.py` beside
this one, whose `table()` returns the text.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PART = re.compile(r"(?P<head><!-- generated: (?P<name>\w+) -->\n).*?(?P<foot>\n<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
    """The page with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        made = importlib.import_module(f"table_{match['name']}").table()
        return f"{match['head']}\n{made.strip()}\n{match['foot']}"

    return PART.sub(part, text)


def pages() -> list[Path]:
    """The pages that have generated parts."""
    return [page for page in sorted(ROOT.glob("docs/**/*.md")) if PART.search(page.read_text("utf-8"))]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default: every page with a generated part")
    parser.add_argument("--write", action="store_true", help="write what has changed")
    given = parser.parse_args(argv)
    stale = 0
    for page in given.pages or pages():
        text = page.read_text("utf-8")
        made = renewed(text)
        if made == text:
            continue
        if given.write:
            page.write_text(made, "utf-8")
            continue
        stale += 1
        print(
            *difflib.unified_diff(text.splitlines(), made.splitlines(), str(page), "as it is now", lineterm=""),
            sep="\n",
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
