"""No source names what loads a pickle, writes one, or runs text, but those that write or read PyTorch's."""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("mlm/**/*.py"))
FORBIDDEN_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy"),
    *("torch.distributed.checkpoint", "multiprocessing.connection", "pandas"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "__import__", "builtins.eval", "builtins.exec"),
    *("torch.save", "torch.load", "torch.jit.load", "torch.hub.load", "torch.package", "torch.export.load"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("yaml.FullLoader", "os.system", "os.popen"),
}
PERMITTED = {
    "mlm/convert/dcp/unpickled.py": {"pickle", "pickle._Unpickler"},
    "mlm/convert/dcp/writer.py": {"pickle", "pickle.dumps", "torch.save", "torch.distributed.checkpoint"},
    "mlm/convert/megatron/write.py": {"torch.save"},
}
"""File -> what it uses of the forbidden: an unpickler that runs instructions of data alone, and writers."""
FORBIDDEN_NAMES = {  # of any object: collectives that pickle
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


@dataclass
class Names:
    """Names used by a source file."""

    modules: set[str] = field(default_factory=set)
    """Imported, as modules or from one: torch.distributed, torch.distributed.checkpoint."""
    used: set[str] = field(default_factory=set)
    """Dotted names, aliases of imports resolved: torch.load for t.load after `import torch as t`."""
    loads: set[str] = field(default_factory=set)
    """Calls of numpy.load, written out."""


def names(source: str) -> Names:
    tree, found = ast.parse(source), Names()
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.modules |= {alias.name for alias in node.names}
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full(node: ast.expr) -> str:
        first, dot, rest = ast.unparse(node).partition(".")
        return f"{aliases.get(first, first)}{dot}{rest}"

    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            found.used.add(full(node))
        if isinstance(node, ast.Call) and full(node.func) == "numpy.load":
            found.loads.add(ast.unparse(node))
    return found


def forbidden(source: str) -> set[str]:
    """Names in a source file that could load a pickle or execute text."""
    found = names(source)
    modules = {m for m in found.modules if any(f"{m}.".startswith(f"{f}.") for f in FORBIDDEN_MODULES)}
    collectives = {name for name in found.used if name.rpartition(".")[2] in FORBIDDEN_NAMES}
    careless = {call for call in found.loads if "allow_pickle=False" not in call}
    pickles = {name for name in found.used if name.startswith("pickle.") and not name[7:].isupper()}
    return modules | pickles | ((found.used | found.modules) & FORBIDDEN_CALLS) | collectives | careless


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(path.parents[2])))
def test_source_names_nothing_that_loads_pickles_or_runs_text(path: Path) -> None:
    source = path.read_text()
    dcp = "torch.distributed.checkpoint"
    found = {dcp if name.startswith(dcp) else name for name in forbidden(source)}
    found -= PERMITTED.get(str(path.relative_to(ROOT)), set())
    if found and all(name.startswith("multiprocessing.connection") for name in found):  # bytes alone
        assert not re.search(r"\.(recv|send)\(", source)
        found.clear()
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle\npickle.loads(b'')",
        "from pickle import loads",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x')",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "eval('1')",
        "from torch.distributed import checkpoint",
    ],
)
def test_search_of_sources_finds_what_it_is_for(source: str) -> None:
    assert forbidden(source)


def test_every_source_is_searched() -> None:
    assert len(SOURCES) > 100
