"""vLLM's own scheduler as a process that answers questions (vllm_side.py), seen from here."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from setup_oracle import missing, oracle_folder, oracle_python

__all__ = ["OracleProcess"]


class OracleProcess:
    """One vLLM scheduler process. Ask with `send`, get the answers in order with `receive`.

    Raises:
        RuntimeError: the environment is not there, or the process ended; the text says why and what to do.
    """

    def __init__(self, version: str) -> None:
        reason = missing(version)
        if reason is not None:
            raise RuntimeError(reason)
        folder = oracle_folder()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVTWIN_", "VLLM_"))}
        environment["PYTHONPATH"] = str(folder / f"vllm-{version}")
        environment["VLLM_NO_USAGE_STATS"] = "1"
        environment["OMP_NUM_THREADS"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [str(oracle_python()), str(Path(__file__).parent / "vllm_side.py"), str(folder / "model")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=folder,
            text=True,
        )
        self.version: str = self.receive()["vllm"]

    def send(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question, separators=(",", ":")) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._why()) from None

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._why())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.send(question)
        return self.receive()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> OracleProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _why(self) -> str:
        """The last lines that the process left on standard error."""
        self._process.wait(timeout=60)
        self._log.seek(0)
        return "vLLM's process ended:\n" + "".join(self._log.readlines()[-12:])
