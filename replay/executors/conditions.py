"""Settings of a process and a model as a recording had them, for a while, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rolltape.recorder.facts import experts_implementation, sdpa_backends
from rolltape.store import Tape, UsageError


@contextmanager
def as_recorded(model: nn.Module, wanted: Mapping[str, Any]) -> Iterator[None]:
    """A model and torch with the settings of a recording, afterwards as before.

    Args:
        model: a transformers causal language model.
        wanted: settings by the names of `engines.effective`; those that are None or not known
            here are left as they are.

    Raises:
        UsageError: a setting that cannot be had here.
    """
    settings = _settings(model)
    undo: list[Callable[[], None]] = []
    try:
        for name, (get, put) in settings.items():
            value = wanted.get(name)
            before = get()
            if value is None or value == before:
                continue
            undo.append(functools.partial(put, before))
            try:
                put(value)
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UsageError(f"{name}={value} of the recording: {reason}") from error
            if get() != value:
                raise UsageError(f"{name}={value} of the recording cannot be had here")
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _settings(model: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    cuda = torch.backends.cuda

    def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    return {
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic_algorithms": (
            torch.are_deterministic_algorithms_enabled,
            # what has no deterministic kernel ran in the recording too
            lambda value: torch.use_deterministic_algorithms(value, warn_only=value),
        ),
        "float32_matmul_precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "allow_tf32": attribute(cuda.matmul, "allow_tf32"),
        "allow_bf16_reduced_precision_reduction": attribute(
            cuda.matmul, "allow_bf16_reduced_precision_reduction"
        ),
        "cudnn_deterministic": attribute(torch.backends.cudnn, "deterministic"),
        "cudnn_benchmark": attribute(torch.backends.cudnn, "benchmark"),
        "sdpa": (sdpa_backends, _allow_sdpa),
        "attention": (
            lambda: getattr(model.config, "_attn_implementation", None),
            lambda value: model.set_attn_implementation(value),
        ),
        "experts": (
            lambda: experts_implementation(model),
            lambda value: model.set_experts_implementation(value),
        ),
        "training": (lambda: model.training, lambda value: _train(model, value)),
    }


def _allow_sdpa(names: str) -> None:
    cuda, allowed = torch.backends.cuda, set(names.split(","))
    cuda.enable_flash_sdp("flash" in allowed)
    cuda.enable_mem_efficient_sdp("mem_efficient" in allowed)
    cuda.enable_math_sdp("math" in allowed)
    cuda.enable_cudnn_sdp("cudnn" in allowed)


def _train(model: nn.Module, training: bool) -> None:
    model.train(training)


def changed_conditions(tape: Tape, engine: str, now: Mapping[str, Any]) -> list[str]:
    """What is not as it was and cannot be set: device, libraries, variables. One line each.

    Args:
        tape: the recording.
        engine: uuid of its engine.
        now: the `engines` row of the re-execution, JSON columns decoded.
    """
    then = tape.engine(engine)
    lines = [
        f"{name}: {then[name]} when recorded, {now[name]} now"
        for name in ("device", "host")
        if then.get(name) != now.get(name)
    ]
    for name in ("torch", "transformers", "triton", "cuda"):
        was, is_ = then["versions"].get(name), now["versions"].get(name)
        if was != is_:
            lines.append(f"{name}: {was} when recorded, {is_} now")
    names = sorted({n for row in (then, now) for n in row["effective"] if n.startswith("env.")})
    for name in names:
        was, is_ = then["effective"].get(name), now["effective"].get(name)
        if was != is_:
            lines.append(f"{name.removeprefix('env.')}: {was} when recorded, {is_} now")
    return lines
