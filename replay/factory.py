"""`--on package.module:factory`: a model of the user's own scores a tape.

The protocol is one function:

    def factory(tape, *, device, dtype):
        return model

`tape` is the open tape, `device` a `torch.device` and `dtype` the `torch.dtype` that the tape was
recorded in. The model is called as a transformers causal language model is:
model(input_ids=[B, S], attention_mask=[B, S] or None, use_cache=False) with `position_ids` [B, S]
in a packed layout, and returns an object with `.logits` [B, S, vocabulary]. It has a transformers
`config`. It may be sharded over the ranks of torch.distributed, which the factory starts.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from rolltape.replay.batches import Batch
from rolltape.replay.models import dtype_of
from rolltape.store import Tape, UsageError

Factory = Callable[..., nn.Module]

_PROTOCOL = "factory(tape, *, device, dtype) -> model"


def load_factory(text: str) -> Factory:
    """The function that `package.module:name` names. The current folder is searched first.

    Raises:
        UsageError: no such module or function, or it cannot be called as the protocol says.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise UsageError(f"--on {text}: not package.module:factory")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"--on {text}: no module {missing}",
                hint="run it where the module can be imported, or set PYTHONPATH",
            ) from error
        raise UsageError(f"--on {text}: {module_name} needs {missing}") from error
    try:
        factory = attrgetter(name)(module)
    except AttributeError as error:
        raise UsageError(
            f"--on {text}: {module.__file__ or module_name} has no {name}", hint=_PROTOCOL
        ) from error
    if not callable(factory):
        raise UsageError(f"--on {text}: {name} is a {type(factory).__name__}", hint=_PROTOCOL)
    try:
        inspect.signature(factory).bind(None, device=None, dtype=None)
    except TypeError as error:
        raise UsageError(f"--on {text}: {error}", hint=_PROTOCOL) from error
    return factory  # type: ignore[no-any-return]


def build(factory: Factory, tape: Tape, *, on: str, device: str | None) -> nn.Module:
    """The factory's model.

    Args:
        factory: from `load_factory`; what it raises is not caught.
        tape: what is to be scored.
        on: how the user named the factory.
        device: torch device; by default the CUDA device of LOCAL_RANK if there is CUDA.

    Raises:
        UsageError: it returns something else than a model with a config and weights.
    """
    if device is None:
        local = os.environ.get("LOCAL_RANK") or 0
        device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device}: {str(error).splitlines()[0]}") from error
    model: Any = factory(tape, device=place, dtype=dtype_of(tape))
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--on {on}: it returned a {type(model).__name__}, not a torch module", hint=_PROTOCOL
        )
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise UsageError(
            f"--on {on}: its {type(model).__name__} has no transformers config",
            hint="return the model and not a wrapper of it, or give the wrapper `.config`",
        )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise UsageError(f"--on {on}: its {type(model).__name__} has no weights")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise UsageError(
                f"--on {on}: {name} is on the meta device", hint="load the weights in the factory"
            )
    return model


def check_output(model: nn.Module, batch: Batch, device: torch.device, *, on: str) -> None:
    """One forward, to see that what the model returns can be scored.

    Raises:
        UsageError: no `.logits`, or not [B, S, vocabulary] in memory of this process.
    """
    inputs = batch.inputs(device)
    try:
        output: Any = model(**inputs)
    except TypeError as error:
        names = ", ".join(inputs)
        raise UsageError(f"--on {on}: the model does not take {names}: {error}") from error
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise UsageError(f"--on {on}: the model returned a {type(output).__name__} without .logits")
    if hasattr(logits, "full_tensor"):
        raise UsageError(
            f"--on {on}: the logits are a DTensor", hint="return logits.full_tensor() on every rank"
        )
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    shape = batch.rows, batch.columns, int(text.vocab_size)
    if logits.ndim != 3 or logits.shape[:2] != shape[:2] or logits.shape[2] < shape[2]:
        raise UsageError(
            f"--on {on}: logits are {list(logits.shape)}, expected {list(shape)}",
            hint="every rank returns all positions and the whole vocabulary",
        )
