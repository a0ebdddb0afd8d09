"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: vectors and scores instead of texts.

Each item is a request of the same engine that ends with its prompt (`engine/frontend.py`).
Embeddings follow OpenAI's API, reranking accepts the bodies of Cohere and Jina, and scores follow
vLLM's API.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from ....engine.frontend import POOLED, Prompt, RequestOptions, paired
from ....errors import InvalidRequestError
from .answers import EmbeddingList, PooledUsage, RankedDocument, Reranking, ScoreList
from .generation import Generation
from .parse import PROMPTS, Strict, at_most
from .protocol import IdLists, Ids, ModelBody, Texts

MAX_ITEMS = 2048  # OpenAI's limit of inputs


class PooledBody(ModelBody):
    """The fields shared by the bodies of these endpoints."""

    stream: ClassVar[bool] = False
    stream_options: ClassVar[None] = None

    user: str | None = None  # a label of OpenAI's API, without effect
    request_id: str | None = Field(None, min_length=1, max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=256)
    # Number of last tokens to keep; -1: as many as fit.
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)

    def options(self) -> RequestOptions:
        return RequestOptions(priority=self.priority, tenant=self.cache_salt, pools=True)


class EmbeddingBody(PooledBody):
    """`POST /v1/embeddings`."""

    input: Annotated[str | Texts | Ids | IdLists, at_most(2**20)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    add_special_tokens: bool = True

    @classmethod
    def complaint(cls, errors: Sequence[Any]) -> InvalidRequestError | None:
        """Returns the error for an invalid input, which has the forms of a prompt."""
        is_it = errors[0]["loc"][:2] == ("input", "str")
        return InvalidRequestError.at("input", f"it has to be {PROMPTS}") if is_it else None


class DocumentText(Strict):
    """A document in the form of Cohere's older clients and of Jina's."""

    text: str


class RerankBody(PooledBody):
    """`POST /v1/rerank`."""

    query: str
    documents: Annotated[list[str | DocumentText], Field(min_length=1), at_most(MAX_ITEMS)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True
    instruction: str | None = None  # the task, if the model's form of a pair includes one
    max_tokens_per_doc: int | None = Field(None, ge=1)

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreBody(PooledBody):
    """`POST /v1/score`, with vLLM's older or newer names of the fields."""

    text_1: Annotated[str | Texts | None, at_most(MAX_ITEMS)] = None
    text_2: Annotated[str | Texts | None, at_most(MAX_ITEMS)] = None
    queries: Annotated[str | Texts | None, at_most(MAX_ITEMS)] = None
    documents: Annotated[str | Texts | None, at_most(MAX_ITEMS)] = None
    instruction: str | None = None

    @model_validator(mode="after")
    def _two_lists(self) -> ScoreBody:
        given = [name for name in _PARTNER if getattr(self, name) is not None]
        if given not in (["text_1", "text_2"], ["queries", "documents"]):
            at_fault = given[0] if given else "queries"
            if len(given) == 1:
                at_fault = _PARTNER[at_fault]
            raise InvalidRequestError.at(
                at_fault, "expected queries and documents, or text_1 and text_2"
            )
        return self


# The other field of each pair.
_PARTNER = {
    "text_1": "text_2", "text_2": "text_1", "queries": "documents", "documents": "queries"
}  # fmt: skip


def _add(
    generation: Generation, body: PooledBody, request_id: str, prompts: list[Prompt], field: str
) -> None:
    """Adds a request for each prompt."""
    generation.check_count(len(prompts), 1, field)
    for index, prompt in enumerate(prompts):
        limit = body.truncate_prompt_tokens
        if limit == 0:
            raise InvalidRequestError.at("truncate_prompt_tokens", "at least 1, or -1 (got 0)")
        kept = generation.frontend.truncated(prompt, limit, POOLED)
        generation.add(f"{request_id}-{index}", kept, POOLED, body.options(), field)


def _vector(generation: Generation, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = generation.jobs[index].assembler.pooled
    assert found is not None, "the request is finished"
    return found


def _usage(generation: Generation) -> PooledUsage:
    whole = generation.usage()
    count = whole["prompt_tokens"]
    return {
        "prompt_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": whole["prompt_tokens_details"],
    }


class Embeddings:
    """Implements `/v1/embeddings`."""

    @staticmethod
    def add(generation: Generation, body: EmbeddingBody, request_id: str) -> None:
        """Adds a request for each input; raises `InvalidRequestError`."""
        frontend, given = generation.frontend, body.input
        frontend.cut_of(body.dimensions)
        if not given and not isinstance(given, str):
            raise InvalidRequestError.at("input", "the list is empty")
        items: Any = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if len(items) > MAX_ITEMS:
            raise InvalidRequestError.at("input", f"{len(items)} inputs; at most {MAX_ITEMS}")
        prompts = [
            frontend.text_prompt(item, add_special_tokens=body.add_special_tokens, field="input")
            if isinstance(item, str)
            else frontend.token_prompt(item, "input")
            for item in items
        ]
        _add(generation, body, request_id, prompts, "input")

    @staticmethod
    async def answer(generation: Generation, body: EmbeddingBody, answer_id: str) -> EmbeddingList:
        """Returns the answer, after everything has finished."""
        cut = generation.frontend.cut_of(body.dimensions)
        vectors = [cut(_vector(generation, index)) for index in range(len(generation.jobs))]
        return {
            **generation.head(answer_id),
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                    if body.encoding_format == "base64"
                    else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ],
            "usage": _usage(generation),
        }


def _ranked(index: int, score: float, text: str | None) -> RankedDocument:
    row: RankedDocument = {"index": index, "relevance_score": score}
    if text is not None:
        row["document"] = {"text": text}
    return row


class Rerank:
    """Implements `/v1/rerank`."""

    @staticmethod
    def add(generation: Generation, body: RerankBody, request_id: str) -> None:
        """Adds a request for each document; raises `InvalidRequestError`."""
        frontend = generation.frontend
        frontend.require("score")
        texts = body.texts
        if (limit := body.max_tokens_per_doc) is not None:
            texts = [frontend.shortened_text(text, limit, "documents") for text in texts]
        prompts = [frontend.pair_prompt(body.query, text, body.instruction) for text in texts]
        _add(generation, body, request_id, prompts, "documents")

    @staticmethod
    async def answer(generation: Generation, body: RerankBody, answer_id: str) -> Reranking:
        """Returns the ranking, best documents first, after everything has finished."""
        scores = [float(_vector(generation, index)[0]) for index in range(len(generation.jobs))]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        texts = body.texts
        return {
            **generation.head(answer_id),
            "results": [
                _ranked(index, scores[index], texts[index] if body.return_documents else None)
                for index in order[: body.top_n]
            ],
            "usage": _usage(generation),
        }


class Scores:
    """Implements `/v1/score`."""

    @staticmethod
    def add(generation: Generation, body: ScoreBody, request_id: str) -> None:
        """Adds a request for each pair; raises `InvalidRequestError`."""
        frontend = generation.frontend
        frontend.require("score")
        names = ("queries", "documents") if body.queries is not None else ("text_1", "text_2")
        queries, documents = getattr(body, names[0]), getattr(body, names[1])
        prompts = [
            frontend.pair_prompt(*pair, body.instruction, field=names[1])
            for pair in paired(queries, documents, names)
        ]
        _add(generation, body, request_id, prompts, names[1])

    @staticmethod
    async def answer(generation: Generation, body: ScoreBody, answer_id: str) -> ScoreList:
        """Returns the scores in order, after everything has finished."""
        count = len(generation.jobs)
        return {
            **generation.head(answer_id),
            "object": "list",
            "data": [
                {"index": index, "object": "score", "score": float(_vector(generation, index)[0])}
                for index in range(count)
            ],
            "usage": _usage(generation),
        }
