"""Embeddings and scores, equal to what transformers' own forward gives by the models' rules."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import (
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.engine.frontend import RequestOptions
from outrider.errors import CheckpointError, ConfigError, InvalidRequestError, WorkerError
from outrider.tests.helpers import pooling as models

TEXTS = ["def main():", "the quick brown fox jumps over the lazy dog " * 3, "x", "class A:\n    b"]


def open_llm(folder, **options) -> LLM:
    settings = {"executor": "local", "num_kv_blocks": 128, "device": "cpu", "dtype": "float32"}
    return LLM(str(folder), **settings | options)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    return models.embedding_model(tmp_path_factory.mktemp("embedding"), is_matryoshka=True)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return models.reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return models.classifier(tmp_path_factory.mktemp("classifier"))


@torch.inference_mode()
def last_states(folder, prompts) -> np.ndarray:
    model = Qwen3Model.from_pretrained(folder, dtype=torch.float32).eval()
    found = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    return torch.nn.functional.normalize(torch.stack(found), dim=1).numpy()


def vectors(outputs) -> np.ndarray:
    return np.array([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2}, {"forward": "bridge"}, {"pipeline_parallel_size": 2}],
    ids=str,
)
def test_embeddings(embedding, options):
    with open_llm(embedding, max_num_batched_tokens=16, **options) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        expected = last_states(embedding, [output.prompt_token_ids for output in found])
        np.testing.assert_allclose(vectors(found), expected, atol=2e-5)
        assert found[0].outputs.hidden_size == 64
        again = llm.embed(TEXTS, use_tqdm=False)  # most of it from the prefix cache
        assert again[1].num_cached_tokens > 0
        np.testing.assert_allclose(vectors(again), expected, atol=2e-5)
        ids = [output.prompt_token_ids for output in found]
        np.testing.assert_allclose(vectors(llm.embed(ids, use_tqdm=False)), expected, atol=2e-5)
        short = vectors(llm.embed(TEXTS, dimensions=16, use_tqdm=False))
        cut = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
        np.testing.assert_allclose(short, cut, atol=2e-5)
        (last,) = llm.embed(TEXTS[1], truncate_prompt_tokens=3, use_tqdm=False)
        assert last.prompt_token_ids == ids[1][-3:]
        for name, wrong in (("dimensions", 65), ("dimensions", 0), ("truncate_prompt_tokens", 0)):
            with pytest.raises(InvalidRequestError) as error:
                llm.embed("x", **{name: wrong})
            assert error.value.field == name


def test_a_checkpoint_that_declares_nothing(reranker, tmp_path):
    """As Qwen3-Reranker's first release: vLLM's `hf_overrides` say what it gives."""
    folder = shutil.copytree(reranker, tmp_path / "first")
    (folder / "modules.json").unlink()
    names = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = (next(key for key, at in names.items() if at == x) for x in (models.NO, models.YES))
    given = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }
    with open_llm(reranker) as llm:
        expected = [each.outputs.score for each in llm.score("q", DOCUMENTS, use_tqdm=False)]
    for options in ({"hf_overrides": given}, {"hf_overrides": given, "tensor_parallel_size": 2}):
        with open_llm(folder, **options) as llm:
            found = [each.outputs.score for each in llm.score("q", DOCUMENTS, use_tqdm=False)]
            assert found == pytest.approx(expected, abs=2e-5)
            assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(CheckpointError, match="classifier_from_token"):
        open_llm(folder, hf_overrides={"classifier_from_token": ["no such token", yes]})
    with pytest.raises(
        ConfigError, match=r"hf_overrides: is_matryoshka: its checkpoint has neither"
    ):
        open_llm(folder, hf_overrides={"is_matryoshka": True})
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match="hf_overrides"):
        llm.score("q", "d")


def sigmoid(values) -> np.ndarray:
    return 1 / (1 + np.exp(-np.array(values)))


DOCUMENTS = ["a document", "another of them, which is longer than the first " * 2, "none"]


@pytest.mark.parametrize("size", [1, 2])
def test_scores_of_two_tokens(reranker, size):
    """Beside generation, in the same batch, with a drafter."""
    model = Qwen3ForCausalLM.from_pretrained(reranker, dtype=torch.float32).eval()
    drafter = {"decoding_type": "NGram", "max_draft_len": 3}
    with open_llm(reranker, tensor_parallel_size=size, speculative_config=drafter) as llm:
        plain = SamplingParams(max_tokens=24, temperature=0.0)
        alone = llm.generate(TEXTS, plain, use_tqdm=False)
        llm.enqueue(TEXTS, plain)
        found = llm.score("which document?", DOCUMENTS, use_tqdm=False)
        beside = llm.wait_for_completion(use_tqdm=False)
        assert [each.outputs[0].token_ids for each in beside] == [
            each.outputs[0].token_ids for each in alone
        ]
        with torch.inference_mode():
            logits = [model(torch.tensor([each.prompt_token_ids])).logits[0, -1] for each in found]
        expected = sigmoid([float(row[models.YES] - row[models.NO]) for row in logits])
        np.testing.assert_allclose([each.outputs.score for each in found], expected, atol=2e-5)
        text = llm.frontend.pair_prompt("which document?", "none").text
        assert text.endswith(
            "<Document>: none<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        assert "<Instruct>: Given a web search query, " in text
        assert (
            "<Instruct>: find it\n<Query>: q\n"
            in llm.frontend.pair_prompt("q", "d", "find it").text
        )
        with pytest.raises(InvalidRequestError, match="gives no embeddings; it gives scores"):
            llm.embed("x")


@pytest.mark.parametrize("size", [1, 2])
def test_scores_of_a_layer(classifier, size):
    model = Qwen3ForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    with open_llm(classifier, tensor_parallel_size=size) as llm:
        found = llm.score(["q", "r", "s"], DOCUMENTS, use_tqdm=False)
        with torch.inference_mode():
            logits = [float(model(torch.tensor([each.prompt_token_ids])).logits) for each in found]
        np.testing.assert_allclose(
            [each.outputs.score for each in found], sigmoid(logits), atol=2e-5
        )
        with pytest.raises(InvalidRequestError, match="no output layer to generate text with"):
            llm.generate("x", use_tqdm=False)
        for queries, documents, field in (
            (["a", "b"], DOCUMENTS, "queries"),
            ("a", [], "documents"),
            ("a", [7], "documents"),
            ("a", "x" * 5000, "documents"),
        ):
            with pytest.raises(InvalidRequestError) as error:
                llm.score(queries, documents)
            assert error.value.field == field


def test_from_an_event_loop(embedding, reranker):
    """Many at once give what `LLM` gives; an abort and a wrong setting are errors by name."""
    settings = {"executor": "local", "num_kv_blocks": 128, "device": "cpu", "dtype": "float32"}

    async def embeddings() -> None:
        async with AsyncLLM(str(embedding), **settings) as llm:
            found = await asyncio.gather(*(llm.embed(text, dimensions=16) for text in TEXTS))
            alone = llm.llm.embed(TEXTS, dimensions=16, use_tqdm=False)
            np.testing.assert_allclose(vectors(found), vectors(alone), atol=2e-5)
            for name, wrong in (("dimensions", 65), ("truncate_prompt_tokens", 0)):
                with pytest.raises(InvalidRequestError) as error:
                    await llm.embed("x", **{name: wrong})
                assert error.value.field == name
            await llm.pause_generation("keep")
            waiting = asyncio.create_task(llm.embed("x", "mine"))
            while "mine" not in llm._runs:
                await asyncio.sleep(0.01)
            await llm.abort("mine")
            with pytest.raises(WorkerError, match="'mine' was aborted"):
                await waiting
            await llm.resume_generation()
            with pytest.raises(InvalidRequestError, match="gives no scores"):
                await llm.score("q", "d")

    async def scores() -> None:
        async with AsyncLLM(str(reranker), **settings) as llm:
            found = await asyncio.gather(*(llm.score("q", each) for each in DOCUMENTS))
            alone = llm.llm.score("q", DOCUMENTS, use_tqdm=False)
            np.testing.assert_allclose(
                [each.outputs.score for each in found], [each.outputs.score for each in alone],
                atol=2e-5,
            )  # fmt: skip
            with pytest.raises(InvalidRequestError) as error:
                await llm.score("q", 7)
            assert error.value.field == "document"

    asyncio.run(embeddings())
    asyncio.run(scores())


def test_other_weights(classifier, tmp_path):
    """The layer is one of the weights that an update replaces."""
    from safetensors.torch import load_file

    weights = load_file(classifier / "model.safetensors")
    with open_llm(classifier) as llm:
        (before,) = llm.score("q", "d", use_tqdm=False)
        llm.update_weights({**weights, "score.weight": -weights["score.weight"]})
        (after,) = llm.score("q", "d", use_tqdm=False)
        assert after.outputs.score == pytest.approx(1 - before.outputs.score, abs=1e-5)


def test_a_model_of_text_is_refused_by_name(tiny):
    with open_llm(models.DEMO) as llm:
        for call in (llm.embed, lambda text: llm.score(text, text)):
            with pytest.raises(
                InvalidRequestError, match="'target' gives no .*modules.json"
            ) as error:
                call("x")
            assert error.value.field == "model"
        assert RequestOptions().pools is False
