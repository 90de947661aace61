"""The engine's own capture of routes, on when `enable_return_routed_experts` is set.

One buffer at a fixed address takes the ids that the router chose, also inside of a graph; after
each forward they are put down by request and position. Positions of decode rows come from a
counter of its own. A prefix that was not run takes the routes of whoever ran it, which are kept by
the token ids up to there. Rows of a layer that runs in chunks follow each other.
"""

from __future__ import annotations

from typing import Any

import torch

_double_one: RouteCapture | None = None


class RouteCapture:
    @staticmethod
    def get() -> RouteCapture | None:
        return _double_one

    @staticmethod
    def create(*, rank: int, model_engine: Any = None, enabled: bool | None = None) -> None:
        global _double_one
        _double_one = RouteCapture(rank=rank, model_engine=model_engine) if enabled else None

    @staticmethod
    def set_iter(iter_id: int) -> None:
        """Nothing is written outside of tests of the real one."""

    @staticmethod
    def capture(layer_id: int, token_selected_experts: torch.Tensor) -> None:
        one = _double_one
        if one is not None:
            index = one.layers.index(layer_id)
            at, one.at[index] = one.at[index], one.at[index] + len(token_selected_experts)
            one.buffer[at : one.at[index], index].copy_(token_selected_experts)

    @staticmethod
    def _double_rewind() -> None:
        """A forward begins."""
        if _double_one is not None:
            _double_one.at = [0] * len(_double_one.layers)

    @staticmethod
    def prepare(scheduled_batch: Any, tokens_per_block: int = 0) -> None:
        one = _double_one
        if one is None:
            return
        one.layout = []
        for request in scheduled_batch.context_requests:
            start = request.context_current_position
            one._double_fill(request)
            one.next[request.py_request_id] = start + request.context_chunk_size
            one.layout.append((request, start, request.context_chunk_size))
        for request in scheduled_batch.generation_requests:
            start = one.next.get(request.py_request_id, 0)
            one.next[request.py_request_id] = start + 1
            one.layout.append((request, start, 1))

    @staticmethod
    def clear_shared() -> None:
        if _double_one is not None:
            _double_one.shared.clear()

    def _double_begin(self) -> None:
        """The model runs: layers that run in chunks begin at the first row again."""
        self.at = [0] * len(self.layers)

    @staticmethod
    def finish_forward() -> None:
        one = _double_one
        if one is None:
            return
        taken, at = one.buffer.to(torch.int16), 0
        for request, start, n in one.layout:
            store = one.store.setdefault(request.py_request_id, {})
            for i in range(n):
                if not request.is_dummy and start + i not in store:
                    store[start + i] = taken[at + i].clone()
                    one._double_share(request, start + i)
            at += n

    @staticmethod
    def attach_routes(request: Any) -> None:
        one = _double_one
        store = None if one is None else one.store.pop(request.py_request_id, None)
        if store is None or not request.py_return_routed_experts:
            return
        missing = [p for p in range(max(store) + 1) if p not in store]
        if missing:
            raise RuntimeError(f"no route of position {missing[0]}")
        rows = torch.stack([store[p] for p in range(max(store) + 1)])
        result = request.py_result
        if result._additional_generation_outputs is None:
            result._additional_generation_outputs = {}
        result._additional_generation_outputs.setdefault("routed_experts", []).append(rows)

    def __init__(self, *, rank: int, model_engine: Any = None) -> None:
        model = model_engine.model
        k = model.config.num_experts_per_tok
        self.layers = model.moe_layers
        with torch.inference_mode(False):
            shape = (model_engine.max_num_tokens, len(self.layers), k)
            self.buffer = torch.zeros(shape, dtype=torch.int32)
        self.at = [0] * len(self.layers)
        self.layout: list[tuple[Any, int, int]] = []
        self.next: dict[int, int] = {}
        self.store: dict[int, dict[int, torch.Tensor]] = {}
        self.shared: dict[tuple[int, ...], torch.Tensor] = {}

    def _double_share(self, request: Any, position: int) -> None:
        if position < request.py_orig_prompt_len:
            key = tuple(request.get_tokens(0)[: position + 1])
            self.shared[key] = self.store[request.py_request_id][position]

    def _double_fill(self, request: Any) -> None:
        tokens = request.get_tokens(0)
        store = self.store.setdefault(request.py_request_id, {})
        for position in range(request.prepopulated_prompt_len):
            row = self.shared.get(tuple(tokens[: position + 1]))
            if row is not None and position not in store:
                store[position] = row
