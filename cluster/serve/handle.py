"""Methods of an ingress that other Serve applications call by its handle, as of ray.serve.llm.

    answer = await handle.chat.remote({"messages": [...]})
    async for chunk in handle.options(stream=True).chat.remote({..., "stream": True}): ...

Bodies, answers and chunks are the JSON objects of the HTTP API.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import FrameType
from typing import Any

from pydantic import BaseModel, ConfigDict

from ...errors import InvalidRequestError, PromptTooLongError
from ...scheduler.sampling import SamplingParams
from .openai.calls import Calls, as_mapping

# What the batch processor of `ray.data.llm` adds to every body.
_BATCH_FIELD = "idx_in_batch"


class RefusedError(InvalidRequestError, ValueError):
    """A body that a handle was given is wrong.

    It is a ValueError as well: `ray.data.llm` keeps those with their row, and ends a run for any
    other error.
    """


class RefusedPromptError(RefusedError, PromptTooLongError):
    """The same of a prompt that is too long."""


class HandleMethods:
    """The methods. A handle with `stream=True` gets a generator: of chunks where the body has
    `stream: true`, else of the answer alone.

    Every method takes an API key, where the server has any, as `key`.

    Raises:
        RefusedError: the body is wrong; names the field.
        OutriderError: as over HTTP, by its type.
    """

    _calls: Calls

    async def chat(self, request: Any, *, key: str | None = None) -> Any:
        """As `/v1/chat/completions`."""
        return await self._called("/v1/chat/completions", request, key)

    async def completions(self, request: Any, *, key: str | None = None) -> Any:
        """As `/v1/completions`."""
        return await self._called("/v1/completions", request, key)

    async def responses(self, request: Any, *, key: str | None = None) -> Any:
        """As `/v1/responses`."""
        return await self._called("/v1/responses", request, key)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> Any:
        """The completion of a prompt, as `completions` returns it, with its token ids.

        Args:
            prompt: a text, token ids, or a body of completions that may have `sampling_params`.
            sampling_params: by their names in `SamplingParams`; others keep the API's defaults.
        """
        body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        for settings in (body.pop("sampling_params", None), sampling_params):
            if isinstance(settings, SamplingParams):
                settings = settings.model_dump(mode="json", exclude_unset=True)
            if settings is not None and not isinstance(settings, Mapping):
                raise RefusedError.at(
                    "sampling_params", f"SamplingParams or a mapping, got {settings!r}"
                )
            body |= settings or {}
        body.setdefault("return_token_ids", True)
        return await self._called("/v1/completions", body, key)

    async def tokenize(self, request: Any, *, key: str | None = None) -> Any:
        """As `/tokenize`."""
        return await self._called("/tokenize", request, key)

    async def detokenize(self, request: Any, *, key: str | None = None) -> Any:
        """As `/detokenize`."""
        return await self._called("/detokenize", request, key)

    async def embeddings(self, request: Any, *, key: str | None = None) -> Any:
        """As `/v1/embeddings`."""
        return await self._called("/v1/embeddings", request, key)

    async def score(self, request: Any, *, key: str | None = None) -> Any:
        """As `/v1/score`."""
        return await self._called("/v1/score", request, key)

    async def transcriptions(self, request: Any, *, key: str | None = None) -> Any:
        """Refused: engines read text."""
        raise RefusedError.at("transcriptions", "not supported: this server generates text only")

    async def _called(self, path: str, request: Any, key: str | None) -> Any:
        try:
            body = as_mapping(request)
            body.pop(_BATCH_FIELD, None)
            if _is_streamed(body):
                return self._events(path, body, key)
            return await self._calls.answer(path, body, key)
        except InvalidRequestError as error:
            raise _refused(error) from None

    async def _events(
        self, path: str, body: dict[str, Any], key: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(self._calls.events(path, body, key)) as events:
                async for event in events:
                    yield event
        except InvalidRequestError as error:
            raise _refused(error) from None


def _refused(error: InvalidRequestError) -> RefusedError:
    kind = RefusedPromptError if isinstance(error, PromptTooLongError) else RefusedError
    return kind(error.message, field=error.field)


# Serve's callers of a method, for handles with and without `stream=True`.
_CALLERS = {"_call_generator_async": True, "call_user_method": False}


def _is_streamed(body: dict[str, Any]) -> bool:
    """Whether the handle that called has `stream=True`.

    Serve expects a generator for such handles only, and its request context does not have the
    option; the functions that call a method differ.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _CALLERS.get(frame.f_code.co_name)
        if found is not None:
            return found
        frame = frame.f_back
    return bool(body.get("stream"))


class ChatCompletionRequest(BaseModel):
    """A body of `chat`, under the name of ray.serve.llm; its fields are checked by the server."""

    model_config = ConfigDict(extra="allow")


class CompletionRequest(BaseModel):
    """A body of `completions`, likewise."""

    model_config = ConfigDict(extra="allow")
