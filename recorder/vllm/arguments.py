"""What the job asked vLLM for: its engine arguments before the engine resolves them."""

from __future__ import annotations

import dataclasses
from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import recording

_ATTRIBUTE = "_rolltape_requested"
#: May hold secrets.
_SECRET = ("hf_token", "model_loader_extra_config")
#: Other words for the same type.
_TYPES = {"half": "float16", "float": "float32"}

_patches = Patches()


def bind() -> bool:
    """Patch the arguments of an engine; called once their module has been imported."""
    from vllm.engine.arg_utils import EngineArgs

    return _patches.around(EngineArgs, "create_engine_config", _around_create)


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


def requested_of(config: Any) -> dict[str, Any]:
    """The arguments that a `VllmConfig` was made from, as far as they are not the defaults.

    Empty if it was not made from any, or in another way.
    """
    found = getattr(config, _ATTRIBUTE, None)
    return dict(found) if isinstance(found, dict) else {}


def read_arguments(arguments: Any) -> dict[str, Any]:
    """JSON-able fields of an `EngineArgs` that are not what they are by default.

    Args:
        arguments: a dataclass. Fields that are objects are left out, those of `_SECRET` as well.
    """
    asked: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.name in _SECRET or not isinstance(value, (bool, int, float, str)):
            continue
        default = field.default
        if default is dataclasses.MISSING and callable(field.default_factory):
            default = field.default_factory()
        if value != default:
            asked[field.name] = getattr(value, "value", value)  # of an enum that is a string
    if asked.get("max_model_len") == -1:  # as much as fits
        asked["max_model_len"] = "auto"
    if "dtype" in asked:
        asked["dtype"] = _TYPES.get(asked["dtype"], asked["dtype"])
    method = (getattr(arguments, "speculative_config", None) or {}).get("method")
    return {**asked, "speculation": method} if method else asked


def _around_create(wrapped: Any, arguments: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    # `create_engine_config` writes into the arguments
    asked = session.safely("vllm.arguments", read_arguments, arguments) if session else None
    config = wrapped(*args, **kwargs)
    if asked:
        object.__setattr__(config, _ATTRIBUTE, asked)  # pickled to the workers with it
    return config
