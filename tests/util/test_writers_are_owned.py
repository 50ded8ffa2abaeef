"""Only modules that ask mlm/util/ownership.py, or own a folder, delete and replace files."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "mlm"
CALLS = {"rmtree", "unlink", "remove", "rmdir", "removedirs", "replace", "rename", "renames", "truncate"}
"""Of os, shutil and pathlib; `replace` and `remove` count only as functions of os or with a path."""
ALLOWED = {
    "util/ownership.py": "decides, and deletes",
    "util/files.py": "write_atomic",
    "cli/evaluate/zero_shot.py": "the scores kept until the result is there",
    "checkpoint/native/folders.py": "publishes and prunes checkpoints, after foreign_in",
    "checkpoint/native/retention.py": "renames checkpoints of a run, by their names",
    "checkpoint/native/staging.py": "files of a staging folder",
    "corpus/build.py": ".building and the locks of folders it claimed",
    "corpus/recombine.py": "files of a killed command and the marker, in a folder it claimed",
    "corpus/stages/group.py": "its own files in the work folder",
    "corpus/stages/publish.py": "moves what it merged into the corpus",
    "corpus/stages/run.py": "files of a stage in the work folder",
    "data/indexed.py": "the pair that it writes",
    "data/stored_corpus.py": "blocks in the mirror that it made",
    "launch/doctor/folder.py": "files of a trial, in a folder whose name it has drawn",
    "util/lock.py": "its own lock, and temporary folders that are over, by name, owner and lock",
    "training/mirror.py": "sparse files in a temporary folder, which stands for the store",
    "runs/journal.py": "incomplete files of a folder that is being written, in its work folder",
    "runs/folder.py": "names a finished folder, over an empty one at most",
    "util/results.py": "gives an earlier result that is to be kept a name of its own",
}
WRITERS = {
    "util/system.py": "/dev/null, where a standard stream is closed",
    "launch/start.py": "job.json in a temporary folder",
    "launch/process.py": "/dev/null, while torch says that a store is gone",
    "corpus/stages/group.py": "its own files in the work folder",
    "data/indexed.py": "parts of the pair that it writes",
    "training/mirror.py": "manifests in a temporary folder, which stands for the store",
    "data/stored_corpus.py": "blocks of its own cache, under a name of the thread that writes",
    "launch/child_run.py": "logs of runs in the folder of a verify-resume",
}


def calls(tree: ast.AST) -> set[str]:
    """Deleting and replacing calls: `os.replace(…)`, `path.unlink(…)`."""
    found = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, value = node.func.attr, node.func.value
        module = value.id if isinstance(value, ast.Name) else None
        plain = name in ("replace", "remove", "truncate", "rename") and module not in ("os", "shutil")
        is_path_rename = name == "rename" and len(node.args) == 1 and module is None
        if name in CALLS and (not plain or is_path_rename):
            found.add(name)
    return found


@cache
def modules() -> dict[str, ast.AST]:
    files = [path for path in ROOT.rglob("*.py") if "configs" not in path.parts]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def test_nothing_deletes_or_replaces_but_the_modules_listed_here_and_three_remove_folders() -> None:
    found = {name for name, tree in modules().items() if calls(tree)}
    assert found <= set(ALLOWED), "go through mlm/util/ownership.py or mlm/util/results.py"
    assert set(ALLOWED) <= found, "the list has names that are gone"
    found = {name for name, tree in modules().items() if "rmtree" in calls(tree)}
    assert found == {"util/ownership.py", "checkpoint/native/folders.py", "util/lock.py"}


def test_nothing_opens_a_file_for_writing_but_through_the_helpers() -> None:
    """write_text, write_bytes and open(…, "w") truncate what stands there."""
    found = set()
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("write_text", "write_bytes"):
                    found.add(name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
                is_path = not (isinstance(node.args[0], ast.Name) and node.args[0].id == "descriptor")
                if is_path and any("w" in str(mode) for mode in modes):
                    found.add(name)
    assert found == set(WRITERS)
