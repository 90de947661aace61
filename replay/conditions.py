"""Applying the switches that change a model, and undoing them exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rolltape.recorder.digest import named_weights
from rolltape.recorder.facts import experts_implementation
from rolltape.recorder.moe import MoeBlock, find_moe_blocks
from rolltape.replay.switches import Switches
from rolltape.store.errors import UsageError


@contextmanager
def applied(model: nn.Module, switches: Switches) -> Iterator[None]:
    """The model with dtype, attention, router and lm_head as the switches say, in eval mode.

    Afterwards it has the tensors, modes and settings that it had before.

    Raises:
        UsageError: a switch that this model cannot do.
    """
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        if switches.dtype != "model":
            stack.enter_context(_cast(model, getattr(torch, switches.dtype)))
            if switches.dtype == "float64" and experts_implementation(model) is not None:
                stack.enter_context(_eager_experts(model))
        if switches.attention != "model":
            stack.enter_context(_attention(model, switches.attention))
        if switches.router == "float32":
            blocks = find_moe_blocks(model)
            if not blocks:
                raise UsageError("switch router=float32: the model has no MoE router")
            for block in blocks:
                stack.enter_context(_float32_router(block))
        if switches.lm_head == "float32":
            stack.enter_context(_float32_head(model))
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _swapped(tensors: list[torch.Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Other data under the same parameters, so that tied ones stay tied."""
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def _cast(model: nn.Module, dtype: torch.dtype) -> Any:
    """All weights in another dtype, as `from_pretrained(dtype=...)` would give them.

    Buffers that are not part of the checkpoint stay (rotary frequencies lose their accuracy in
    bfloat16), and so do the weights that the architecture keeps in float32.
    """
    keep: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        keep |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    tensors = [
        tensor
        for name, tensor in named_weights(model)
        if tensor.is_floating_point()
        and not (tensor.dtype == torch.float32 and keep & set(name.split(".")))
    ]
    return _swapped(tensors, dtype)


@contextmanager
def _eager_experts(model: Any) -> Iterator[None]:
    # the grouped kernels have no float64
    before = experts_implementation(model)
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def _attention(model: Any, wanted: str) -> Iterator[None]:
    from transformers.utils.import_utils import is_flash_attn_2_available

    if wanted == "flash_attention_2" and not is_flash_attn_2_available():
        raise UsageError("switch attention=flash_attention_2: flash-attn is not usable here")
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(wanted)
    except (ImportError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"switch attention={wanted}: {reason}") from error
    try:
        if model.config._attn_implementation != wanted:
            raise UsageError(
                f"switch attention={wanted}: {type(model).__name__} cannot change its attention"
            )
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _float32_router(block: MoeBlock) -> Iterator[None]:
    """Router arithmetic in float32; the experts get weights in the dtype that they expect."""
    router = block.router
    parameter = next(router.parameters())
    with torch.no_grad():
        row = torch.zeros(1, parameter.shape[-1], dtype=parameter.dtype, device=parameter.device)
        output = router(row)
    if not isinstance(output, tuple) or len(output) != 3:
        raise UsageError(
            f"switch router=float32: {block.name} computes its weights outside of the router",
            hint="transformers 5.11 or later",
        )
    expected = output[1].dtype

    def widen(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].float(), *args[1:])

    def narrow(_module: nn.Module, _args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        return output[0], output[1].to(expected), output[2]

    tensors = [t for t in (*router.parameters(), *router.buffers()) if t.is_floating_point()]
    with _swapped(tensors, torch.float32), ExitStack() as stack:
        stack.callback(router.register_forward_pre_hook(widen).remove)
        stack.callback(router.register_forward_hook(narrow).remove)
        yield


@contextmanager
def _float32_head(model: Any) -> Iterator[None]:
    """The language-model head in float32 on the final hidden state; a tied embedding stays."""
    head = model.get_output_embeddings()
    if head is None:
        raise UsageError(f"switch lm_head=float32: {type(model).__name__} has no head")
    before = dict(head.named_parameters(recurse=False))

    def widen(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].float(), *args[1:])

    handle = head.register_forward_pre_hook(widen)
    try:
        for name, parameter in before.items():
            setattr(head, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
        yield
    finally:
        handle.remove()
        for name, parameter in before.items():
            setattr(head, name, parameter)
