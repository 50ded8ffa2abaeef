"""Keep reports of `mlm reproduce` in the repository, with an index of what each says:

    python scripts/keep_reports.py runs/reproduce

Copies report.md, result.json and the pictures of each experiment to scripts/results/reproduce/NAME, and
writes README.md there from all that are kept. Pages stay behind: they hold the same, and whole curves.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mlm of this checkout, installed or not

from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.conclusion import Verdict

KEPT = Path(__file__).parent / "results" / "reproduce"
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
PLACE = re.compile(r'(?<=["=])/(?:[^/"\s]+/)+(?=[^/"\s]+")')
"""Folders before the name of a file of the user's, which say nothing to others."""
HEAD = """# The papers' experiments, as they came out

One paragraph for each report of [`mlm reproduce`](../../../mlm/reproduce/README.md) that is kept here: what
the paper says, what was seen, and whether that agrees. Each report names its machine and its seeds, and says
what cannot be concluded.
"""


def keep(folder: Path) -> None:
    """Copy the report of an experiment."""
    target = KEPT / folder.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    report = (folder / "report.md").read_text("utf-8")
    for name in ("report.md", *PICTURE.findall(report)):
        shutil.copyfile(folder / name, target / name)
    result = (folder / "result.json").read_text("utf-8")
    (target / "result.json").write_text(PLACE.sub("", result), "utf-8")


def index() -> str:
    """Return the index of all that are kept, in the order of the catalogue."""
    parts = [HEAD]
    for experiment in EXPERIMENTS:
        path = KEPT / experiment.name / "result.json"
        if path.is_file():
            found = json.loads(path.read_bytes())
            verdict = Verdict[found["verdict"].upper()].value
            parts.append(
                f"**[{experiment.name}]({experiment.name}/report.md)**: {found['source']}. {found['claim']} "
                f"*Seen here:* {found['seen'].rstrip('.')}. *Verdict:* {verdict}.\n"
            )
    missing = [each.name for each in EXPERIMENTS if not (KEPT / each.name / "result.json").is_file()]
    if missing:
        parts.append(f"Not kept yet: {', '.join(f'`{name}`' for name in missing)}.\n")
    return "\n".join(parts)


def main() -> None:
    """Keep what the folders of the command line hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="out of `mlm reproduce`")
    names = {experiment.name for experiment in EXPERIMENTS}
    for folder in parser.parse_args().folders:
        for found in sorted(folder.glob("*/report.md")):
            if found.parent.name in names:
                keep(found.parent)
    (KEPT / "README.md").write_text(index(), "utf-8")


if __name__ == "__main__":
    main()
