"""The model of lm-eval's `mlm`: in lm-eval's own process, or on separate ranks.

lm-eval is one process without tp or pp. For more than one rank it starts a command that starts the ranks,
`python -m mlm.evaluate.lm_eval.ranks CONFIG.json`, and talks to rank 0 in JSON over a Unix socket in a folder
that only this user can enter. Rank 0 broadcasts each request; all ranks execute it.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np

from mlm.checkpoint.native.exchange import Ranks
from mlm.config.build import from_dict, to_dict
from mlm.convert.source import open_source
from mlm.evaluate.lm_eval.config import LmEvalConfig
from mlm.inference.config import Sampling
from mlm.inference.generation import ends_at, generate
from mlm.inference.scoring import Request, Score, score
from mlm.inference.trained import load_trained
from mlm.launch.child_run import environment_without_launcher, kill
from mlm.launch.process import ALONE, rank_device
from mlm.launch.start import run_job
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.system import die_with_parent

Advance = Callable[[int], None]
Message = dict[str, Any]
IDLE_S = 20.0
"""Period at which an idle rank 0 notifies the others, which would take its silence for a hang."""
EXIT_S = 10.0


class LocalModel:
    """The model on this process alone, or this rank's part of it. Its methods are collective over `ctx`."""

    def __init__(self, config: LmEvalConfig, ctx: ParallelContext | None = None) -> None:
        self.ctx = ctx or ParallelContext(device=rank_device(config.dist, ALONE))
        self.trained = load_trained(open_source(config.ckpt), config.parallel, config.precision, self.ctx)
        self.tokenizer = self.trained.source.load_tokenizer(config.tokenizer, any_size=True)
        self.batch_size = config.batch_size

    def score(self, requests: Sequence[Request], advance: Advance) -> list[Score]:
        return score(self.trained, requests, batch_size=self.batch_size, ctx=self.ctx, advance=advance)

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sampling, stops: Sequence[str], advance: Advance
    ) -> list[list[int]]:
        """New tokens of each prompt, up to one of the texts `stops` or the end of the document."""
        ends, until = self.tokenizer.end_ids, ends_at(self.tokenizer, stops)
        return generate(
            self.trained, prompts, options, ctx=self.ctx, eod_id=ends, until=until, advance=advance
        )


def serve(config: LmEvalConfig, ctx: ParallelContext) -> None:
    """Serve lm-eval's requests until it disconnects. Every rank calls this; rank 0 has the socket."""
    model, ranks = LocalModel(config, ctx), Ranks.of(ctx)
    connection = Client(config.socket, "AF_UNIX") if ctx.is_main else None
    idle_s = min(IDLE_S, config.dist.timeout_s / 4)

    def reply(message: Message) -> None:
        if connection is not None:
            connection.send_bytes(json.dumps(message).encode())

    reply({"ready": True})
    while (request := ranks.broadcast(next_request(connection, idle_s))) != "end":
        if request is not None:
            reply(answer(model, request, lambda count: reply({"advance": count})))


def next_request(connection: Connection | None, idle_s: float) -> Message | str | None:
    """Return lm-eval's next request, None if there is none in `idle_s`, "end" if it has disconnected."""
    if connection is None or not connection.poll(idle_s):
        return None
    try:
        request: Message = json.loads(connection.recv_bytes())
    except EOFError:
        return "end"
    return request


def answer(model: LocalModel, request: Message, advance: Advance) -> Message:
    if request["do"] == "score":
        requests = [Request(np.array(tokens, np.int64), first) for first, tokens in request["requests"]]
        return {"scores": [[s.loss, s.is_greedy, s.tokens] for s in model.score(requests, advance)]}
    options = Sampling(**request["options"])
    return {"new": model.generate(request["prompts"], options, request["stops"], advance)}


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
            stdout=2,  # stderr: lm-eval's stdout is for its results
            env=environment_without_launcher(os.environ),
            start_new_session=True,  # Ctrl-C is for lm-eval, which ends the ranks
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        self._end = weakref.finalize(self, kill, self.process)  # also when Python ends
        listener.settimeout(0.2)  # select knows descriptors below 1,024 only
        connected: socket.socket | None = None
        with listener:
            while connected is None:
                with suppress(TimeoutError):
                    connected = listener.accept()[0]
                if connected is None and self.process.poll() is not None:
                    raise self._failure()
        self.connection = Connection(connected.detach())
        self._reply(lambda count: None)

    def score(self, requests: Sequence[Request], advance: Advance) -> list[Score]:
        rows = [[request.first, request.tokens.tolist()] for request in requests]
        reply = self._ask({"do": "score", "requests": rows}, advance)
        return [Score(*entry) for entry in reply["scores"]]

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sampling, stops: Sequence[str], advance: Advance
    ) -> list[list[int]]:
        message = {"do": "generate", "options": asdict(options), "stops": [*stops], "prompts": [*prompts]}
        return list(self._ask(message, advance)["new"])

    def close(self) -> None:
        self.connection.close()  # rank 0 sees the end of the stream, and all exit
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        self._end()
        self.folder.cleanup()

    def _ask(self, request: Message, advance: Advance) -> Message:
        try:
            self.connection.send_bytes(json.dumps(request).encode())
            return self._reply(advance)
        except KeyboardInterrupt:
            self._end()  # they are in the middle of it
            raise
        except OSError:
            raise self._failure() from None

    def _reply(self, advance: Advance) -> Message:
        """Return the reply to a request; `advance` receives the progress before it."""
        try:
            while "advance" in (message := json.loads(self.connection.recv_bytes())):
                advance(message["advance"])
        except EOFError:
            raise self._failure() from None
        return dict(message)

    def _failure(self) -> UserError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        self._end()
        code = self.process.returncode
        kind = UserError if code == UserError.exit_code else CheckFailedError
        return kind(f"the ranks that lm-eval started have ended with code {code}; the reason is above")


Model = LocalModel | RemoteModel


def main() -> int:
    """Start the ranks; the exit code."""
    config = from_dict(LmEvalConfig, json.loads(Path(sys.argv[1]).read_bytes()))
    try:
        return run_job("mlm.evaluate.lm_eval.ranks:serve", config, out=None)
    except UserError as error:
        print(f"mlm: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
