"""What the front end hands to an executor."""

from __future__ import annotations

from typing import Any


class GenerationRequest:
    def __init__(
        self,
        prompt_token_ids: Any,
        sampling_params: Any,
        query_token_ids: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        postproc_params: Any = None,
    ) -> None:
        tokens = prompt_token_ids
        self.prompt_token_ids = tokens if isinstance(tokens, list) else tokens.tolist()
        self.sampling_params = sampling_params
        self.postproc_params = postproc_params
        self.lora_request = lora_request
        self.streaming = streaming
        self.id: int | None = None
        self.disaggregated_params: Any = None

    def set_id(self, id: int) -> GenerationRequest:
        assert self.id is None, f"Request ID is already set: {self.id}"
        self.id = id
        return self


class CancellingRequest:
    def __init__(self, id: int) -> None:
        self.id = id
