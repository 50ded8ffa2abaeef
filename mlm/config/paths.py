"""Location of the shipped YAML: the same path in a checkout and in an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
CONFIG_DIR = next(filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs")), PACKAGE / "configs")
"""mlm/configs, a link to configs/ in a checkout and a plain folder in a wheel; an sdist holds no link."""


def groups(*roots: Path) -> dict[str, list[str]]:
    """Config groups below `roots` and their options, sorted: {"model": ["gpt2_124m", …], …}."""
    options: dict[str, set[str]] = {}
    for root in roots:
        for file in root.glob("*/*.y*ml"):
            if file.suffix in (".yaml", ".yml"):
                options.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}
