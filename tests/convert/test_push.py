"""`mlm export hf … push=OWNER/NAME`, against a server that answers as the Hub does."""

import base64
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

from mlm.cli import main
from mlm.finetune import training
from mlm.models.config import LoraConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util import extras
from tests.convert.hf_models import import_model
from tests.convert.hf_models import our_logits as ours
from tests.convert.hf_models import their_logits as theirs
from tests.finetune.chats import chatting, write_chats, write_llama


class FakeHub(BaseHTTPRequestHandler):
    """Repositories by name, each {"private": …, "files": {path: bytes}}."""

    repositories: dict[str, dict[str, Any]]
    tokens: set[str]

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, value: Any, code: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        for name, content in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), content)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        name = "/".join(self.path.partition("?")[0].split("/")[3:5])  # of /api/models/OWNER/NAME
        repository = self.repositories.get(name)
        if repository is None:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        else:
            files = [{"rfilename": path} for path in repository["files"]]
            self.answer({"id": name, "private": repository["private"], "siblings": files})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            self.create(json.loads(body))
            return
        if self.path == "/api/validate-yaml":  # of the card
            self.answer({"errors": [], "warnings": []})
            return
        _, _, _, owner, name, action, *_ = self.path.split("/")
        rows = [json.loads(line) for line in body.splitlines()]
        if action == "preupload":
            names = [file["path"] for file in rows[0]["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in names]
            self.answer({"files": modes})
        elif action == "commit":
            for value in (row["value"] for row in rows if row["key"] == "file"):
                content = base64.b64decode(value["content"])
                self.repositories[f"{owner}/{name}"]["files"][value["path"]] = content
            url = f"http://{self.headers['Host']}/{owner}/{name}/commit/0"
            self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": url})

    def create(self, asked: dict[str, Any]) -> None:
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        if name.startswith("closed/"):
            self.answer({"error": "You don't have the rights"}, 403)
            return
        is_private = asked.get("private", asked.get("visibility") == "private")
        code = 409 if name in self.repositories else 200
        self.repositories.setdefault(name, {"private": is_private, "files": {}})
        self.answer({"url": f"http://{self.headers['Host']}/{name}"}, code)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    handler = type("Hub", (FakeHub,), {"repositories": {}, "tokens": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    reach(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield handler
    extras.is_reachable.cache_clear()
    server.shutdown()


def reach(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)  # read when it was imported
    extras.is_reachable.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of `transformers`, a run imported of it, and adapters trained on each."""
    made = tmp_path_factory.mktemp("push")
    write_llama(made / "llama")
    import_model(made / "llama", made / "run", verify=False)
    write_chats(made / "chat", train=4, validation=2)
    for base in ("llama", "run"):
        config = chatting(made, lora=LoraConfig(rank=4), ckpt=str(made / base), out=str(made / f"on-{base}"))
        training.run(replace(config, train=replace(config.train, epochs=1)), ParallelContext())
    return made


def export(ckpt: Path, out: Path, *words: str) -> int:
    return main(["export", "hf", f"ckpt={ckpt}", f"out={out}", "verify=false", *words])


def fetched(hub: type[FakeHub], name: str, folder: Path) -> Path:
    for path, content in hub.repositories[name]["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def test_pushed_model_is_private_and_is_the_run(hub: type[FakeHub], folder: Path, tmp_path: Path) -> None:
    assert export(folder / "on-run", tmp_path / "out", "merge=true", "push=me/chat") == 0
    assert hub.repositories["me/chat"]["private"] is True
    assert hub.tokens == {"Bearer hf_secret"}
    got = theirs(fetched(hub, "me/chat", tmp_path / "got"))
    torch.testing.assert_close(got, ours(folder / "on-run"), rtol=0, atol=1e-5)
    assert export(folder / "on-run", tmp_path / "newer", "merge=true", "push=me/chat") == 0


def test_pushed_adapters_name_a_base_that_others_have(
    hub: type[FakeHub], folder: Path, tmp_path: Path
) -> None:
    assert export(folder / "on-llama", tmp_path / "out", "push=me/chat", "base=me/base", "public=true") == 0
    assert hub.repositories["me/chat"]["private"] is False
    got = fetched(hub, "me/chat", tmp_path / "got")
    assert json.loads((got / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    card = ModelCard.load(got / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "me/base")
    assert "| data | chat |" in card.text.splitlines()
    assert str(folder) not in card.content
    result = card.data.eval_results[0]
    scores = json.loads((folder / "on-llama/result.json").read_text())["scores"]
    assert (result.task_type, result.dataset_name, result.metric_type) == ("text-generation", "chat", "loss")
    assert result.metric_value == scores["validation"]["loss"]
    got_logits = theirs(folder / "llama", got)
    torch.testing.assert_close(got_logits, ours(folder / "on-llama"), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "ckpt, words, problem",
    [
        ("run", ["push=chat"], "push=chat: no name of a repository of the Hub; use push=OWNER/NAME"),
        ("on-run", ["base=me base"], "base=me base: no name of a repository of the Hub; use base=OWNER/NAME"),
        ("on-llama", ["push=me/chat"], "first (hf upload OWNER/BASE {folder}/llama --private) and add base="),
        ("on-run", ["push=me/chat"], "push=OWNER/BASE) and add base=OWNER/BASE, or push the whole"),
        ("run", ["push=me/open"], "push=me/open: the repository is public: set public=true, or name a new"),
        ("on-run", ["merge=true", "base=me/base"], "base=me/base: has no effect with merge=true"),
    ],
)
def test_push_that_cannot_be_is_one_line_and_writes_nothing(
    hub: type[FakeHub],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ckpt: str,
    words: list[str],
    problem: str,
) -> None:
    hub.repositories["me/open"] = {"private": False, "files": {}}
    assert export(folder / ckpt, tmp_path / "out", *words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert problem.format(folder=folder) in line
    assert not (tmp_path / "out").exists()
    assert not any(repository["files"] for repository in hub.repositories.values())


def test_a_token_that_cannot_be_sent_is_not_shown(
    hub: type[FakeHub], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sec\x0bret")
    assert export(folder / "run", tmp_path / "out", "push=me/chat") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "push=me/chat: the Hub does not take it (" in line
    assert "hf_sec" not in line


def test_push_that_fails_keeps_the_export_and_says_how_to_repeat_it(
    hub: type[FakeHub], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(folder / "run", out, "push=closed/chat") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "push=closed/chat: the Hub does not take it (" in line
    assert f"try again by `hf upload closed/chat {out} --private`" in line
    assert (out / "model.safetensors").is_file()


def test_push_that_a_signal_stops_says_how_to_repeat_it(
    hub: type[FakeHub], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out, before = tmp_path / "out", signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(hub, "create", lambda self, asked: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as stopped:
            export(folder / "run", out, "push=me/chat")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 143
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert (
        line == f"push=me/chat: stopped; {out} is complete: try again by `hf upload me/chat {out} --private`"
    )
    assert (out / "model.safetensors").is_file()
