"""Tables of mutations: what an adversary may write into manifests, saved settings and model folders."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.checkpoint.native.helpers import forge_chunks

Edit = Callable[[dict[str, Any]], Any]

ESC = "\x1b]0;owned\x07\x1b[2J"
HUGE = 1 << 45
GIB = 1 << 30
SHARD = "rank-00000.safetensors"
SPLIT = {"tp_dim": 0, "stage": 0, "multiple": 1}
QKV = "model.layers.0.attention.qkv.weight"


def put(*keys: str | int, to: Any) -> Edit:
    """Set body[key][key]… to a value; `...` deletes it."""

    def edit(body: Any) -> None:
        *path, last = keys
        for key in path:
            body = body[key]
        if to is ...:
            del body[last]
        else:
            body[last] = to

    return edit


def each(name: str, values: list[Any], *keys: str | int) -> Iterator[tuple[str, Edit]]:
    """One mutation for each value of a key."""
    for value in values:
        yield f"{name} {str(value)[:20]!a}", put(*keys, to=value)


def rename(body: dict[str, Any], old: str, new: str) -> None:
    """Give an entry of `tensors` another name."""
    body["tensors"][new] = body["tensors"].pop(old)


def forge(column: str, value: Any) -> Edit:
    """Change the first number of a column of chunks."""
    return lambda body: forge_chunks(body, lambda columns: columns[column].__setitem__(0, value))


MANIFESTS: dict[str, Edit] = dict(
    [
        *each("step", [-1, 1.5, True, "2", 10**18, 1 << 63, None, ...], "step"),
        *each("version", [0, -1, "1", 2, None, 1.0], "version"),
        *each("save id", [ESC, 1, "x" * 1000, None, "a\nb", ...], "save_id"),
        *each("format", ["other", None], "format"),
        *each("files", [[], None, {}, 3], "files"),
        *each("bytes", [-1, 1 << 63, 1.5, "1", 0, True], "files", SHARD, "bytes"),
        *each("digest", [ESC, "", 5, None, "xxh3:zz", "xxh3:" + "0" * 32 + "\n"], "files", SHARD, "digest"),
        *each("tensors", [[], None, 3], "tensors"),
        *each("shape", [[], [-1], [HUGE], [1 << 62] * 4, "16", [1.5], [True], None], "tensors", QKV, "shape"),
        *each("dtype", ["F8", 3, None, ESC], "tensors", QKV, "dtype"),
        *each("chunks", [[], None, "", "?", "AAAA", 7], "chunks"),
        *(
            (f"{column} {value!r}", forge(column, value))
            for column, values in {
                "offset": [(HUGE, 0), (-1, 0)],
                "size": [(0, 0), (HUGE, 16)],
                "file": [-1, HUGE // 2**20],
                "tensor": [-1, 1, HUGE // 2**20],
            }.items()
            for value in values
        ),
        *each("split", [None, {}, [], 3], "tensors", QKV, "split"),
        *(
            (f"split {key} {value!r}", put("tensors", QKV, "split", to=SPLIT | {key: value}))
            for key, values in {
                "tp_dim": [99, -1, "0"],
                "stage": ["mid", -1, 1.5],
                "multiple": [0, -1, 1.5],
            }.items()
            for value in values
        ),
        ("name", lambda body: rename(body, QKV, f"model.{ESC}")),
        ("long name", lambda body: rename(body, QKV, "m" * 1000)),
        (
            "tensor of 2^45 elements",
            lambda body: body["tensors"][QKV].update(shape=[HUGE, 1]),
        ),
        ("state", put("state", to=[])),
    ]
)
"""Mutations that no reader of a manifest accepts."""

CONFIG = ("state", "config")
SETTINGS: dict[str, Edit] = dict(
    [
        *each("config", [None, "x", [1], {}, 3, ...], *CONFIG),
        *each("model", [None, {}, 3, [[[[]]]]], *CONFIG, "model"),
        *each("heads", [0, -2, 3, HUGE, "x", None, ...], *CONFIG, "model", "num_heads"),
        *each("hidden", [10**9, 0, -16, 15, 32], *CONFIG, "model", "hidden_size"),
        *each("layers", [0, 10**9, -1, 2], *CONFIG, "model", "num_layers"),
        *each("vocabulary", [0, HUGE, -1, 60], *CONFIG, "model", "vocab_size"),
        *each("padding", [0, -1, 1 << 40], *CONFIG, "model", "vocab_multiple"),
        *each("positions", [0, HUGE, 7], *CONFIG, "model", "max_positions"),
        *each("ffn", [-1, 10**12, 3], *CONFIG, "model", "ffn_hidden_size"),
        *each("eps", [0, -1.0, "x"], *CONFIG, "model", "layer_norm_eps"),
        *each("dropout", [2.0, -1.0, ESC], *CONFIG, "model", "hidden_dropout"),
        *each("kind", ["bert", "evil", None], *CONFIG, "model", "kind"),
        *each("norm", ["post", ESC], *CONFIG, "model", "norm"),
        *each("head", ["classification", "x"], *CONFIG, "model", "head"),
        *each("labels", [-1], *CONFIG, "model", "num_labels"),
        *each("types", [5, -1], *CONFIG, "model", "token_types"),
        ("further key", put(*CONFIG, "model", ESC, to=1)),
        *each("length", [0, -1, "x"], *CONFIG, "data", "seq_length"),
        *each("data", ["x", ESC], *CONFIG, "data", "kind"),
        *each("seed", [-1, "x"], *CONFIG, "seed"),
        *each("run", ["${oc.env:HOME}", "???", "x${y}", ESC, 3], *CONFIG, "name"),
        *each("out", [[], "${name}", None], *CONFIG, "out"),
        *each("tp", [0, -1, "x"], *CONFIG, "parallel", "tp"),
        *each("lr", [-1.0, 0, "x"], *CONFIG, "optimizer", "lr"),
        *each("betas", [[2.0, 2.0], "x", [0.1]], *CONFIG, "optimizer", "betas"),
        *each("precision", ["fp128"], *CONFIG, "precision", "dtype"),
        *each("steps", [0, -5], *CONFIG, "train", "steps"),
        *each("blend", [["${oc.env:HOME}"], [3]], *CONFIG, "data", "blend"),
        ("other dtype", put("tensors", QKV, "dtype", to="I64")),
        ("no tensors", put("tensors", to={})),
        ("layer gone", lambda body: body["tensors"].pop(QKV)),
    ]
)
"""Mutations of the saved settings (or the tensors they are of), which no command builds a model of."""

SEGMENT = {"from_sample": 0, "sources": [{"name": "c", "path": "c", "weight": 1.0, "first": 0}]}
COUNTERS: dict[str, Edit] = dict(
    [
        *each("step", [-1, 3, 2.0, "2", None, ...], "state", "step"),
        *each("samples", [-4, 1.5, "4", 1 << 63, None, ...], "state", "consumed_samples"),
        *each("applied", [-1, "x", 1e300, None, ...], "state", "applied_steps"),
        *each("scaler", [{}, None, [], ESC, ...], "state", "scaler"),
        *each("scale", [0.0, -1.0, 1e300, "x"], "state", "scaler", "scale"),
        *each("clean", [-1, 1 << 40, 1.5], "state", "scaler", "clean_steps"),
        *each("skipped", [-1, 1 << 62], "state", "scaler", "skipped"),
        *each(
            "data",
            [[], {}, ESC, {"segments": []}, {"segments": {}}, {"segments": [SEGMENT]}],
            "state",
            "data",
        ),
    ]
)
"""Mutations of a training run's counters, with which no run resumes."""


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the tensors."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def edit_header(edit: Edit) -> Callable[[Path], None]:
    """Change the header of model.safetensors."""

    def act(folder: Path) -> None:
        path = folder / "model.safetensors"
        header, tensors = header_of(path)
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)

    return act


def edit_config(edit: Edit) -> Callable[[Path], None]:
    """Change config.json."""

    def act(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        edit(said)
        (folder / "config.json").write_text(json.dumps(said))

    return act


def replace(name: str, content: bytes, size: int | None = None) -> Callable[[Path], None]:
    """Another file in the place of one; `size` makes it sparse."""

    def act(folder: Path) -> None:
        with open(folder / name, "wb") as f:
            f.write(content)
            if size is not None:
                f.truncate(size)

    return act


def index(weight_map: Any) -> Callable[[Path], None]:
    """An index of shards in the place of model.safetensors."""

    def act(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return act


def link(name: str, target: str) -> Callable[[Path], None]:
    """A link in the place of a file."""

    def act(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return act


WTE = "wte.weight"
FOLDERS: dict[str, Callable[[Path], None]] = (
    {
        name: edit_config(edit)
        for name, edit in [
            *each("n_layer", [0, -1, 10**9, 2, True, None, 1.5, [], {"a": 1}, ESC], "n_layer"),
            *each("n_head", [0, -1, 3, 1 << 70, "x"], "n_head"),
            *each("n_embd", [0, 15, 10**9, 1 << 20], "n_embd"),
            *each("vocab_size", [0, 1 << 24, HUGE, 60], "vocab_size"),
            *each("n_positions", [0, 1 << 24, HUGE], "n_positions"),
            *each("n_inner", [0, 10**12, 3], "n_inner"),
            *each("activation_function", ["relu", ESC, None, 3], "activation_function"),
            *each("layer_norm_epsilon", [-1, "x", None], "layer_norm_epsilon"),
            *each("dropout", [1.5, ESC], "resid_pdrop"),
            *each("model_type", ["llama", ESC, None, 3, [], ...], "model_type"),
            *each("cross attention", [True, 1], "add_cross_attention"),
        ]
    }
    | {
        f"header: {name}": edit_header(edit)
        for name, edit in [
            *each("dtype", ["F8", ESC, None, "I64", []], WTE, "dtype"),
            *each("shape", [[HUGE], [-1, -1], [1 << 62] * 8, "x", [1] * 40, None], WTE, "shape"),
            *each("offsets", [[0, HUGE], [-1, 0], [], None, [0, 1], "xy"], WTE, "data_offsets"),
            *each("metadata", [[], "x", 3], "__metadata__"),
            ("name", lambda header: header.update({ESC: header.pop(WTE)})),
            ("further", lambda header: header.update(x=dict(header[WTE]))),
            ("gone", lambda header: header.pop(WTE)),
        ]
    }
    | {
        f"config.json: {content[:12]!a}": replace("config.json", content)
        for content in (
            *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe{}", b"[" * 200_000, b'{"a":' * 100_000),
            *(b'{"model_type": "gpt2", "n_layer": 1' + b"0" * 5000 + b"}", b'{"layer_norm_epsilon": NaN}'),
            *(b'{"n_layer": 1e999}', b'{"n_layer": 1, "n_layer": 2}'),
        )
    }
    | {
        "sparse config": replace("config.json", b"{}", 16 * GIB),
        "sparse index": lambda folder: [
            (folder / "model.safetensors").unlink(),
            replace("model.safetensors.index.json", b"{}", 16 * GIB)(folder),
        ][0],
        "sparse weights": replace("model.safetensors", (64).to_bytes(8, "little") + b"{}", 16 * GIB),
        "weights of zeros": replace("model.safetensors", b"", 16 * GIB),
        "long header": replace("model.safetensors", (1 << 62).to_bytes(8, "little"), 16 * GIB),
        "weights of brackets": replace(
            "model.safetensors", (1 << 16).to_bytes(8, "little") + b"[" * (1 << 16)
        ),
        "empty weights": replace("model.safetensors", b""),
        "weights cut": lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:-4]
        ),
        "weights elsewhere": link("model.safetensors", "/etc/passwd"),
        "weights without end": link("model.safetensors", "/dev/zero"),
        "config elsewhere": link("config.json", "/etc/passwd"),
        "config in circles": link("config.json", "config.json"),
        "index out of the folder": index({"a": "../x.safetensors"}),
        "index of an absolute path": index({"a": "/etc/x.safetensors"}),
        "index of a control character": index({"a": f"{ESC}.safetensors"}),
        "index of numbers": index({"a": 3}),
        "index of nothing": index({}),
        "index of a list": index([]),
        "index of what is not there": index({"a": "a.safetensors"}),
        "adapter": replace("adapter_config.json", b"{}"),
    }
)
"""Mutations of a model folder of transformers, which is neither imported nor evaluated."""
