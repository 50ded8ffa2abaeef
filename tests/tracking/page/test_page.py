"""The page: complete, small, and safe whatever a run's files hold."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from mlm.tracking.page.report import make_page
from mlm.tracking.runs import Column, RunRecords, read_run
from mlm.util.results import is_result
from tests.tracking.page.made import some_run, started, stepped, validated, write_run

NAUGHTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp; ü\u202e\u2028\x1b[31m\x00"


class Page(HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> Any:
        return json.loads(next(text for text in self.texts if text.startswith('{"runs"')))


def page_of(*folders: Path) -> Page:
    return Page(make_page([read_run(folder, folder.name) for folder in folders]))


def test_a_page_has_each_part_of_its_runs(tmp_path: Path) -> None:
    page = page_of(some_run(tmp_path / "a"), some_run(tmp_path / "b", train={"steps": 50}))
    headings = ("Runs", "Curves", "Settings", "Checkpoints")
    assert [word for word in headings if word not in page.texts] == []
    assert [chart["title"] for chart in page.data["charts"]] == [
        *("Training loss", "Validation loss", "Gradient norm", "Learning rate", "Throughput", "Memory")
    ]
    assert page.data["runs"][1]["curves"]["step:loss"]["y"][-1] == 4.8
    assert page.data["runs"][0]["curves"]["step:memory_gib"]["y"][-1] == 1


def test_a_page_draws_the_newest_loads_of_experts(tmp_path: Path) -> None:
    """A row per layer, a cell per expert, as dark as its load over the mean; a damaged layer is left out."""
    damaged = {"1": [2, 2], "2": [1, None], "x": [1, 1], "3": [0, 0], "4": "1"}
    counts = [{"0": [n, 3 * n], **damaged} for n in (1, 2)]
    records = [{"kind": "experts", "time": 1.0, "step": n, "counts": c} for n, c in enumerate(counts, 1)]
    page = page_of(write_run(tmp_path / "a", started(), stepped(2), *records))
    styled = [(a["title"], a["style"]) for tag, a in page.tags if tag == "td" and "style" in a]
    cells = [(title, style) for title, style in styled if "--load" in str(style)]
    even = [(f"{n}: 1.00", "--load:50%") for n in (0, 1)]
    assert cells == [("0: 0.50", "--load:25%"), ("1: 1.50", "--load:75%"), *even]
    assert "in step 2, over the mean" in page.text
    assert "Loads of experts" not in page_of(some_run(tmp_path / "b")).texts


def test_a_large_mixture_is_drawn_in_part(tmp_path: Path) -> None:
    counts = {str(layer): [layer, *[100] * 1023] for layer in range(6)}
    record = {"kind": "experts", "time": 1.0, "step": 2, "counts": counts}
    page = page_of(write_run(tmp_path / "a", started(), stepped(2), record))
    titles = [a["title"] for tag, a in page.tags if tag == "td" and "--load" in (a.get("style") or "")]
    assert titles[::1024] == ["0: 0.00", "0: 0.01", "0: 0.02", "0: 0.03"]
    assert len(titles) == 4 * 1024
    assert "The 2 most even layers are not drawn." in page.text


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(some_run(tmp_path / "a"))
    policy = next(values["content"] for tag, values in page.tags if "http-equiv" in values)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    links = [values[key] for _, values in page.tags for key in ("src", "href") if key in values]
    assert links
    assert all(link is not None and link.startswith("#") for link in links)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", " ".join(page.texts))


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    plain = page_of(some_run(tmp_path / "plain"))
    incident = {"kind": "incident", "step": 1, "kinds": [NAUGHTY], "lines": [NAUGHTY], "action": NAUGHTY}
    run = write_run(
        tmp_path / "hostile",
        started(loss_unit=NAUGHTY, host=NAUGHTY, command=[NAUGHTY], versions={NAUGHTY: NAUGHTY}),
        *(stepped(step, **{NAUGHTY: 1.0}) for step in (1, 2)),
        incident,
        {"kind": "save_failed", "step": 1, "error": NAUGHTY},
        {"kind": "sample", "step": 1, "prompt": NAUGHTY, "text": [NAUGHTY]},
        {"kind": "scores", "step": 1, "split": NAUGHTY, "accuracy": 0.5},
        name=NAUGHTY.replace("\x00", "").replace("\x1b", ""),
    )
    (run / "eval-x.json").write_text(json.dumps({"task": NAUGHTY, "loss": 1.0}))
    found = read_run(run, NAUGHTY)
    page = Page(make_page([found]))
    assert [tag for tag, _ in page.tags].count("script") == [tag for tag, _ in plain.tags].count("script")
    assert "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, values in page.tags for name in values)
    assert page.data["runs"][0]["name"] == NAUGHTY
    assert not re.search(r"[\x00\x1b\u202e]", page.text)


def test_runs_without_steps_or_validation_say_so(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty")
    page = page_of(empty, write_run(tmp_path / "short", started(), stepped(1)))
    assert "empty: no step is logged yet" in page.text
    assert "short: no validation is logged" in page.text
    assert "Curves" not in page_of(empty).texts


def test_scores_have_their_receipt(tmp_path: Path) -> None:
    run = some_run(tmp_path / "a")
    part = {"split": "test", "metrics": {"accuracy": 0.75}, "standard_errors": {"accuracy": 0.01}}
    (run / "eval-race.json").write_text(
        json.dumps({"task": "race", "results": [part], "data_digest": "xxh3:12"})
    )
    page = page_of(run)
    assert "accuracy (test) 0.7500 ± 0.0100" in page.text
    assert '"data_digest": "xxh3:12"' in page.text


def test_samples_are_newest_first_and_earlier_ones_are_folded(tmp_path: Path) -> None:
    sample = {"kind": "sample", "time": 1000.0, "prompt": "The"}
    records = [sample | {"step": s, "text": f" <b>{s}\n{n}"} for s in (10, 20, 30) for n in (1, 2)]
    content = make_page([read_run(write_run(tmp_path / "a", started(), *records), "a")]).decode()
    section = content.partition('<section id="samples">')[2].partition("</section>")[0]
    assert re.findall(r"> &lt;b&gt;(\d+\n\d)</span>", section) == [
        *("30\n1", "30\n2", "20\n1", "20\n2", "10\n1", "10\n2")
    ]
    shown = section.partition("<details><summary>Earlier samples of a (4)")[0]
    assert "30\n2" in shown
    assert "20\n1" not in shown


def test_a_page_is_recognised_as_a_result_and_holds_the_licence_of_its_library(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(make_page([]))
    assert is_result(tmp_path / "page.html")
    assert b"The MIT License (MIT)\n\nCopyright (c) 2022 Leon Sorokin" in make_page([])


def test_twenty_long_runs_fit(tmp_path: Path) -> None:
    steps = np.arange(1.0, 50_001)
    random = np.random.default_rng(0)
    names = ("loss", "lr", "grad_norm", "tokens_per_s", "memory_gib", "mlm_loss", "sop_loss")
    runs = []
    for number in range(20):
        table: dict[str, Column] = {"step": steps, "tokens": steps * 524_288, "time": steps * 0.731}
        table |= {name: random.normal(size=len(steps)) for name in names}
        table["loss"][777] = 1e9
        runs.append(RunRecords(f"run {number}", tmp_path, tables={"step": table}))
    content = make_page(runs)
    page = Page(content)
    assert len(content) < 2_000_000
    assert all(1e9 in run["curves"]["step:loss"]["y"] for run in page.data["runs"])
    assert "drawn as their first, last, lowest and highest value" in page.text


def test_validation_of_a_blend_and_parts_of_a_loss_have_charts(tmp_path: Path) -> None:
    record = {**validated(1), "validation/wiki": 3.0}
    page = page_of(write_run(tmp_path / "a", started(), stepped(1, sop_loss=0.5), record))
    titles = [chart["title"] for chart in page.data["charts"]]
    assert {"wiki, validation", "sop loss, training"} <= set(titles)
