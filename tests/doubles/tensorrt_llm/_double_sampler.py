"""Draws tokens from logits and applies them to requests, one iteration later if overlapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensorrt_llm._double_bindings import FinishReason
from tensorrt_llm._double_truth import TRUTH, Draw
from tensorrt_llm.executor.params.sampling import LogprobMode, SamplingParams
from tensorrt_llm.executor.result import Logprob


@dataclass
class SampleStateTensors:
    """Tokens [slots] on the device; of these requests no one has applied them yet."""

    new_tokens: torch.Tensor
    _double_requests: frozenset[int] = frozenset()


@dataclass
class SampleState:
    """`drawn`: request, its slot, entry, draw and logits; the token itself is read from `host`."""

    scheduled_requests: Any
    device: SampleStateTensors
    host: SampleStateTensors
    drawn: list[tuple[Any, int, list[Any] | None, Draw, torch.Tensor]]


class TorchSampler:
    def __init__(self, slots: int, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.new_tokens = torch.zeros(slots, dtype=torch.int64)
        self._random: dict[int, torch.Generator] = {}

    def sample_async(self, scheduled_batch: Any, logits: torch.Tensor, gathered: bool) -> Any:
        """Draw for every request whose prompt is done.

        Args:
            scheduled_batch: without padding.
            logits: a row a request, or with `gathered` a row a context token.
            gathered: whether some request wants the logits of its prompt.
        """
        step, drawn, at = TRUTH.steps[-1], [], 0
        context = scheduled_batch.context_requests
        for index, request in enumerate(scheduled_batch.all_requests()):
            n = step.rows[index].n if gathered else 1
            rows, at = logits[at : at + n], at + n
            if index < len(context):
                if request.py_return_context_logits:
                    request.py_result.append_context_logits(rows)
                if not request.is_last_context_chunk:
                    continue
            if not request.is_dummy:
                row = step.rows[index]
                drawn.append(self._draw(request, rows[-1], row.start + row.n, step))
        names = frozenset(request.py_request_id for request, *_ in drawn)
        host = SampleStateTensors(self.new_tokens.clone())
        return SampleState(scheduled_batch, SampleStateTensors(self.new_tokens, names), host, drawn)

    def _draw(self, request: Any, logits: torch.Tensor, position: int, step: Any) -> Any:
        logits = logits.clone()
        least = request.sampling_config.min_length
        generated = position - request.py_orig_prompt_len
        if least and generated < least[0] and request.py_end_id is not None:
            logits[request.py_end_id] = float("-inf")
        processed = process(logits, request.sampling_config)
        if torch.isinf(processed).sum() == len(processed) - 1:
            token = int(processed.argmax())
        else:
            probabilities = processed.exp()
            token = int(torch.multinomial(probabilities, 1, generator=self._generator(request)))
        raw = logits.log_softmax(-1)
        self.new_tokens[request.py_seq_slot] = token
        draw = Draw(
            request=request.py_request_id,
            client=request.py_client_id,
            sample=request.sequence_index,
            position=position,
            token=token,
            raw=float(raw[token]),
            processed=float(processed[token]),
            kept=tuple(torch.isfinite(processed).nonzero()[:, 0].tolist()),
            step=step.number,
            weights=step.weights,
        )
        TRUTH.draws.append(draw)
        shown = processed if request.py_logprobs_mode == LogprobMode.PROCESSED else raw
        return request, request.py_seq_slot, self._logprobs(request, shown, token), draw, logits

    def _generator(self, request: Any) -> torch.Generator:
        name = request.py_request_id
        if name not in self._random:
            seed = (request.sampling_config.random_seed or [name])[0]
            self._random[name] = torch.Generator().manual_seed(seed)
        return self._random[name]

    def _logprobs(self, request: Any, values: torch.Tensor, token: int) -> list[Any] | None:
        """One entry: the drawn token first, then the most probable ones."""
        if not request.py_return_log_probs:
            return None
        if request.py_logprobs_simple_format:
            return [float(values[token])]
        top = values.topk(request.py_num_logprobs or 0)
        rank = int((values > values[token]).sum()) + 1
        entry = {token: Logprob(logprob=float(values[token]), rank=rank)}
        for place, index in enumerate(top.indices.tolist()):
            entry.setdefault(index, Logprob(logprob=float(values[index]), rank=place + 1))
        return [entry]

    def update_requests(self, state: SampleState) -> None:
        """Apply what was drawn; requests that are over by now take nothing."""
        for request, slot, entry, draw, logits in state.drawn:
            if request.is_finished:
                continue
            token = int(state.host.new_tokens[slot])
            request.add_new_token(token, 0)
            draw.applied = True
            request.py_decoding_iter += 1
            if entry is not None:
                request.py_result.append_log_probs([entry])
            for name in request.py_additional_outputs or ():
                # of the outputs that a model may have, this one has its logits
                request.py_result.append_additional_generation_outputs(name, logits[None])
            reason = self._reason(request, token)
            if reason is not None:
                request.finish_by_reason(reason)
                self._random.pop(request.py_request_id, None)

    def _reason(self, request: Any, token: int) -> FinishReason | None:
        if token == request.py_end_id:
            return FinishReason.END_ID
        if request.generated >= request.limit or request.max_beam_num_tokens >= self.max_seq_len:
            return FinishReason.LENGTH
        tokens = request.get_tokens(0)[request.py_orig_prompt_len :]
        for word in request.py_stop_words_list or ():
            if tokens[-len(word) :] == word:
                return FinishReason.STOP_WORDS
        return None


def process(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Log-probabilities over the kept set, -inf elsewhere, as the resolved parameters say."""
    values = {name: _first(getattr(config, name)) for name in ("temperature", "top_k", "top_p")}
    min_p = _first(config.min_p)
    if SamplingParams.params_imply_greedy_decoding(**values, min_p=min_p, use_beam_search=False):
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept[logits.argmax()] = True
    else:
        temperature = values["temperature"]
        logits = logits if temperature is None else logits / temperature
        kept = torch.ones_like(logits, dtype=torch.bool)
        if values["top_k"]:
            kept &= logits >= logits.topk(min(values["top_k"], len(logits))).values[-1]
        if values["top_p"] is not None and values["top_p"] < 1:
            order = logits.masked_fill(~kept, float("-inf")).softmax(-1).sort(descending=True)
            before = order.values.cumsum(-1) - order.values
            kept[order.indices[before >= values["top_p"]]] = False
        if min_p:
            probabilities = logits.softmax(-1)
            kept &= probabilities >= min_p * probabilities.max()
    return logits.masked_fill(~kept, float("-inf")).log_softmax(-1)


def _first(value: Any) -> Any:
    return value[0] if value else None
