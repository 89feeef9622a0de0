"""A vLLM server that the engine starts, and starts again when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_madrl.rollouts.vllm_client import Server

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class ChildServer(Server):
    """A server process on a free port of this machine, with its output in a file.

    Args:
        model: folder with configuration and weights to start from.
        options: of the server's command line; ``True`` stands for a bare flag.
        environment: in addition to this process's.
        log: file that receives the server's output.
        timeout: see :class:`~lit_madrl.rollouts.vllm_client.Server`.
    """

    def __init__(
        self,
        model: Path,
        options: dict[str, Any],
        environment: dict[str, str],
        log: Path,
        timeout: float,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{port}", timeout)
        arguments = {"model": model, "host": "127.0.0.1", "port": port, **options}
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in arguments.items():
            self.command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self.environment = environment
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._has_served = False

    def weight_version(self) -> str:
        """See :class:`~lit_madrl.rollouts.vllm_client.Server`."""
        version = super().weight_version()
        self._has_served = True
        return version

    def revive(self) -> None:
        """Start the server if it does not run.

        Raises:
            RuntimeError: it died without ever having answered, so it would again.
        """
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None and not self._has_served:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(
                f"server {self.url}: expected it to start, but it ended with status {self.process.returncode}: "
                f"{' '.join(self.command)}\n{tail}"
            )
        self.stop()
        # What the engine in this process sets for itself is not meant for a server.
        inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**inherited, **ENVIRONMENT, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its workers end with it, see stop()
            )
        self._has_served = False

    def stop(self) -> None:
        """End the server and the workers it may have left behind."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
