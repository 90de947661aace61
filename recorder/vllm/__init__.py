"""vLLM: what each process of an engine records.

The front end knows requests, samples and how they end; a worker knows what ran, with which
routes, and what was drawn. Both name a row by the request id that the engine uses inside.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in every process of an engine.

    It does nothing unless a recording was asked for. Processes that the import hook reached are
    being watched already; this is for those it did not, such as actors of a running cluster.
    """
    if os.environ.get("ROLLTAPE_TAPE") and "_rolltape_hook" not in sys.modules:
        from rolltape.recorder.inject import _rolltape_hook

        _rolltape_hook.start()


def bind_config() -> None:
    """For the import hook: what is patched in the module of the configuration."""
    from rolltape.recorder.vllm import compiled, identity

    identity.bind()
    compiled.bind()


def unbind() -> None:
    """Undo `bind_config`."""
    from rolltape.recorder.vllm import compiled, identity

    compiled.unbind()
    identity.unbind()
