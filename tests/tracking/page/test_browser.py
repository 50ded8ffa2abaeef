"""The page in a real browser: headless Chromium."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlm.tracking.page.report import make_page
from mlm.tracking.runs import read_run
from tests.tracking.page.made import some_run, started, stepped, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the page is not opened in a browser")

ACT = """
<script>
const say = (name, value) =>
  document.body.insertAdjacentHTML("beforeend", `<output id="${name}">${value}</output>`);
const form = document.getElementById("controls");
const plot = document.querySelector(".plot");
const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const cell = () => document.querySelector('td[data-key="step:loss"][data-run="0"]');
const read = () => cell().textContent + "@" + cell().nextSibling.textContent;
const wait = () => new Promise((done) => setTimeout(done, 100));
(async () => {
  await wait();
  press("Home"); await wait(); say("home", read());
  press("ArrowRight"); await wait(); say("right", read());
  press("+"); press("+"); press("End"); await wait(); say("zoomed", read());
  press("Escape"); await wait(); say("escaped", read());
  const over = plot.querySelector(".u-over");
  const { left, top, width } = over.getBoundingClientRect();
  const mouse = (type, share) => over.dispatchEvent(new MouseEvent(type, {
    clientX: left + share * width, clientY: top + 50, movementX: 10, button: 0, buttons: 1, bubbles: true,
  }));
  mouse("mousemove", 0); mouse("mousedown", 0); mouse("mousemove", 0.25); mouse("mousemove", 0.5);
  mouse("mouseup", 0.5); await wait();
  press("End"); await wait(); say("dragged", read());
  mouse("dblclick", 0.5); await wait();
  press("End"); await wait(); say("doubled", read());
  press("Escape"); await wait();
  form.axis[2].checked = true;
  form.smooth.value = 0.9;
  form.dispatchEvent(new Event("input", { bubbles: true })); await wait();
  press("Home"); press("End"); await wait(); say("smooth", read());
  form.querySelector("input[name=run]").checked = false;
  form.dispatchEvent(new Event("input", { bubbles: true })); await wait();
  say("hidden", read());
})();
</script>"""


def opened(page: Path, *flags: str) -> tuple[str, list[str]]:
    """Return the document that the browser makes of a page, and the lines of its console."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=5000", *flags]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def shown(document: str, name: str) -> str:
    found = re.search(rf'<output id="{name}">(.*?)</output>', document)
    assert found, f"the script did not reach {name}"
    return html.unescape(found[1])


def test_every_curve_shows_its_last_value_and_the_console_is_empty(tmp_path: Path) -> None:
    hostile = write_run(
        tmp_path / "hostile",
        started(),
        stepped(1, loss=None),
        stepped(2, loss=0.125, grad_norm=0.0),
        {"kind": "sample", "step": 2, "prompt": "To", "text": " be\n<b>or</b>"},
    )
    runs = [
        read_run(some_run(tmp_path / "long", steps=3000), "long"),
        read_run(some_run(tmp_path / "short"), "</script><b>short"),
        read_run(hostile, "hostile"),
        read_run(write_run(tmp_path / "empty"), "empty"),
    ]
    page = tmp_path / "page.html"
    page.write_bytes(make_page(runs))
    document, console = opened(page, "--blink-settings=preferredColorScheme=0", "--window-size=400,900")
    assert console == []
    assert re.search(r'<html[^>]* data-drawn="6"', document)
    assert document.count("<canvas") == 6
    cells = re.findall(r'<td data-run="(\d)" data-key="step:loss" data-last="([^"]*)">([^<]*)</td>', document)
    assert cells == [("0", "-25", "-25"), ("1", "4.8", "4.8"), ("2", "0.125", "0.125")]
    assert "&lt;/script&gt;&lt;b&gt;short" in document
    assert " be\n&lt;b&gt;or&lt;/b&gt;</span>" in document


def test_keys_and_controls_change_what_is_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    runs = [read_run(some_run(tmp_path / name), name) for name in ("a", "b")]
    page.write_bytes(make_page(runs).replace(b"</body>", ACT.encode() + b"</body>"))
    document, console = opened(page)
    assert console == []
    assert shown(document, "home") == "4.99@1"
    assert shown(document, "right") == "4.98@2"
    assert shown(document, "zoomed") != "4.8@20"  # the end of what is in sight
    assert shown(document, "escaped") == "4.8@last"
    assert shown(document, "dragged") == "4.9@10"  # of 1 to 20 the first half
    assert shown(document, "doubled") == "4.8@20"
    value, _, at = shown(document, "smooth").partition("@")
    assert at == "0:00:20"
    assert 4.8 < float(value) < 4.9
    assert shown(document, "hidden") == "4.8@last"
