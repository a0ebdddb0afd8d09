"""HTTP client of a running server, and the drafters' lines that commands print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from ..errors import ConfigError, OutriderError


def drafter_lines(drafters: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Yields llama-server's lines for every drafter that was asked, and its faults."""
    from ..drafters.protocol import DrafterStats

    for name, values in drafters.items():
        known = {each.name: values[each.name] for each in fields(DrafterStats)}
        stats = DrafterStats(**known)  # health is not shown here
        _, num_asked, _ = stats.num_calls
        if num_asked or stats.faults:
            yield from stats.lines(name)
        if stats.faults:
            yield f"faults {name} = {stats.faults}; the log has the first one's traceback"


_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 600.0
_FACTS_TIMEOUT_S = 30.0  # for routes that need no model


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    is_reasoning: bool = False
    trace: Sequence[dict[str, Any]] = ()  # steps whose text is in this piece or later ones


class RunningServer:
    """One server, over HTTP.

    Args:
        url: the server's URL, with or without `/v1`.
        timeout_s: timeout for a server that does not respond.
        api_key: sent with every request.
        headers: also sent with every request.
        verify: whether an HTTPS server's certificate must be trusted.
        field: the option that gave the URL, for messages.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = _ANSWER_TIMEOUT_S,
        api_key: str | None = None,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        verify: bool = True,
        field: str = "url",
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        if not url.strip("/ "):
            raise ConfigError.at(field, f"expected a server's URL, got {url!r}")
        self._field = field
        self._facts_timeout_s = min(timeout_s, _FACTS_TIMEOUT_S)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.headers = {**key, **headers}
        try:
            self.http = httpx.Client(
                base_url=self.url,
                timeout=timeout,
                trust_env=False,
                headers=self.headers,
                verify=verify,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError.at(field, f"{url!r}: {error}") from None

    def models(self) -> list[str]:
        """Returns the names of the served models.

        Raises:
            ConfigError: no server answers at the URL.
            OutriderError: the server's error; or it serves no model.
        """
        try:
            names = [str(model["id"]) for model in self._get("/v1/models")["data"]]
        except (KeyError, TypeError):
            raise OutriderError(f"{self._field}: {self.url}/v1/models lists no models") from None
        if not names:
            raise OutriderError(f"{self._field}: {self.url} serves no model now")
        return names

    def traces(self, model: str) -> bool:
        """Returns True if the server can report the origins of a model's tokens, like Outrider."""
        listed = self._get("/v1/models")["data"]
        return any(each["id"] == model and "drafters" in each for each in listed)

    def stats_lines(self) -> list[str]:
        """Returns the statistics lines of every drafter of every replica."""
        lines: list[str] = []
        for engine in self._get("/stats")["engines"]:
            lines += drafter_lines(engine.get("drafters", {}))
        return lines

    def chat(
        self, model: str, messages: Sequence[dict[str, str]], **sampling: Any
    ) -> Iterator[Piece]:
        """Yields the pieces of the answer."""
        body = {"model": model, "messages": list(messages), "stream": True, **sampling}
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _said(response)
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        payload = line.removeprefix("data:").strip()
                        if payload == "[DONE]":
                            return
                        yield from _pieces(payload)
            raise OutriderError("the server ended the stream in the middle of the answer")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def metrics(self) -> str:
        """Returns Prometheus' text from `/metrics`; empty if the server has none."""
        try:
            response = self.http.get("/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == httpx.codes.OK else ""

    def close(self) -> None:
        """Closes the connection."""
        self.http.close()

    def _get(self, path: str) -> Any:
        try:
            response = self.http.get(path, timeout=self._facts_timeout_s)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != httpx.codes.OK:
            raise _said(response, self._field)
        try:
            return response.json()
        except ValueError:
            raise OutriderError(f"{self._field}: {self.url}{path} did not answer in JSON") from None

    def _unreachable(self, error: httpx.HTTPError) -> ConfigError:
        reason = str(error) or type(error).__name__
        return ConfigError.at(self._field, f"no server answers at {self.url}: {reason}")


def _pieces(payload: str) -> Iterator[Piece]:
    """Yields the text in one event of the stream; servers use two names for reasoning.

    Raises:
        OutriderError: the server ended the stream with an error, or sent an invalid event.
    """
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise OutriderError(f"the server sent what is no event: {payload[:80]!r}")
    if error := event.get("error"):
        raise OutriderError(str(error.get("message", error) if isinstance(error, dict) else error))
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    if trace := choices[0].get("speculation_trace"):
        yield Piece("", trace=trace)
    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
        yield Piece(thought, is_reasoning=True)
    if content := delta.get("content"):
        yield Piece(content)


def _said(response: httpx.Response, field: str | None = None) -> OutriderError:
    """Converts an error response to an `OutriderError`; `field` is used if its form is unknown."""
    try:
        error = response.json()["error"]
        return OutriderError(str(error["message"]), field=error.get("param"))
    except (ValueError, KeyError, TypeError):
        text = f"{response.url} answered {response.status_code}: {response.text[:200]}"
        return OutriderError(text, field=field)
