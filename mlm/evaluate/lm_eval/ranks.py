"""The model of lm-eval's `mlm`: in lm-eval's own process, or on separate ranks.

lm-eval is one process and knows nothing of tp or pp. For more than one rank it therefore starts a command
that starts the ranks, `python -m mlm.evaluate.lm_eval.ranks CONFIG.json`, and talks to rank 0 over a Unix
socket in a folder only this user can enter. Rank 0 broadcasts each request; all ranks execute it.

A message is two lengths of 8 bytes, little-endian, then that much JSON and an array of that many bytes: int64
tokens, float64 scores. Nothing is pickled.
"""

import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mlm.config.build import from_dict, to_dict
from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.config import LmEvalConfig
from mlm.inference.generation import Sampling, continuations, ends_at
from mlm.inference.scoring import Request, Score, score
from mlm.inference.trained import Trained, load_tokenizer, load_trained
from mlm.launch.child_run import kill, plain_environment
from mlm.launch.process import ALONE, rank_device
from mlm.launch.start import run_job
from mlm.parallel.collectives import broadcast
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.system import die_with_parent

Advance = Callable[[int], None]
POLL_S = 0.2
IDLE_S = 20.0
"""Period at which an idle rank 0 notifies the others, which would take its silence for a hang."""
LEAVE_S = 10.0
STDERR = 2
HEADER = struct.Struct("<QQ")


class Channel:
    """One end of the socket between lm-eval and rank 0."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @classmethod
    def connect(cls, path: str) -> "Channel":
        """Rank 0's end."""
        end = socket.socket(socket.AF_UNIX)
        end.connect(path)
        return cls(end)

    def is_ready(self, seconds: float) -> bool:
        """True if a message, or the peer's disconnection, arrives within this time."""
        return bool(select.select([self.end], [], [], seconds)[0])

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a message. Raises OSError when the other has left."""
        content = json.dumps(head).encode()
        self.end.sendall(HEADER.pack(len(content), len(body)) + content + body)

    def receive(self) -> bytes | None:
        """The next message as it was sent; None when the other has left."""
        start = self._exactly(HEADER.size)
        rest = None if start is None else self._exactly(sum(HEADER.unpack(start)))
        return None if start is None or rest is None else start + rest

    def _exactly(self, count: int) -> bytes | None:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            received = self.end.recv_into(view)
            if not received:
                return None
            view = view[received:]
        return bytes(content)


def read_message(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Its JSON and its array."""
    size, _ = HEADER.unpack_from(message)
    middle = HEADER.size + size
    return json.loads(message[HEADER.size : middle]), message[middle:]


class Model(Protocol):
    """Interface of the model to the adapter, in this process or on other ranks."""

    def score(self, requests: Sequence[Request], advance: Advance) -> list[Score]:
        """See `scoring.score`."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sampling, stops: Sequence[str], advance: Advance
    ) -> list[list[int]]:
        """New tokens of each prompt, up to one of the texts `stops` or the end of the document."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


class LocalModel:
    """The model on this process alone, or this rank's part of it. Its methods are collective over `ctx`."""

    def __init__(self, config: LmEvalConfig, ctx: ParallelContext | None = None) -> None:
        self.ctx = ctx or ParallelContext(device=rank_device(config.dist, ALONE))
        self.trained: Trained = load_trained(config.ckpt, config.parallel, config.precision, self.ctx)
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer, self.trained.path)
        self.batch_size = config.batch_size

    def score(self, requests: Sequence[Request], advance: Advance) -> list[Score]:
        """Score the requests on these ranks."""
        return score(self.trained, requests, batch_size=self.batch_size, ctx=self.ctx, advance=advance)

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sampling, stops: Sequence[str], advance: Advance
    ) -> list[list[int]]:
        """Continue the prompts on these ranks."""
        eod_id, until = self.tokenizer.eod_id, ends_at(self.tokenizer, stops)
        texts: list[list[int]] = [[] for _ in prompts]
        found = continuations(self.trained, prompts, options, ctx=self.ctx, eod_id=eod_id, until=until)
        for index, token in found:
            if token is None:
                advance(1)
            else:
                texts[index].append(token)
        return texts

    def close(self) -> None:
        """Do nothing: the model is this process's."""


def serve(config: LmEvalConfig, ctx: ParallelContext) -> None:
    """Serve lm-eval's requests until it disconnects. Every rank calls this; rank 0 has the socket."""
    model = LocalModel(config, ctx)
    channel = Channel.connect(config.socket) if ctx.is_main else None

    def tell(head: dict[str, Any], body: bytes = b"") -> None:
        if channel is not None:
            channel.send(head, body)

    tell({"ready": True})
    idle_s = min(IDLE_S, config.dist.timeout_s / 4)
    while (message := next_message(channel, ctx, idle_s)) is not None:
        tell(*answer(model, *read_message(message), lambda count: tell({"advance": count})))


def next_message(channel: Channel | None, ctx: ParallelContext, idle_s: float) -> bytes | None:
    """Return rank 0's next message on every rank; None when lm-eval has left."""
    while True:
        message: bytes | None = b""
        if channel is not None and channel.is_ready(idle_s):
            message = channel.receive()
        size = torch.tensor([-1 if message is None else len(message)])
        count = int(broadcast(size, ctx.world, 0))
        if count < 0:
            return None
        if count > 0:
            content = torch.frombuffer(bytearray(message or bytes(count)), dtype=torch.uint8)
            return broadcast(content, ctx.world, 0).numpy().tobytes()


def answer(model: Model, head: dict[str, Any], body: bytes, advance: Advance) -> tuple[dict[str, Any], bytes]:
    """Execute a request on this rank; return the reply."""
    texts = np.split(np.frombuffer(body, np.int64), np.cumsum(head["lengths"])[:-1])
    if head["do"] == "score":
        requests = [Request(text, first) for text, first in zip(texts, head["firsts"], strict=True)]
        scores = model.score(requests, advance)
        rows = np.array([(s.loss, s.is_greedy, s.tokens) for s in scores], dtype=np.float64)
        return {"done": True}, rows.tobytes()
    prompts = [text.tolist() for text in texts]
    new = model.generate(prompts, Sampling(**head["options"]), head["stops"], advance)
    return {"done": True, "new": new}, b""


class RemoteModel:
    """The model on ranks that this process starts, and that end with it."""

    def __init__(self, config: LmEvalConfig) -> None:
        """Raises UserError when the ranks do not start; their output is on stderr."""
        self.folder = tempfile.TemporaryDirectory(prefix="mlm-lm-eval-")
        path = Path(self.folder.name)
        config = replace(config, socket=str(path / "socket"))
        (path / "config.json").write_text(json.dumps(to_dict(config)))
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(config.socket)
        except OSError as error:
            raise UserError(f"{config.socket}: {error}: set TMPDIR to another folder") from None
        listener.listen(1)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlm.evaluate.lm_eval.ranks", str(path / "config.json")],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,  # lm-eval's stdout is for its results
            env=plain_environment(os.environ),
            start_new_session=True,  # Ctrl-C is for lm-eval, which ends the ranks
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        self._end = weakref.finalize(self, kill, self.process)  # also when Python ends
        with listener:
            while not select.select([listener], [], [], POLL_S)[0]:
                self._check_alive()
            self.channel = Channel(listener.accept()[0])
        self._reply(lambda count: None)

    def score(self, requests: Sequence[Request], advance: Advance) -> list[Score]:
        """Have the ranks score the requests."""
        if not requests:
            return []
        head = {"do": "score", "firsts": [request.first for request in requests]}
        _, body = self._ask(head, [request.tokens for request in requests], advance)
        rows = np.frombuffer(body, np.float64).reshape(-1, 3).tolist()
        return [Score(loss, bool(greedy), int(tokens)) for loss, greedy, tokens in rows]

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sampling, stops: Sequence[str], advance: Advance
    ) -> list[list[int]]:
        """Have the ranks continue the prompts."""
        if not prompts:
            return []
        head = {"do": "generate", "options": asdict(options), "stops": list(stops)}
        reply, _ = self._ask(head, [np.array(prompt) for prompt in prompts], advance)
        return list(reply["new"])

    def close(self) -> None:
        """End the ranks."""
        self.channel.end.close()  # rank 0 sees the end of the stream, and all leave
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        self._end()
        self.folder.cleanup()

    def _ask(
        self, head: dict[str, Any], texts: Sequence[NDArray[np.int64]], advance: Advance
    ) -> tuple[dict[str, Any], bytes]:
        body = np.concatenate(texts).astype(np.int64).tobytes()
        try:
            self.channel.send(head | {"lengths": [len(text) for text in texts]}, body)
            return self._reply(advance)
        except KeyboardInterrupt:
            self._end()  # they are in the middle of it
            raise
        except OSError:
            raise self._failure() from None

    def _reply(self, advance: Advance) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request; `advance` receives the progress before it."""
        while (message := self.channel.receive()) is not None:
            head, body = read_message(message)
            if "advance" not in head:
                return head, body
            advance(head["advance"])
        raise self._failure()

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise self._failure()

    def _failure(self) -> UserError:
        """Return the error for ranks that have ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        self._end()
        code = self.process.returncode
        kind = UserError if code == UserError.exit_code else CheckFailedError
        return kind(f"the ranks that lm-eval started have ended with code {code}; the reason is above")


def main() -> int:
    """Start the ranks; the exit code."""
    config = from_dict(LmEvalConfig, json.loads(Path(sys.argv[1]).read_bytes()))
    target = "mlm.evaluate.lm_eval.ranks:serve"
    try:
        return run_job(target, config, out=None)
    except UserError as error:
        print(f"mlm: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
