"""Sampling parameters. With temperature, top_p and top_k unset decoding is greedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from tensorrt_llm._double_bindings import SamplingConfig

MAX_TOP_LOGPROBS = 100

_double_defaults = frozenset(
    [
        "early_stopping",
        "length_penalty",
        "min_p",
        "no_repeat_ngram_size",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    ]
)


class LogprobMode(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Those that the double does not heed are refused by `_get_sampling_config`."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    embedding_bias: torch.Tensor | None = None
    logits_processor: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    logprobs_mode: LogprobMode = LogprobMode.RAW
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    additional_model_outputs: list[str] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    #: read by the worker of the engine; no copy of the class that declares it was found
    return_routed_experts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        self._validate()

    def _validate(self) -> None:
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"require 0 <= {name} <= 1, got {name}={value}")
        for name in ("top_k", "temperature"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"require {name} >= 0, got {name}={value}")
        if self.best_of > 1 and self._greedy_decoding:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns.")
        self.logprobs_mode = LogprobMode(self.logprobs_mode)
        if self.logprobs is False:
            self.logprobs = None
        if self.logprobs is True:
            self.logprobs = 0
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
                raise ValueError(f"{name} must be in [0, {MAX_TOP_LOGPROBS}]")
            if getattr(self, f"{name}_simple_format") and value != 0:
                raise ValueError(f"{name}_simple_format=True requires {name} == 0, got {value}")

    def _apply_generation_config_defaults(self, generation_config: Mapping[str, Any]) -> None:
        for name in _double_defaults & set(generation_config):
            value = generation_config[name]
            if hasattr(self, name) and getattr(self, name) is None and value is not None:
                setattr(self, name, value)
        self._validate()

    @staticmethod
    def params_imply_top_p_decay_active(top_p_decay: float | None) -> bool:
        return top_p_decay is not None and top_p_decay < 1.0

    @staticmethod
    def params_imply_explicit_greedy(
        *,
        temperature: float | None,
        top_p: float | None,
        top_k: int | None,
        min_p: float | None,
    ) -> bool:
        return top_k == 1 or top_p == 0.0 or min_p == 1.0 or temperature == 0

    @staticmethod
    def params_imply_greedy_decoding(
        *,
        temperature: float | None,
        top_p: float | None,
        top_k: int | None,
        use_beam_search: bool | None,
        min_p: float | None = None,
        top_p_decay: float | None = None,
    ) -> bool:
        if use_beam_search:
            return False
        if SamplingParams.params_imply_explicit_greedy(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
        ):
            return True
        unset = temperature is None and top_p is None and top_k is None
        active = (min_p or 0) > 0 or SamplingParams.params_imply_top_p_decay_active(top_p_decay)
        return unset and not active

    @property
    def _greedy_decoding(self) -> bool:
        return self.params_imply_greedy_decoding(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            use_beam_search=self.use_beam_search,
            min_p=self.min_p,
            top_p_decay=self.top_p_decay,
        )

    def _setup(self, tokenizer: Any, hf_model_config: Any, generation_config: Any) -> Any:
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
            self.pad_id = self.end_id
        if self.stop is not None:
            words = [self.stop] if isinstance(self.stop, str) else self.stop
            self._stop_word_ids = [tokenizer.encode(word) for word in words]
        return self

    def _get_stop_words(self) -> list[list[int]]:
        words = [[i] for i in self.stop_token_ids or ()]
        if self.stop is None:
            return words
        if self._stop_word_ids is None:
            raise RuntimeError(f"stop ({self.stop}) is not processed by tokenizer")
        return words + self._stop_word_ids

    def _get_stop_reasons_and_words(self) -> list[tuple[str | int, list[int]]]:
        reasons: list[str | int] = list(self.stop_token_ids or ())
        if self.stop is not None:
            reasons += [self.stop] if isinstance(self.stop, str) else self.stop
        return list(zip(reasons, self._get_stop_words(), strict=True))

    def _get_sampling_config(self) -> SamplingConfig:
        refused = [
            "embedding_bias",
            "top_p_min",
            "top_p_decay",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "no_repeat_ngram_size",
        ]
        named = [name for name in refused if getattr(self, name) is not None]
        if named or self.use_beam_search or self.return_generation_logits:
            raise NotImplementedError(f"the double does not do this: {named or 'beams, logits'}")

        def listed(value: Any) -> Any:
            return None if value is None else [value]

        return SamplingConfig(
            num_return_sequences=self.best_of,
            temperature=listed(self.temperature),
            top_k=listed(self.top_k),
            top_p=listed(self.top_p),
            min_p=listed(self.min_p),
            random_seed=listed(self.seed),
            min_length=listed(self.min_tokens),
        )
