"""Draw the diagrams of design.md: `python scripts/docs/diagrams.py` writes scripts/docs/diagrams/*.svg.

Each has its own card, so that it is legible on light and dark pages, whichever colours the reader's
system asks for.
"""

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("diagrams")
STYLE = """
  .card { fill: #ffffff; stroke: #d5d9e3; }
  .box { fill: #e8ecfb; stroke: #4051b5; }
  .warm { fill: #fdeed3; stroke: #b26a00; }
  .group { fill: none; stroke: #8a93a8; stroke-dasharray: 4 4; }
  .line { fill: none; stroke: #5b6478; stroke-width: 1.5; }
  .tie { fill: none; stroke: #b26a00; stroke-width: 1.5; stroke-dasharray: 5 4; }
  .head { fill: #5b6478; }
  text { fill: #1d2330; font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
  .small { fill: #4d566b; font-size: 11.5px; }
  .title { font-weight: 600; }
  .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1b1f2b; stroke: #363d50; }
    .box { fill: #2a3157; stroke: #8c9eff; }
    .warm { fill: #4a3616; stroke: #ffb74d; }
    .group { stroke: #6d7690; }
    .line { stroke: #a4adc3; }
    .tie { stroke: #ffb74d; }
    .head { fill: #a4adc3; }
    text { fill: #e6e9f2; }
    .small { fill: #b3bbcf; }
  }
"""


class Drawing:
    """Elements of one SVG, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, words: str = "", *, kind: str = "box") -> None:
        """A rectangle with a line of text, or two separated by a newline, in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>')
        first, _, second = words.partition("\n")
        middle = y + h // 2 + (5 if not second else -3)
        self.text(x + w // 2, middle, first, anchor="middle")
        if second:
            self.text(x + w // 2, middle + 17, second, "small", anchor="middle")

    def text(self, x: int, y: int, words: str, kind: str = "", *, anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def path(self, *points: tuple[int, int], kind: str = "line", arrow: bool = True) -> None:
        line = " L ".join(f"{x} {y}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="M {line}"{end}/>')

    def write(self, name: str) -> None:
        width, height = self.size
        body = "\n".join(self.parts)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">\n<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="head" d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>\n'
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>\n'
            f"{body}\n</svg>\n",
            encoding="utf-8",
        )


def layer() -> None:
    """One transformer layer on tp=2."""
    d = Drawing(840, 430, "One transformer layer split over two tensor-parallel ranks")
    blocks = (
        ("x", ("QKV by columns\nheads 0 … N/2−1", "attention", "output by rows\nfirst half")),
        ("", ("up by columns\nfirst half", "GELU", "down by rows\nfirst half")),
    )
    for number, (name, boxes) in enumerate(blocks):
        y = 50 + 170 * number
        d.text(24, y + 60, name or "…", "title")
        d.path((40, y + 55), (62, y + 55))
        d.path((50, y + 55), (50, y - 12), (770, y - 12), (770, y + 42))
        d.text(390, y - 18, "residual", "small", anchor="middle")
        d.box(64, y + 35, 60, 40, "norm")
        d.path((124, y + 55), (148, y + 55))
        d.box(150, y, 34, 110, "f", kind="warm")
        for rank in (0, 1):
            lane = y + 58 * rank
            d.path((184, lane + 26), (212, lane + 26))
            for column, (x, w) in enumerate(((214, 140), (382, 100), (510, 140))):
                words = boxes[column]
                if rank:
                    words = words.replace("heads 0 … N/2−1", "heads N/2 … N−1").replace("first", "second")
                d.box(x, lane + 4, w, 44, words)
                d.path((x + w, lane + 26), (x + w + 26, lane + 26))
        d.box(678, y, 34, 110, "g", kind="warm")
        d.path((712, y + 55), (756, y + 55))
        d.parts.append(f'<circle class="box" cx="770" cy="{y + 55}" r="13"/>')
        d.text(770, y + 60, "+", anchor="middle")
        d.path((783, y + 55), (818, y + 55))
    d.text(24, 388, "f", "title")
    d.text(44, 388, "forward: nothing, backward: all-reduce.", "small")
    d.text(300, 388, "With sequence parallelism: all-gather | reduce-scatter.", "small")
    d.text(24, 410, "g", "title")
    d.text(44, 410, "forward: all-reduce, backward: nothing.", "small")
    d.text(300, 410, "With sequence parallelism: reduce-scatter | all-gather.", "small")
    d.write("layer")


def stages() -> None:
    d = Drawing(840, 330, "A model over pipeline stages, with the tied token table")
    for x, w, name in ((24, 240, "stage 0"), (300, 200, "stages between"), (536, 280, "stage p·v − 1")):
        d.box(x, 44, w, 190, kind="group")
        d.text(x + 10, 36, name, "title")
    d.text(40, 70, "tokens [B, S]", "code")
    d.path((90, 76), (90, 92))
    d.box(40, 94, 208, 46, "token table by rows / tp\nVocabParallelEmbedding")
    d.path((144, 140), (144, 166))
    d.text(152, 157, "g", "title")
    d.box(40, 168, 208, 46, "first layers\n[S, B, H] or [S/tp, B, H]")
    d.path((248, 191), (318, 191))
    d.box(320, 168, 160, 46, "layers\nof this stage")
    d.path((480, 191), (554, 191))
    d.text(282, 254, "send activations, receive gradients", "small", anchor="middle")
    d.box(556, 168, 240, 46, "last layers, norm\n[S, B, H] or [S/tp, B, H]")
    d.path((676, 168), (676, 142))
    d.text(684, 160, "f", "title")
    d.box(556, 84, 240, 56, "projection + cross-entropy\nin chunks: no rank holds the logits")
    d.path((248, 112), (556, 112), kind="tie", arrow=False)
    d.text(400, 104, "the same table: gradients summed", "small", anchor="middle")
    notes = (
        "Data parallelism repeats this on d replicas: gradients in buckets, or FSDP2 units (zero=2, 3).",
        "BERT: the loss of masked tokens and sentence order, or a head on the first, last or every token.",
    )
    for number, note in enumerate(notes):
        d.text(24, 282 + 22 * number, note, "small")
    d.write("stages")


def folders() -> None:
    """The rooms of the package by their layers in pyproject.toml, each with its docstring."""
    layers, libraries = room_layers()
    rooms = [room for layer in layers for room in layer]
    d = Drawing(
        840, 30 * len(rooms) + 10 * len(layers) + 50, "The rooms of mlm; imports point downwards only"
    )
    y = 16
    for layer in layers:
        for room in layer:
            d.box(24, y, 792, 26, kind="warm" if room in libraries else "box")
            d.text(36, y + 17, room, "code")
            d.text(130, y + 17, purpose(room), "small")
            y += 30
        y += 10
    d.box(24, y, 14, 14, kind="warm")
    d.text(46, y + 12, "libraries: usable without Hydra, pydantic and the command line", "small")
    d.write("folders")


def room_layers() -> tuple[list[list[str]], set[str]]:
    """Rooms by layer, from the top, and the libraries among them: import-linter's contracts."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    libraries = next(contract["source_modules"] for contract in contracts if "Libraries" in contract["name"])
    rooms = [[name.strip().removeprefix("mlm.") for name in layer.split("|")] for layer in layers]
    return rooms, {name.removeprefix("mlm.") for name in libraries}


def purpose(room: str) -> str:
    """The first line of a room's docstring; a room is a folder or one file."""
    folder = ROOT / "mlm" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    tree = ast.parse(file.read_text())
    return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
    layer()
    stages()
    folders()
