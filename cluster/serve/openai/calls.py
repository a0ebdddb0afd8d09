"""`Calls`: the API without HTTP, for callers in Python.

A body is a mapping or a pydantic model and is checked as over HTTP; answers and chunks are the
JSON objects of the HTTP API, and errors are raised.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel
from starlette.datastructures import Headers

from ....errors import InvalidRequestError, ModelNotFoundError
from ..access.access import Call, answering
from .errors import BodyTooLargeError
from .routes import ENDPOINTS, TOKEN_ENDPOINTS, Edge, Models, OpenAnswer, prepared

_NO_HEADERS = Headers({})


class Calls:
    """The endpoints of one model or several, by their paths."""

    def __init__(self, *edges: Edge) -> None:
        self._models = Models.of(*edges)

    async def answer(self, path: str, body: Any, key: str | None = None) -> dict[str, Any]:
        """The whole answer to `body`.

        Args:
            path: as over HTTP, for example `/v1/completions`.
            key: an API key, where there are any.

        Raises:
            InvalidRequestError: a field is wrong, or a stream was asked for.
            OutriderError: as over HTTP.
        """
        with self._admitted(key) as call:
            if path in TOKEN_ENDPOINTS:
                raw, prepare = encoded(body), partial(TOKEN_ENDPOINTS[path], self._models)
                with answering(call):
                    return await prepared(self._models, raw, prepare)
            opened = await self._opened(call, path, body)
            if opened.body.stream:
                raise InvalidRequestError.at(
                    "stream", "this call returns the whole answer; leave it out"
                )
            await opened.generation.finish()
            return await opened.whole()

    async def events(
        self, path: str, body: Any, key: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the answer as they come, or the answer alone where `stream` is not true.

        Closing it ends the request. Arguments and errors are those of `answer`.
        """
        if path in TOKEN_ENDPOINTS:
            yield await self.answer(path, body, key)
            return
        with self._admitted(key) as call:
            opened = await self._opened(call, path, body)
            if opened.body.stream:
                async with contextlib.aclosing(opened.events()) as events:
                    async for event in events:
                        yield event
            else:
                await opened.generation.finish()
                yield await opened.whole()

    @contextlib.contextmanager
    def _admitted(self, key: str | None) -> Iterator[Call]:
        """A request of the key's holder, counted while it runs."""
        access = self._models.first.access
        identity = access.identify(None if key is None else f"Bearer {key}")
        identity.usage.begin()
        try:
            yield Call(identity, log_prompts=access.config.log_prompts)
        finally:
            identity.usage.end()

    async def _opened(self, call: Call, path: str, body: Any) -> OpenAnswer:
        if path not in ENDPOINTS:
            known = ", ".join([*ENDPOINTS, *TOKEN_ENDPOINTS])
            raise ModelNotFoundError(f"{path} is not served; there are {known}", field="url")
        raw = encoded(body)
        prepare = partial(ENDPOINTS[path].opened, self._models, _NO_HEADERS)
        with answering(call):  # the generation keeps it
            largest = self._models.first.largest_body()
            if len(raw) > largest:
                raise BodyTooLargeError.at("body", f"more than {largest} bytes")
            return await prepared(self._models, raw, prepare)


def as_mapping(body: Any) -> dict[str, Any]:
    """The fields of a body: those of a mapping, or those that were set of a pydantic model.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(body, BaseModel):
        return body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    if not isinstance(body, Mapping):
        raise InvalidRequestError.at(
            "body", f"expected a mapping or a pydantic model, got {type(body).__name__}"
        )
    return dict(body)


def encoded(body: Any) -> bytes:
    """A body as JSON; raises `InvalidRequestError` where it cannot be."""
    fields = as_mapping(body)
    try:
        return json.dumps(fields, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError.at("body", f"it cannot be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """JSON's value for one of Python's that it does not have."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (BaseModel, Mapping)):
        return as_mapping(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
