"""Text that experiments train on: python -m mlm.reproduce.text --corpus auto --debs DEBS --out OUT.

OUT gets train.jsonl, validation.jsonl, test.jsonl and LICENCES.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path

from mlm.reproduce.apt import download, missing_programs
from mlm.reproduce.debian_text import CHOICES, LICENCES, write_text
from mlm.reproduce.plays import INSTALL, PACKAGE, VERSION, installed_plays, read_plays, write_plays
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

__all__ = ["LICENCES", "SOURCES", "packages", "source_problem"]

SOURCES = AUTO, DEBIAN, PLAYS = "auto", "debian", "plays"


def source_problem(corpus: str) -> tuple[str, str] | None:
    """Return why a text cannot be had on this machine, and the fix; None if it may be."""
    missing = " and no ".join(missing_programs())
    if corpus == DEBIAN:
        return (f"this machine has no {missing}", "use plays") if missing else None
    try:
        installed_plays()
    except UserError:
        if corpus == PLAYS:
            return f"the package {PACKAGE} {VERSION} is not installed", f"run: {INSTALL}"
        return (
            (f"this machine has no {missing}, and no package {PACKAGE}", f"run: {INSTALL}")
            if missing
            else None
        )
    return None


def written(corpus: str, debs: Path, out: Path) -> Iterator[str]:
    """Write the text; yield a line on each package and part. Raises UserError."""
    if corpus in (AUTO, DEBIAN):
        try:
            files = download(CHOICES, debs)
        except UserError as error:
            if corpus == DEBIAN:
                raise
            yield f"no packages of Debian ({error}): taking plays instead"
        else:
            yield from write_text(files, out)
            return
    yield from write_plays(read_plays(None, None), out)
    write_atomic(out / LICENCES, licence_of_plays().encode())


def packages(licences: Path) -> list[str]:
    """Return the packages that a file LICENCES names, with their versions."""
    lines = licences.read_text("utf-8").splitlines()
    return [before for before, line in pairwise(lines) if line.startswith("Licence of the ")]


def licence_of_plays() -> str:
    """Return the file LICENCES for the plays."""
    metadata = distribution(PACKAGE).metadata
    return (
        "Shakespeare's plays, as a package of Python ships them.\n\n"
        f"{PACKAGE} {metadata['Version']}\nLicence of the package: {metadata['License']}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Download if there is something to download, and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--corpus", choices=SOURCES, default=AUTO)
    parser.add_argument("--debs", type=Path, required=True, help="folder for the packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    try:
        for line in written(options.corpus, options.debs, options.out):
            print(line, flush=True)
    except UserError as error:
        parser.exit(2, f"corpus={options.corpus}: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
