"""Standard output as a shell may leave it."""

import io
import subprocess
import sys

import pytest

from mlm.util.system import writable_streams
from tests.slow import slow_but


class TestStreams:
    """Standard output as a shell may leave it."""

    def test_text_that_an_encoding_lacks_is_written_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        with writable_streams():
            print("80 × 2 …")
        assert raw.getvalue() == b"80 \\xd7 2 \\u2026\n"

    def test_closed_streams_take_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
        with writable_streams():
            assert not sys.stdout.isatty()
            print("nobody reads this", file=sys.stderr)
        assert sys.stdout is None

    @pytest.mark.parametrize(
        "line, code, said",
        slow_but(
            {1, 3},
            [
                ('"$0" -m mlm help pretrain', 0, ""),
                ('"$0" -m mlm help pretrain | true; exit "${PIPESTATUS[0]}"', 0, ""),
                ('"$0" -m mlm plan schedule pp=2 | true; exit "${PIPESTATUS[0]}"', 0, ""),
                (
                    '"$0" -m mlm help pretrain > /dev/full',
                    1,
                    "mlm: standard output: No space left on device; what follows is not shown\n",
                ),
            ],
        ),
    )
    def test_command_survives_its_standard_output(self, line: str, code: int, said: str) -> None:
        env = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
        found = subprocess.run(
            ["bash", "-c", line, sys.executable], capture_output=True, text=True, env=env, timeout=120
        )
        assert (found.returncode, found.stderr) == (code, said)
