"""Runs the model on a batch: inputs, padding, graph or eager, logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensorrt_llm._double_model import AttentionMetadata
from tensorrt_llm._double_truth import TRUTH, Row, Step
from tensorrt_llm._torch.autotuner import autotune
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
from tensorrt_llm._torch.pyexecutor.scheduler.scheduler import ScheduledRequests
from tensorrt_llm._torch.route_capture import RouteCapture


class PyTorchModelEngine:
    """`pytorch_backend_config` holds the arguments of the `LLM`; later versions name it llm_args.

    `_double_fault` is raised once in the middle of the next forward, if it is set.
    """

    def __init__(
        self,
        *,
        model_path: str,
        pytorch_backend_config: Any,
        checkpoint_loader: Any,
        batch_size: int = 8,
        max_beam_width: int = 1,
        max_num_tokens: int = 8192,
        max_seq_len: int | None = None,
        mapping: Any = None,
        dist: Any = None,
        model: Any = None,
    ) -> None:
        self.llm_args = self.pytorch_backend_config = args = pytorch_backend_config
        self.batch_size, self.max_beam_width = batch_size, max_beam_width
        self.max_num_tokens, self.max_seq_len = max_num_tokens, max_seq_len
        self.mapping, self.dist = mapping, dist
        self.model_loader = ModelLoader(args, mapping, None, None, max_num_tokens, max_seq_len)
        self.model, _ = self.model_loader.load(
            checkpoint_dir=model_path, checkpoint_loader=checkpoint_loader
        )
        if max_seq_len is not None:  # the cache reads up to two positions more
            longest = self.model.config.max_position_embeddings - 2
            self.max_seq_len = min(max_seq_len, longest)
        self.enable_attention_dp = mapping.enable_attention_dp
        self.attn_backend = type(args.attn_backend, (), {})
        self.is_warmup = False
        self.iter_states: dict[str, int] = {}
        self.iter_counter = 0
        self.kv_cache_manager_key = "kv_cache_manager"
        config = args.cuda_graph_config
        sizes = (config.batch_sizes or [1, 2, 4, 8]) if config else []
        self._cuda_graph_batch_sizes = sorted(s for s in sizes if s <= batch_size)
        self.cuda_graph_runner = CUDAGraphRunner(self)
        self._double_cache: Any = None
        self._double_fault: Exception | None = None

    @property
    def is_warmup(self) -> bool:
        return getattr(self, "_is_warmup", False)

    @is_warmup.setter
    def is_warmup(self, value: bool) -> None:
        self._is_warmup = value

    @contextlib.contextmanager
    def set_warmup_flag(self) -> Iterator[None]:
        before, self.is_warmup = self.is_warmup, True
        try:
            yield
        finally:
            self.is_warmup = before

    @contextlib.contextmanager
    def no_cuda_graph(self) -> Iterator[None]:
        runner = self.cuda_graph_runner
        before, runner.enabled = runner.enabled, False
        try:
            yield
        finally:
            runner.enabled = before

    def warmup(self, resource_manager: Any) -> None:
        """Tunes with graphs off, then captures a graph for each size, the largest first."""
        manager = resource_manager.get_resource_manager(self.kv_cache_manager_key)
        with self.set_warmup_flag():
            self.cuda_graph_runner.padding_dummy_request = None
            if self.llm_args.enable_autotuner:
                with self.no_cuda_graph(), autotune():
                    room = manager.get_num_free_blocks() * manager.tokens_per_block - 1
                    tokens = min(self.max_num_tokens, self.max_seq_len, room)
                    self._double_dry_run(resource_manager, manager, [tokens], is_gen=False)
            for size in reversed(self._cuda_graph_batch_sizes):
                if size > manager.get_num_free_blocks():
                    continue  # captured when it is first needed
                self._double_dry_run(resource_manager, manager, [1] * size, is_gen=True)

    def _double_dry_run(
        self, resource_manager: Any, manager: Any, token_nums: list[int], is_gen: bool
    ) -> None:
        names = list(range(len(token_nums)))
        dummies = manager.add_dummy_requests(names, token_nums, is_gen)
        batch = ScheduledRequests()
        if is_gen:
            batch.generation_requests = dummies
        else:
            batch.reset_context_requests(dummies)
        self.forward(batch, resource_manager)
        for dummy in dummies:
            manager.free_resources(dummy)

    @torch.inference_mode()
    def forward(
        self,
        scheduled_requests: Any,
        resource_manager: Any,
        new_tensors_device: Any = None,
        gather_context_logits: bool = False,
        cache_indirection_buffer: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Logits [requests or, with context logits, tokens; vocabulary] of a batch."""
        manager = resource_manager.get_resource_manager(self.kv_cache_manager_key)
        self._double_cache = manager
        runner = self.cuda_graph_runner
        with runner.pad_batch(scheduled_requests, resource_manager) as padded:
            graph, static, _, key = runner.maybe_get_cuda_graph(padded)
            rows, inputs = self._double_inputs(padded, manager, new_tensors_device)
            if graph:
                static.fill(inputs["attn_metadata"])
                inputs["attn_metadata"] = static
            self.iter_counter += 1
            if not graph:
                outputs = self._forward_step(inputs, None, gather_context_logits)
                used = list(self.model.used)
            else:
                if runner.needs_capture(key):
                    runner.capture(key, lambda i: self._forward_step(i, None), inputs)
                outputs = runner.replay(key, inputs)
                used = runner._double_used[key]
            self._double_note(rows, used, key if graph else None)
            outputs = {"logits": outputs["logits"].clone()}
            self._execute_logit_post_processors(scheduled_requests, outputs)
            return outputs

    def model_forward(self, **kwargs: Any) -> torch.Tensor:
        return self.model.forward(**kwargs)

    def _forward_step(
        self, inputs: dict[str, Any], gather_ids: Any, gather_context_logits: bool = False
    ) -> dict[str, Any]:
        fault, self._double_fault = self._double_fault, None
        if fault is not None:
            raise fault
        capture = RouteCapture.get()
        if capture is not None:
            capture._double_begin()
        logits = self.model_forward(**inputs, return_context_logits=gather_context_logits)
        return {"logits": logits}

    def _execute_logit_post_processors(
        self, scheduled_requests: Any, outputs: dict[str, torch.Tensor]
    ) -> None:
        logits = outputs["logits"]
        for index, request in enumerate(scheduled_requests.all_requests()):
            for processor in request.py_logits_post_processors or ():
                row = logits[index].view(1, 1, -1)
                processor(request.py_request_id, row, [request.get_tokens(0)], None, None)
                logits[index] = row.view(-1)

    def _double_inputs(
        self, batch: Any, manager: Any, previous: Any
    ) -> tuple[list[Row], dict[str, Any]]:
        """Rows and tensors of a batch.

        A decode row whose last token is still on the device (its request was in the batch before,
        which no one has looked at yet) takes it from there and stands one position further.
        """
        rows, ids, positions, keys, last = [], [], [], [], []
        span = self.max_seq_len + 2
        context_tokens = 0
        for request in batch.context_requests:
            start, n = request.context_current_position, request.context_chunk_size
            rows.append(_double_row(request, start, n))
            ids += [torch.tensor(request.get_tokens(0)[start : start + n])]
            context_tokens += n
        for request in batch.generation_requests:
            start = request.max_beam_num_tokens - 1
            token = torch.tensor([request.get_last_tokens(0)])
            if previous is not None and request.py_request_id in previous._double_requests:
                start, token = start + 1, previous.new_tokens[request.py_batch_idx].view(1)
            rows.append(_double_row(request, start, 1))
            ids.append(token)
            request.py_batch_idx = request.py_seq_slot
        for request in batch.context_requests:
            request.py_batch_idx = request.py_seq_slot
        at = 0
        for request, row in zip(batch.all_requests(), rows, strict=True):
            positions.append(torch.arange(row.start, row.start + row.n))
            keys.append(manager.rows(request, span).expand(row.n, span))
            at += row.n
            last.append(at - 1)
        where, table = torch.cat(positions), torch.cat(keys)
        metadata = AttentionMetadata(
            slots=table.gather(1, where[:, None])[:, 0],
            keys=table,
            positions=where,
            last=torch.tensor(last),
            cache=manager.cache,
        )
        self.iter_states = {
            "num_ctx_requests": batch.num_context_requests,
            "num_ctx_tokens": context_tokens,
            "num_generation_tokens": len(batch.generation_requests),
        }
        return rows, {
            "attn_metadata": metadata,
            "input_ids": torch.cat(ids),
            "position_ids": where,
        }

    def _double_static_metadata(self, size: int) -> AttentionMetadata:
        span = self.max_seq_len + 2
        with torch.inference_mode(False):
            return AttentionMetadata(
                slots=torch.zeros(size, dtype=torch.int64),
                keys=torch.zeros(size, span, dtype=torch.int64),
                positions=torch.zeros(size, dtype=torch.int64),
                last=torch.zeros(size, dtype=torch.int64),
                cache=self._double_cache.cache,
                is_cuda_graph=True,
            )

    def _double_note(self, rows: list[Row], used: list[Any], graph: Any) -> None:
        layers = []
        for layer in self.model.moe_layers:
            layers.append(torch.cat([ids for number, ids in used if number == layer]))
        step = Step(
            number=len(TRUTH.steps),
            rows=tuple(rows),
            routes=torch.stack(layers, 1).long(),
            graph=graph,
            weights=TRUTH.generation(self.model),
            warmup=self.is_warmup,
        )
        TRUTH.steps.append(step)


def _double_row(request: Any, start: int, n: int) -> Row:
    return Row(
        request=request.py_request_id,
        client=request.py_client_id,
        sample=request.sequence_index,
        start=start,
        n=n,
        dummy=request.is_dummy,
    )
