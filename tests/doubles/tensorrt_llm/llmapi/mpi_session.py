"""Starts worker processes as mpi4py's pool does.

A worker is the same interpreter, started from the launcher's environment: what the parent has set
since, or what only the recorded job has, is not there. The engine's own variables (TLLM*, TRTLLM*)
and the parent's `sys.path` come later, before the first task and with it the engine is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from typing import Any

#: All that a launcher is supposed to have in its environment.
_double_launcher = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")

_double_bootstrap = """
import os, sys
from multiprocessing.connection import Client
connection = Client(sys.argv[1], authkey=sys.stdin.buffer.read())
env, path = connection.recv()
os.environ.update(env)
sys.path.extend(p for p in path if p not in sys.path)
function, kwargs = connection.recv()
function(worker_queues=connection, **kwargs)
"""


class MpiPoolSession:
    def __init__(
        self,
        n_workers: int,
        wait_shutdown: bool = False,
        env_overrides: dict[str, str] | None = None,
    ) -> None:
        if n_workers != 1:
            raise NotImplementedError("the double has one worker")
        self.n_workers = n_workers
        self._env_overrides = dict(env_overrides or {})
        self.mpi_pool: subprocess.Popen[bytes] | None = None
        self._start_mpi_pool()

    def _start_mpi_pool(self) -> None:
        prefixes = ("TRTLLM", "TLLM")
        env = {name: v for name, v in os.environ.items() if name.startswith(prefixes)}
        env.update(self._env_overrides)
        self._double_folder = tempfile.TemporaryDirectory(prefix="double")
        address, key = os.path.join(self._double_folder.name, "socket"), os.urandom(16)
        launcher = {name: os.environ[name] for name in _double_launcher if name in os.environ}
        with Listener(address, authkey=key) as listener:
            self.mpi_pool = subprocess.Popen(
                [sys.executable, "-c", _double_bootstrap, address],
                stdin=subprocess.PIPE,
                env=launcher,
            )
            self.mpi_pool.stdin.write(key)
            self.mpi_pool.stdin.close()
            self._double_connection = listener.accept()
        self._double_connection.send((env, list(sys.path)))

    def _double_start(self, function: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function in the worker; the connection that it gets as `worker_queues`."""
        self._double_connection.send((function, kwargs))
        return self._double_connection

    def shutdown(self, wait: bool = True) -> None:
        if self.mpi_pool is not None:
            self._double_connection.close()
            self.mpi_pool.wait()
            self.mpi_pool = None
            self._double_folder.cleanup()
