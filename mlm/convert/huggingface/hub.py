"""Uploads of an exported folder to the Hugging Face Hub, by `huggingface_hub`."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlm.convert.huggingface.folder import reason_of
from mlm.convert.source import Checkpoint
from mlm.data.files_present import hub_id
from mlm.util.errors import UserError
from mlm.util.extras import load_extra


def push_problems(push: str, source: Checkpoint, *, public: bool, base: str | None, merge: bool) -> list[str]:
    """Return the problems of an upload: its name, its base, a missing token, or a public repository."""
    typed = f"push={push}"
    if source.base is not None and not merge and base is None and not hub_id(source.base_name):
        name, publish = source.base_name, f"hf upload OWNER/BASE {source.base_name} --private"
        if isinstance(source.base, Checkpoint):  # which may be a base with adapters itself
            merged = " merge=true" * bool(source.base.base)
            publish = f"mlm export hf ckpt={name} out=base push=OWNER/BASE{merged}"
        return [
            f"{typed}: others do not have the base of these adapters, {name}: publish it first ({publish}) "
            f"and add base=OWNER/BASE, or push the whole model with merge=true"
        ]
    try:
        hub = load_extra("huggingface_hub", typed, "hf")
    except UserError as error:
        return list(error.problems)
    if hub.get_token() is None:
        return [f"{typed}: no token of the Hub: run `hf auth login`, or set HF_TOKEN"]
    try:
        is_open = not call_hub(typed, lambda: hub.HfApi().repo_info(push).private)
    except UserError as error:
        is_new = isinstance(error.__cause__, hub.errors.RepositoryNotFoundError)
        return [] if is_new else list(error.problems)
    if is_open and not public:
        return [f"{typed}: the repository is public: set public=true, or name a new one"]
    return []


def push_folder(folder: Path, push: str, *, public: bool) -> str:
    """Upload a folder to a repository, a new one if there is none; return its address. Raises UserError."""
    api = load_extra("huggingface_hub", f"push={push}", "hf").HfApi()
    command = shlex.join(["hf", "upload", push, str(folder), *["--private"] * (not public)])
    remedy = f"{folder} is complete: try again by `{command}`"

    def upload() -> str:
        url = str(api.create_repo(push, private=not public, exist_ok=True))
        api.upload_folder(repo_id=push, folder_path=folder, commit_message="Upload model exported by mlm")
        return url

    try:
        return str(call_hub(f"push={push}", upload, f"; {remedy}"))
    except (KeyboardInterrupt, SystemExit):  # the same command would reject the existing folder
        print(f"push={push}: stopped; {remedy}", file=sys.stderr)
        raise


def call_hub(
    typed: str, request: Callable[[], Any], fix: str = ": fix the name, the token or the connection"
) -> Any:
    try:
        return request()
    except Exception as error:  # of huggingface_hub, its HTTP client and files: no base class in common
        raise UserError(f"{typed}: the Hub does not take it ({reason_of(error)}){fix}") from error
