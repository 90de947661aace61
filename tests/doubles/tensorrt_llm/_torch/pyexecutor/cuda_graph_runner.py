"""Pads decode batches to captured sizes, captures graphs and runs them again."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensorrt_llm._double_graph import CapturedGraph

CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1


class CUDAGraphRunner:
    WARMUP_STEPS = 2

    def __init__(self, engine: Any) -> None:
        self.engine_ref = weakref.ref(engine)
        config = engine.llm_args.cuda_graph_config
        self.enabled = config is not None
        self.padding_enabled = config is not None and config.enable_padding
        self.supported_batch_sizes = engine._cuda_graph_batch_sizes
        self.max_supported_batch_size = max(self.supported_batch_sizes, default=0)
        self.max_beam_width = 1
        self.graphs: dict[tuple[int, int, bool], CapturedGraph] = {}
        self.graph_outputs: dict[tuple[int, int, bool], Any] = {}
        self.graph_metadata: dict[tuple[int, int, bool], dict[str, Any]] = {}
        self.padding_dummy_request: Any = None
        size = self.max_supported_batch_size
        with torch.inference_mode(False):
            self.shared_static_tensors = {
                "input_ids": torch.ones(size, dtype=torch.int64),
                "position_ids": torch.zeros(size, dtype=torch.int64),
            }
        #: key -> ids that the experts run with, at their fixed addresses
        self._double_used: dict[Any, list[Any]] = {}

    def get_graph_key(self, batch_size: int, spec_resource_manager: Any = None) -> Any:
        return (batch_size, 0, False)

    def _get_engine(self) -> Any:
        return self.engine_ref()

    def maybe_get_cuda_graph(self, batch: Any, spec_resource_manager: Any = None) -> Any:
        """(whether a graph runs, its attention metadata, None, its key)."""
        engine = self._get_engine()
        none = (False, None, None, None)
        if not self.enabled or not batch.can_run_cuda_graph:
            return none
        if engine.enable_attention_dp:
            sizes = engine.dist.tp_allgather(batch.batch_size)
            if any(size != sizes[0] for size in sizes):
                return none
        key = self.get_graph_key(batch.batch_size, spec_resource_manager)
        if key in self.graphs:
            return True, self.graph_metadata[key]["attn_metadata"], None, key
        if batch.batch_size not in self.supported_batch_sizes:
            return none
        return True, engine._double_static_metadata(batch.batch_size), None, key

    def needs_capture(self, key: Any) -> bool:
        return key not in self.graph_outputs

    def capture(
        self,
        key: Any,
        forward_fn: Callable[[dict[str, Any]], Any],
        initial_inputs: dict[str, Any],
        postprocess_fn: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        static = {name: t[: key[0]] for name, t in self.shared_static_tensors.items()}
        inputs = {**initial_inputs, **static}
        self.graph_metadata[key] = {"attn_metadata": initial_inputs["attn_metadata"]}
        for _ in range(self.WARMUP_STEPS):
            forward_fn(inputs)
        graph = CapturedGraph()
        with graph:
            output = forward_fn(inputs)
        self.graphs[key], self.graph_outputs[key] = graph, output
        self._double_used[key] = list(self._get_engine().model.used)

    def replay(self, key: Any, current_inputs: dict[str, Any]) -> Any:
        assert current_inputs["attn_metadata"] is self.graph_metadata[key]["attn_metadata"]
        for name, static in self.shared_static_tensors.items():
            static[: key[0]].copy_(current_inputs[name])
        self.graphs[key].replay()
        return self.graph_outputs[key]

    def _get_padded_batch(self, batch: Any, resource_manager: Any) -> int:
        """Appends padding; how many rows."""
        engine = self._get_engine()
        size = batch.batch_size
        if engine.enable_attention_dp:
            size = max(engine.dist.tp_allgather(size))
        fits = batch.can_run_cuda_graph and 0 < size <= self.max_supported_batch_size
        if not (self.enabled and self.padding_enabled and fits):
            return 0
        missing = self._round_up_batch_size(size) - batch.batch_size
        if missing <= 0 or missing + batch.batch_size > engine.batch_size:
            return 0
        if self.padding_dummy_request is None:
            manager = resource_manager.get_resource_manager(engine.kv_cache_manager_key)
            if manager.get_num_free_blocks() < 1:
                return 0
            dummies = manager.add_dummy_requests([CUDA_GRAPH_DUMMY_REQUEST_ID], is_gen=True)
            self.padding_dummy_request = dummies[0]
            self.padding_dummy_request.is_cuda_graph_dummy = True
        batch.generation_requests.extend([self.padding_dummy_request] * missing)
        return missing

    def _round_up_batch_size(self, batch_size: int) -> int:
        at = bisect.bisect_left(self.supported_batch_sizes, batch_size)
        return self.supported_batch_sizes[at] if at < len(self.supported_batch_sizes) else 0

    @contextlib.contextmanager
    def pad_batch(self, scheduled_requests: Any, resource_manager: Any) -> Iterator[Any]:
        padding = self._get_padded_batch(scheduled_requests, resource_manager)
        try:
            yield scheduled_requests
        finally:
            if padding:
                del scheduled_requests.generation_requests[-padding:]

    def clear(self) -> None:
        for kept in (self.graphs, self.graph_outputs, self.graph_metadata, self._double_used):
            kept.clear()
        self.padding_dummy_request = None
