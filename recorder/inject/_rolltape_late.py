"""Waits, in a process that nobody asked to record, for an engine whose workers are told late.

TensorRT-LLM starts workers in an MPI pool. They receive only variables with certain names, and
only after their interpreter has started, so each variable of a recording has a copy under such a
name. Loaded by a `.pth` at the start of every Python of its environment, recorded or not: small,
and standard library only.
"""

import os
import sys

TYPE_CHECKING = False  # the one in `typing` would cost more than all the rest
if TYPE_CHECKING:
    from typing import Any

_ENGINE = "tensorrt_llm"
#: In front of the copies: TLLM_ROLLTAPE_TAPE is that of ROLLTAPE_TAPE.
_COPIES = "TLLM_ROLLTAPE_"


def wait() -> None:
    """Start the hook when the engine is imported, if there is a recording by then."""
    sys.meta_path.insert(0, _Waiting())


def adopt() -> bool:
    """Give the copies of a recording's variables their own names, where those are not set.

    Returns:
        Whether there is a recording.
    """
    for name in [n for n in os.environ if n.startswith(_COPIES)]:
        os.environ.setdefault(name[5:], os.environ[name])
    return bool(os.environ.get("ROLLTAPE_TAPE"))


class _Waiting:
    """Finds nothing. It stays where it is: another thread may be walking that list."""

    over = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> None:
        if name == _ENGINE and not self.over:
            try:
                # without one yet this may be a question whether the engine is installed
                if adopt():
                    self.over = True
                    _start()
            except Exception as error:
                sys.stderr.write(
                    f"rolltape: this process is not recorded: {type(error).__name__}: {error}\n"
                )


def _start() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, folder)
    try:
        hook: Any = __import__("_rolltape_hook")
    finally:
        sys.path.remove(folder)
    hook.start()
