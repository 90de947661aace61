"""The API of users."""

from __future__ import annotations

import copy
from typing import Any

from tensorrt_llm._double_args import TorchLlmArgs
from tensorrt_llm._double_model import read_config, read_generation_config
from tensorrt_llm._double_tokenizer import DoubleTokenizer
from tensorrt_llm.executor.executor import GenerationExecutor
from tensorrt_llm.executor.params.sampling import SamplingParams
from tensorrt_llm.executor.result import DetokenizedGenerationResultBase, GenerationResult


class RequestOutput(DetokenizedGenerationResultBase, GenerationResult):
    """Shares its state with the `GenerationResult` that it was made from."""

    @classmethod
    def _from_generation_result(
        cls, generation_result: GenerationResult, prompt: str | None = None, tokenizer: Any = None
    ) -> RequestOutput:
        output = cls.__new__(cls)
        output.__dict__.update(generation_result.__dict__)
        output.tokenizer = tokenizer
        output._prompt = prompt
        return output

    @property
    def prompt(self) -> str | None:
        return self._prompt


class LLM:
    """`kwargs` are the fields of `TorchLlmArgs`."""

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._executor: Any = None
        self.args = TorchLlmArgs(
            model=str(model), skip_tokenizer_init=skip_tokenizer_init, dtype=dtype, **kwargs
        )
        config = read_config(self.args.model)
        made = None if skip_tokenizer_init else DoubleTokenizer(config)
        self.tokenizer = tokenizer or made
        self._double_generation_config = read_generation_config(self.args.model)
        self._executor = GenerationExecutor.create(
            self.args.model, llm_args=self.args, hf_model_dir=self.args.model
        )

    def generate(
        self,
        inputs: Any,
        sampling_params: Any = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> Any:
        """One output for one prompt, else a list of them; a prompt is text, ids, or a dict."""
        single = isinstance(inputs, str | dict) or isinstance(inputs[0], int)
        prompts = [inputs] if single else inputs
        many = sampling_params if isinstance(sampling_params, list) else None
        futures = [
            self.generate_async(prompt, many[i] if many else sampling_params)
            for i, prompt in enumerate(prompts)
        ]
        for future in futures:
            future.result()
        return futures[0] if single else futures

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
    ) -> RequestOutput:
        """What may be awaited, iterated over (`streaming`) or waited for by `result()`."""
        if isinstance(inputs, dict):
            inputs = (
                inputs["prompt_token_ids"] if "prompt_token_ids" in inputs else inputs["prompt"]
            )
        text = inputs if isinstance(inputs, str) else None
        ids = list(inputs) if text is None else self.tokenizer.encode(text)
        params = self._double_prepare(sampling_params)
        self._check_arguments(len(ids), 0, params)
        result = self._executor.generate_async(ids, sampling_params=params, streaming=streaming)
        return RequestOutput._from_generation_result(result, text, self.tokenizer)

    def _check_arguments(
        self, prompt_len: int, query_len: int, sampling_params: SamplingParams
    ) -> None:
        longest = self.args.max_num_tokens
        if prompt_len + query_len > longest and not self.args.enable_chunked_prefill:
            raise ValueError(f"a prompt of {prompt_len} tokens exceeds max_num_tokens ({longest})")

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()

    def _double_prepare(self, sampling_params: SamplingParams | None) -> SamplingParams:
        params = copy.copy(sampling_params or SamplingParams())
        params._apply_generation_config_defaults(self._double_generation_config)
        if self.tokenizer is not None:
            return params._setup(self.tokenizer, None, None)
        if params.end_id is None:
            raise ValueError("tokenizer is required, or specify sampling_params with end_id")
        return params
