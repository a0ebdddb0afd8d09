"""`LLM` over a fake engine: order, batching, aborts, and nothing run when a prompt is wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine import engine as engine_module
from outrider.errors import GenerationError, InvalidRequestError, WorkerError

TEXT = "the cat sat on the mat. "


@pytest.fixture
def llm(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., Any], config: EngineConfig
) -> Iterator[LLM]:
    fake = make_engine(TEXT)
    monkeypatch.setattr(engine_module.Engine, "start", lambda config, backend: fake)
    monkeypatch.setattr("outrider.engine.llm.preflight", lambda config: {})
    with LLM(config.model, executor="local", max_queued_requests=2) as made:
        made.fake = fake  # type: ignore[attr-defined]
        yield made


def test_generate_keeps_order(llm: LLM, tokenizer: Any) -> None:
    prompts: list[Any] = ["the cat", tokenizer.encode("a mat"), {"prompt": "sat"}]
    prompts.append({"prompt_token_ids": tokenizer.encode("too")})
    settings = [SamplingParams(max_tokens=count) for count in (1, 5, 9, 4)]
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9, 4]
    assert [output.prompt for output in outputs] == ["the cat", None, "sat", None]
    assert all(output.finished for output in outputs)
    assert (TEXT * 9).startswith(outputs[2].outputs[0].text)
    assert outputs[2].speculation.drafter == "fake"


def test_one_prompt_in_any_form(llm: LLM, tokenizer: Any) -> None:
    for prompt in ("the cat", tokenizer.encode("the cat"), {"prompt": "the cat"}):
        assert len(llm.generate(prompt, use_tqdm=False)) == 1
    assert llm.generate([], use_tqdm=False) == []


def test_arrays(llm: LLM) -> None:
    """An array of integers is one prompt of token ids, its rows are if it has two dimensions."""
    assert [o.prompt_token_ids for o in llm.generate(np.array([5, 6]), use_tqdm=False)] == [[5, 6]]
    rows = llm.generate(np.array([[5, 6], [7, 8]], dtype=np.uint16), use_tqdm=False)
    assert [output.prompt_token_ids for output in rows] == [[5, 6], [7, 8]]
    several: list[Any] = [np.array([5]), [np.int32(6)], "a"]
    assert len(llm.generate(several, use_tqdm=False)) == 3
    assert len(llm.generate([np.int32(6), np.int32(7)], use_tqdm=False)) == 1  # type: ignore[list-item]
    assert [o.prompt for o in llm.generate(np.array(["a", "b"]), use_tqdm=False)] == ["a", "b"]
    wrong: Any
    for wrong in (np.array([0.5]), np.array(5), np.zeros((1, 2, 3), int), [np.zeros((2, 2), int)]):
        with pytest.raises(InvalidRequestError, match="^prompts?: an array"):
            llm.generate(wrong, use_tqdm=False)


def test_a_bad_prompt_runs_nothing(llm: LLM) -> None:
    for bad in ([9999], "", {"text": "a"}):
        with pytest.raises(InvalidRequestError):
            llm.generate(["fine", bad], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    assert llm.fake.submitted == []  # type: ignore[attr-defined]


def test_what_is_no_prompt_is_named(llm: LLM) -> None:
    wrong: Any
    for wrong in (None, 5, b"ab"):
        with pytest.raises(InvalidRequestError, match="^prompts: "):
            llm.generate(wrong)
    for wrong in ({"max_tokens": 1}, "a", [{"max_tokens": 1}]):
        with pytest.raises(InvalidRequestError, match="^sampling_params: "):
            llm.generate("a", wrong)
    for wrong in ("hi", {"role": "user", "content": "hi"}):
        with pytest.raises(InvalidRequestError, match="^messages: "):
            llm.chat(wrong)


def test_stop_string_aborts_the_request(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(stop="mat", max_tokens=200), use_tqdm=False)
    assert output.outputs[0].text == "the cat sat on the "
    assert output.outputs[0].finish_reason == "stop"
    assert llm.fake.aborted == [output.request_id]  # type: ignore[attr-defined]
    assert output.speculation.num_steps > 0


def test_n(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(n=5, max_tokens=3), use_tqdm=True)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3, 4]
    assert output.speculation.num_steps == 5


def test_stream(llm: LLM) -> None:
    seen = list(llm.stream("a", SamplingParams(max_tokens=8)))
    assert [len(output.outputs[0].token_ids) for output in seen] == [3, 6, 8]
    assert [output.finished for output in seen] == [False, False, True]


def test_a_closed_stream_aborts(llm: LLM) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=200))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats()["running"] == 0


def test_an_interrupt_aborts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.engine.outputs import Assembler

    def interrupt(self: Assembler, delta: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Assembler, "push", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=200), use_tqdm=False)
    assert llm.stats()["running"] == 0


def test_a_failed_step_raises(llm: LLM) -> None:
    llm.fake.error = "broken"  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="broken"):
        llm.generate(["a", "b"], use_tqdm=False)


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    assert output.prompt == "<user>hi\n<assistant>"
    assert len(llm.chat([[{"role": "user", "content": "hi"}]] * 3, use_tqdm=False)) == 3


def test_closed(llm: LLM) -> None:
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


GOOD, BAD = "the cat", [9999]


def test_each_output_carries_its_own_error(llm: LLM) -> None:
    few = SamplingParams(max_tokens=2)
    outputs = llm.generate([GOOD, BAD, "", GOOD], few, use_tqdm=False, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert [len(output.outputs) for output in outputs] == [1, 0, 0, 1]
    assert str(outputs[1].error).startswith("prompts[1]: prompt: token id 9999")
    assert all(output.finished for output in outputs)
    llm.fake.error = "broken"  # type: ignore[attr-defined]
    failed = llm.generate([GOOD, GOOD], few, use_tqdm=False, on_error="return")
    assert ["broken" in str(output.error) for output in failed] == [True, True]
    assert [output.outputs[0].finish_reason for output in failed] == ["error", "error"]
    talk = [{"role": "user", "content": "hi"}]
    chats = llm.chat([talk, [{"role": "none"}]], few, use_tqdm=False, on_error="return")
    assert str(chats[1].error).startswith("prompts[1]: messages")


def test_an_error_names_the_prompt_and_has_all_outputs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: prompt: token id 9999"):
        llm.generate([GOOD, BAD], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^prompt: token id 9999"):
        llm.generate([BAD], use_tqdm=False)
    llm.fake.error = "broken"  # type: ignore[attr-defined]
    with pytest.raises(GenerationError, match=r"^prompts\[0\]: .*\(2 of 2") as caught:
        llm.generate([GOOD, GOOD], use_tqdm=False)
    again = pickle.loads(pickle.dumps(caught.value))
    assert [output.error is None for output in again.outputs] == [False, False]
    with pytest.raises(InvalidRequestError, match="^on_error: 'raise' or 'return'"):
        llm.generate(GOOD, use_tqdm=False, on_error="ignore")  # type: ignore[arg-type]


def test_enqueued_prompts_run_at_once_and_are_waited_for(llm: LLM) -> None:
    few = SamplingParams(max_tokens=2)
    ids = llm.enqueue([GOOD] * 3, few) + llm.enqueue(GOOD, few)
    assert llm.fake.submitted  # type: ignore[attr-defined]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_what_scripts_ask_for(llm: LLM) -> None:
    assert llm.get_tokenizer().encode(GOOD) == llm.frontend.tokenizer.encode(GOOD)
