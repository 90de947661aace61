"""The front end of the double: it behaves as SGLang does, without a model behind it.

What it does as the real one, checked against the real source where that is given (see
tests/unit/test_sglang.py): answers come in pieces; only what was asked for is in the caller's
answer, except routes, which are put there whenever the scheduler sends them; of n samples each has
an id of its own and the first thing sent is a request for no token that fills the prefix cache.
"""

from __future__ import annotations

import asyncio
import copy
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    BatchTokenIDOutput,
    GenerateReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass
class ReqState:
    """A request that runs."""

    out_list: list[dict[str, Any]]
    finished: bool
    event: asyncio.Event
    obj: Any
    time_stats: Any = None
    output_ids: list[int] = field(default_factory=list)
    output_token_logprobs_val: list[float] = field(default_factory=list)
    output_token_logprobs_idx: list[int] = field(default_factory=list)


class TokenizerManager:
    """The one door to the scheduler; `_double_scheduler(requests)` stands for that."""

    def __init__(self, server_args: Any, port_args: Any = None) -> None:
        self.server_args = server_args
        self.model_config = server_args._double_model_config
        self.rid_to_state: dict[str, ReqState] = {}
        self.skip_tokenizer_init = False
        self._double_sent: list[Any] = []
        self._double_config: dict[str, Any] = {"weight_version": server_args.weight_version}
        self._double_load: Any = None
        self._double_scheduler: Any = None

    def config_value(self, name: str) -> Any:
        """A setting in force."""
        return self._double_config[name]

    def resolved_config_dict(self, base: dict[str, Any]) -> dict[str, Any]:
        """The server's arguments as resolved."""
        return {**base, **self._double_config}

    # -- requests -------------------------------------------------------------------------

    async def generate_request(self, obj: GenerateReqInput, request: Any = None) -> Any:
        """Yields the answer, a list for n > 1."""
        params = dict(obj.sampling_params or {})
        n = params.pop("n", 1)
        obj._double_n = obj.parallel_sample_num = n
        if n == 1:
            tokenized = self._double_tokenize(obj, params)
            self._double_register(obj)
            await self._send_one_request(tokenized)
            async for out in self._double_wait(obj):
                yield out
            return
        tokenized = self._double_tokenize(obj, params)
        warm = copy.copy(obj)
        first = copy.copy(tokenized)
        first.rid = warm.regenerate_rid()
        first.sampling_params = copy.copy(first.sampling_params)
        first.sampling_params.max_new_tokens = 0
        self._double_register(warm)
        await self._send_one_request(first)
        async for _ in self._double_wait(warm):
            pass
        samples = []
        for _ in range(n):
            one, sent = copy.copy(obj), copy.copy(tokenized)
            sent.rid = one.regenerate_rid()
            self._double_register(one)
            await self._send_one_request(sent)
            samples.append(one)
        outs = []
        for one in samples:
            async for out in self._double_wait(one):
                outs.append(out)
        yield outs

    def _double_tokenize(self, obj: Any, params: dict[str, Any]) -> TokenizedGenerateReqInput:
        return TokenizedGenerateReqInput(
            rid=obj.rid,
            input_ids=array("q", obj.input_ids),
            sampling_params=SamplingParams(**params),
            return_logprob=bool(obj.return_logprob),
            logprob_start_len=-1,
            top_logprobs_num=0,
            stream=obj.stream,
            return_sampling_mask=bool(obj.return_sampling_mask),
            return_routed_experts=obj.return_routed_experts,
            routed_experts_start_len=obj.routed_experts_start_len,
        )

    def _double_register(self, obj: Any) -> None:
        if obj.rid in self.rid_to_state:
            raise ValueError(f"Duplicate request ID detected: {obj.rid}")
        self.rid_to_state[obj.rid] = ReqState([], False, asyncio.Event(), obj)

    async def _double_wait(self, obj: Any) -> AsyncIterator[dict[str, Any]]:
        state = self.rid_to_state[obj.rid]
        if self._double_scheduler is not None:
            await self._double_scheduler(self, obj.rid)
        while True:
            await state.event.wait()
            state.event.clear()
            out, state.out_list = state.out_list[-1], []
            yield out
            if state.finished:
                return

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        self._double_sent.append(tokenized_obj)

    async def _send_batch_request(self, tokenized_objs: list[Any]) -> None:
        self._double_sent.extend(tokenized_objs)

    # -- answers --------------------------------------------------------------------------

    async def _handle_batch_output(self, recv_obj: BatchStrOutput | BatchTokenIDOutput) -> None:
        for i, rid in enumerate(recv_obj.rids):
            state = self.rid_to_state.get(rid)
            if state is None:
                continue
            meta = {
                "id": rid,
                "finish_reason": recv_obj.finished_reasons[i],
                "prompt_tokens": recv_obj.prompt_tokens[i],
                "weight_version": self.config_value("weight_version"),
                "num_retractions": recv_obj.retraction_counts[i],
                "completion_tokens": recv_obj.completion_tokens[i],
                "cached_tokens": recv_obj.cached_tokens[i],
            }
            state.output_ids.extend(recv_obj.output_ids[i])
            if state.obj.return_logprob:
                state.output_token_logprobs_val.extend(recv_obj.output_token_logprobs_val[i])
                state.output_token_logprobs_idx.extend(recv_obj.output_token_logprobs_idx[i])
                meta["output_token_logprobs"] = [
                    (value, token, None)
                    for value, token in zip(
                        state.output_token_logprobs_val,
                        state.output_token_logprobs_idx,
                        strict=True,
                    )
                ]
            if recv_obj.weight_versions is not None and recv_obj.weight_versions[i] is not None:
                meta["weight_versions"] = [vars(s) for s in recv_obj.weight_versions[i]]
            # whoever asked for it
            if recv_obj.routed_experts and recv_obj.routed_experts[i] is not None:
                meta["routed_experts"] = recv_obj.routed_experts[i]
            state.finished = recv_obj.finished_reasons[i] is not None
            if state.finished:
                del self.rid_to_state[rid]
            if state.finished or state.obj.stream:
                state.out_list.append({"output_ids": list(state.output_ids), "meta_info": meta})
                state.event.set()

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        state = self.rid_to_state.pop(recv_obj.rid, None)
        if state is None:
            return
        state.finished = True
        reason = recv_obj.finished_reason or {"type": "abort", "message": "Abort in waiting queue"}
        meta = {"id": recv_obj.rid, "finish_reason": reason}
        state.out_list.append({"output_ids": state.output_ids, "meta_info": meta})
        state.event.set()

    # -- weights --------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, obj: UpdateWeightFromDiskReqInput, request: Any = None
    ) -> tuple[bool, str, int]:
        """Answers whether it went through."""
        success = self._double_load is None or await self._double_load(obj)
        if success and obj.weight_version is not None:
            self._double_config["weight_version"] = obj.weight_version
        return success, "" if success else "no such folder", 0

    async def update_weight_version(self, obj: UpdateWeightVersionReqInput) -> None:
        """Only the name changes."""
        self._double_config["weight_version"] = obj.new_version
