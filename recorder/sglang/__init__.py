"""SGLang: what passes through the tokenizer manager, the one door of all its front ends.

`Engine.generate`, `/generate` and the OpenAI endpoints hand a request to it and get their answer
from it, so the recorder stands there: it changes no request and no answer, and imports nothing into
the scheduler.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Entry point `sglang.srt.plugins`: SGLang calls it in every process of an engine.

    It does nothing unless a recording was asked for. Processes that the import hook reached are
    being watched already; this is for those it did not.
    """
    if os.environ.get("ROLLTAPE_TAPE") and "_rolltape_hook" not in sys.modules:
        from rolltape.recorder.inject import _rolltape_hook

        _rolltape_hook.start()
