"""A stand-in for a CUDA graph on the CPU.

While it captures, the operators that reach the dispatcher are written down with the very tensors
they took and gave. A replay runs them again on the same tensors and puts what they give into the
same places: no Python of the model runs, neither its hooks nor its tuner, but everything that was
written inside, a third party's copy into its buffer included, happens again. As with the real
thing, host values that Python read are built in, addresses stay, and what would have to wait for
the device while capturing is refused. While it captures, torch says that a stream of a device does.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")


class CapturedGraph(TorchDispatchMode):
    """Captures what runs inside of `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __enter__(self) -> Any:
        device = SimpleNamespace(name="double", major=0, minor=0)
        self._double_says = contextlib.ExitStack()
        for name, value in (
            ("is_initialized", True),
            ("is_current_stream_capturing", True),
            ("current_device", 0),
            ("get_device_properties", device),
        ):
            says = mock.patch.object(torch.cuda, name, mock.Mock(return_value=value))
            self._double_says.enter_context(says)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._double_says.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.__name__ for name in _WAITS):
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if func._schema.is_mutable:
            self.operators.append((func, args, kwargs, []))
        else:
            taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            places = {t.untyped_storage().data_ptr() for t in taken}
            if not all(t.untyped_storage().data_ptr() in places for t in results):
                self.operators.append((func, args, kwargs, results))
        return out

    def replay(self) -> None:
        """Run all of it again."""
        with torch.inference_mode():
            for func, args, kwargs, places in self.operators:
                out = func(*args, **kwargs)
                fresh = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
                for place, tensor in zip(places, fresh, strict=False):
                    place.copy_(tensor)
