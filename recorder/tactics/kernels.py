"""Kernel names of plain torch, by its profiler, for the first forwards of new shapes.

torch has no tuner to ask: cuBLAS, cuDNN, oneDNN and the dispatcher choose on their own. A profile
shows what ran. It slows down the forward that it looks at, so it is opt-in and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rolltape.recorder.tactics.rows import Tactic, put

if TYPE_CHECKING:
    from rolltape.recorder.session import Session

#: Rows of one profile; a forward of a large model has fewer distinct (operator, shapes, kernel).
MOST_ROWS = 2000
#: Operators that others call to prepare their output.
_HELPERS = frozenset({"aten::clone", "aten::copy_", "aten::fill_", "aten::zero_", "aten::zeros"})
_NO_KERNEL_NAMES = """
alias as_strided as_strided_ chunk contiguous detach detach_ empty empty_like empty_strided expand
expand_as flatten item lift lift_fresh narrow permute reshape resize_ resolve_conj resolve_neg
result_type select slice split squeeze t to transpose unbind unflatten unsqueeze view view_as
_has_compatible_shallow_copy_type _local_scalar_dense _reshape_alias _to_copy _unsafe_view
"""
#: Operators that make or describe tensors and compute nothing.
_NO_KERNEL = frozenset(f"aten::{name}" for name in _NO_KERNEL_NAMES.split())


class KernelProfiler:
    """Profiles at most `left` forwards of a model, each of a shape that was not profiled before.

    Args:
        left: forwards that may still be profiled.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self._seen: set[tuple[int, int, str]] = set()
        self._running: Any = None
        self._key: dict[str, Any] = {}

    def attach(self, model: Any, session: Session, wanted: Callable[[], bool]) -> list[Any]:
        """Hooks on a transformers model that profile its forwards.

        Args:
            wanted: whether the forward that begins is one of the recording.

        Returns:
            Handles, each with `remove()`.
        """

        def before(module: Any, args: Any, kwargs: Any) -> None:
            if self.left and wanted():
                session.safely("tactics.kernels", self._begin_of, session, args, kwargs)

        def after(module: Any, args: Any, output: Any) -> None:
            if self._running is not None:
                session.safely("tactics.kernels", self.end, session)

        return [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, always_call=True),
        ]

    def _begin_of(self, session: Session, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows, columns, *_ = (kwargs["inputs_embeds"] if ids is None else ids).shape
        self.begin(session, int(rows), int(columns))

    def begin(self, session: Session, rows: int, columns: int) -> None:
        """Before a forward of `rows` x `columns` tokens; starts a profile if the shape is new.

        Shapes whose sizes round up to the same powers of two count as one.
        """
        import torch

        self.end(session)  # of a forward whose end was not seen
        phase = "decode" if columns == 1 else "prefill"
        shape = (_power_of_two(rows), _power_of_two(columns), phase)
        # a profiler of the job itself is never disturbed
        taken = torch._C._autograd._profiler_enabled()
        if not self.left or shape in self._seen or taken:
            return
        self._seen.add(shape)
        self.left -= 1
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._key = {"rows": rows, "columns": columns, "phase": phase}
        quiet = "KINETO_LOG_LEVEL" not in os.environ
        if quiet:  # or its first start writes two lines into the job's stderr
            os.environ["KINETO_LOG_LEVEL"] = "6"
        try:
            profile.start()
        finally:
            if quiet:
                del os.environ["KINETO_LOG_LEVEL"]
        self._running = profile

    def end(self, session: Session) -> None:
        """After that forward: stop, and hand over the rows."""
        if self._running is None:
            return
        profile, self._running = self._running, None
        profile.stop()
        put(session, list(kernel_rows(profile.events(), self._key))[:MOST_ROWS])


def kernel_rows(events: Any, key: dict[str, Any]) -> Iterator[Tactic]:
    """Rows of a profile, one for each (operator, shapes, kernel), in the order of first use.

    On a device the kernel is what ran there. On the CPU it is the innermost operator that
    computes: the profiler does not see into the libraries behind it.

    Args:
        events: `torch.profiler.profile.events()`.
        key: what they were profiled for; the shapes of the operator's inputs are added.
    """
    times: dict[tuple[str, str, str], list[float]] = {}
    shapes: dict[tuple[str, str, str], Any] = {}
    for op, kernel, sizes, milliseconds in _launches(list(events)):
        at = (op, kernel, str(sizes))
        shapes[at] = sizes
        times.setdefault(at, []).append(milliseconds)
    for at, measured in times.items():
        yield Tactic(
            tuner="torch",
            op=at[0],
            key={**key, "shapes": shapes[at]},
            source="profiled",
            implementation=at[1],
            time_ms=sum(measured) / len(measured),
        )


def _launches(events: list[Any]) -> Iterator[tuple[str, str, Any, float]]:
    """(operator, kernel, shapes of the operator's inputs, ms) of everything that computed."""
    linked = [event for event in events if _on_cpu(event) and event.kernels]
    for event in linked:
        for kernel in event.kernels:
            yield event.name, kernel.name, event.input_shapes, kernel.duration / 1e3
    known = {kernel.name for event in linked for kernel in event.kernels}
    on_device = [event for event in events if not _on_cpu(event)]
    for event in on_device:  # launched by something that is no operator: Triton, an extension
        if event.name not in known:
            yield "(no operator)", event.name, None, event.device_time_total / 1e3
    for event in () if on_device else events:
        if event.cpu_parent is None:
            yield from _innermost(event, event)


def _innermost(event: Any, outer: Any) -> Iterator[tuple[str, str, Any, float]]:
    """What computes in a call tree of the CPU; `outer` is the outermost operator around it."""
    if "::" in event.name and "::" not in outer.name:
        outer = event
    if _computes(event) and not _delegates(event):
        yield outer.name, event.name, outer.input_shapes, event.cpu_time_total / 1e3
    else:
        for child in event.cpu_children:
            yield from _innermost(child, outer)


def _delegates(event: Any) -> bool:
    return any(
        (_computes(child) and child.name not in _HELPERS) or _delegates(child)
        for child in event.cpu_children
    )


def _on_cpu(event: Any) -> bool:
    return str(event.device_type).endswith("CPU")


def _computes(event: Any) -> bool:
    return "::" in event.name and event.name not in _NO_KERNEL


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
