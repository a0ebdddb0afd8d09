"""`LLM` over a fake engine: order, batching, aborts, and nothing run when a prompt is wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine import engine as engine_module
from outrider.engine.frontend import Prompt, RequestOptions
from outrider.errors import EngineDeadError, GenerationError, InvalidRequestError, WorkerError

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


def test_tensors(llm: LLM) -> None:
    """Tensors are arrays, as tokenizers return them."""
    rows = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    for given in (rows, list(rows), [{"prompt_token_ids": row} for row in rows]):
        outputs = llm.generate(given, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == rows.tolist()
    assert llm.generate(rows[0], use_tqdm=False)[0].prompt_token_ids == [5, 6]
    wrong: Any
    for wrong in (torch.tensor(5), torch.tensor([0.5], dtype=torch.bfloat16), [torch.tensor(5)]):
        with pytest.raises(InvalidRequestError, match="^prompts?: an array"):
            llm.generate(wrong, use_tqdm=False)
    for wrong in (np.array(5), torch.tensor(5), rows):
        with pytest.raises(InvalidRequestError, match="^prompt_token_ids: "):
            llm.generate({"prompt_token_ids": wrong}, use_tqdm=False)


def test_a_bad_prompt_runs_nothing(llm: LLM) -> None:
    bad: Any
    for bad in ([9999], "", {"text": "a"}, Prompt((9999,)), Prompt(("a",))):  # type: ignore[arg-type]
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
    for wrong in ("hi", {"role": "user", "content": "hi"}, None):
        with pytest.raises(InvalidRequestError, match="^messages: "):
            llm.chat(wrong)
    talk = [{"role": "user", "content": "hi"}]
    for wrong, field in (("x", ""), ([], ""), ([*talk, "x"], ".1"), ([{"content": "hi"}], ".0")):
        with pytest.raises(InvalidRequestError, match=rf"^prompts\[1\]: messages{field}: "):
            llm.chat([talk, wrong])


def test_parts_that_no_model_here_reads_are_refused(llm: LLM) -> None:
    text = {"type": "text", "text": "see"}
    for part in (
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "text", "text": 5},
        "see",
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat([{"role": "user", "content": [text, part]}])
        assert caught.value.field == "messages.0.content.1"
    assert llm.fake.submitted == []  # type: ignore[attr-defined]


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


def test_priorities_are_one_for_all_or_one_per_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    low = RequestOptions(priority=7)
    llm.generate(["a", "b"], params, priority=[3, -1], options=low, use_tqdm=False)
    llm.generate(["a", "b"], params, priority=2, use_tqdm=False)
    llm.enqueue("a", params, options=low)
    llm.wait_for_completion(use_tqdm=False)
    llm.chat([{"role": "user", "content": "a"}], params, priority=5, use_tqdm=False)
    submitted = llm.fake.submitted  # type: ignore[attr-defined]
    assert sorted(request.priority for request in submitted[:2]) == [-1, 3]
    assert [request.priority for request in submitted[2:]] == [2, 2, 7, 5]
    for wrong in ([1], True, "high", 2**40, [1, None]):
        with pytest.raises(InvalidRequestError, match="priority"):
            llm.generate(["a", "b"], params, priority=wrong, use_tqdm=False)  # type: ignore[arg-type]
    assert len(submitted) == 6


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
    assert [output.error for output in failed] == ["prompts[0]: broken", "prompts[1]: broken"]
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


class Bar:
    """What is told to a progress bar."""

    def __init__(self, total: int, **options: Any) -> None:
        self.total, self.n = total, 0
        self.format_dict = {"elapsed": 1.0}

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, count: int) -> None:
        self.n += count

    def set_postfix_str(self, text: str, *, refresh: bool) -> None:
        pass


def test_the_bar_goes_on_past_prompts_that_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Bar] = []
    monkeypatch.setattr(
        "outrider.engine.llm.tqdm", lambda **kwargs: bars.append(Bar(**kwargs)) or bars[-1]
    )
    submit = llm.fake.submit  # type: ignore[attr-defined]

    def refusing(request: Any, sink: Any) -> None:
        if request.sampling.max_tokens == 1:  # as one whose grammar does not compile
            raise InvalidRequestError.at("max_tokens", "refused by the engine")
        submit(request, sink)

    def refusing_all(requests: Any, sink: Any) -> None:
        if any(request.sampling.max_tokens == 1 for request in requests):
            raise InvalidRequestError.at("max_tokens", "refused by the engine")
        for request in requests:
            submit(request, sink)

    monkeypatch.setattr(llm.fake, "submit", refusing)  # type: ignore[attr-defined]
    monkeypatch.setattr(llm.fake, "submit_all", refusing_all)  # type: ignore[attr-defined]
    late, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=2, stop="cat")
    settings = [late, late, two, late, two, two, late, late]
    prompts: list[Any] = [GOOD] * 7 + [BAD]
    outputs = llm.generate(prompts, settings, on_error="return")
    assert [output.error is None for output in outputs] == [each is two for each in settings]
    assert str(outputs[6].error) == "prompts[6]: max_tokens: refused by the engine"
    with pytest.raises(GenerationError, match=r"^prompts\[0\]: max_tokens: .*\(2 of 2 prompts"):
        llm.generate([GOOD, GOOD], late)
    assert [(bar.n, bar.total) for bar in bars] == [(8, 8), (2, 2)]


def test_a_lost_engine_costs_only_what_has_not_ended(llm: LLM) -> None:
    few = SamplingParams(max_tokens=2)
    fake = llm.fake  # type: ignore[attr-defined]
    submit = fake.submit

    def dying(request: Any, sink: Any) -> None:
        fake.dead = len(fake.submitted) >= 3
        submit(request, sink)

    fake.submit = dying
    outputs = llm.generate([GOOD] * 5, few, use_tqdm=False, on_error="return")
    ended = [output.error is None for output in outputs]
    assert (ended[:2], ended[3:]) == ([True, True], [False, False]), "the third may have"
    assert str(outputs[4].error).startswith("prompts[4]: the engine is down")
    with pytest.raises(EngineDeadError):  # nothing can run
        llm.generate([GOOD], few, use_tqdm=False, on_error="return")
    fake.dead, fake.submitted = False, []
    with pytest.raises(EngineDeadError) as caught:
        llm.generate([GOOD] * 5, few, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in caught.value.outputs[:2]] == [2, 2]


def test_enqueued_prompts_run_at_once_and_are_waited_for(llm: LLM) -> None:
    few = SamplingParams(max_tokens=2)
    ids = llm.enqueue([GOOD] * 3, few) + llm.enqueue(GOOD, few)
    assert llm.fake.submitted  # type: ignore[attr-defined]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
    assert llm.wait_for_completion(use_tqdm=False) == []
    llm.enqueue(GOOD, few)
    llm.enqueue([GOOD, BAD], few, on_error="return")
    llm.fake.error = "broken"  # type: ignore[attr-defined]
    llm.enqueue(GOOD, few)
    with pytest.raises(GenerationError, match=r"^prompts\[\d\]: broken") as caught:
        llm.wait_for_completion(use_tqdm=False)
    assert len(caught.value.outputs) == 4, "those of every call"
    assert str(caught.value.outputs[2].error).startswith("prompts[2]: prompt: ")
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_what_scripts_ask_for(llm: LLM) -> None:
    assert llm.get_tokenizer().encode(GOOD) == llm.frontend.tokenizer.encode(GOOD)
