"""A user's drafter: one method is enough, every mistake is named, and none of them hurts."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import outrider
from outrider.config import EngineConfig, UserConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.user import User
from outrider.errors import ConfigError

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.toy import VOCAB, continuation, next_token

MODULE = '''
import threading
from outrider.scheduler import tree
from outrider.tests.helpers.toy import next_token

class Right:
    def draft(self, token_ids, max_tokens):
        out = []
        for _ in range(max_tokens):
            out.append(next_token(tuple(token_ids + out)))
        return out

class Hooks(Right):
    name = "hooked"
    def __init__(self, log):
        self.log = log
    def prepare(self, request):
        self.log.append(("prepare", request.id))
    def free(self, request_id):
        self.log.append(("free", request_id))
    def draft(self, token_ids, max_tokens, request_id):
        self.log.append(("draft", request_id))
        return super().draft(token_ids, max_tokens)

class Says:
    def __init__(self, what):
        self.what = what
    def draft(self, token_ids, max_tokens):
        if isinstance(self.what, type):
            raise self.what("no luck")
        return self.what

class SometimesRaises(Right):
    def draft(self, token_ids, max_tokens):
        if token_ids[0] == 1:
            raise RuntimeError("not this one")
        return super().draft(token_ids, max_tokens)

class Gate:
    def __init__(self):
        self.hangs, self.opened = False, threading.Event()
    def wait(self):
        self.hangs = True
        self.opened.wait(60)
        self.hangs = False
    def set(self):
        self.opened.set()

class Hangs(Right):
    def __init__(self):
        self.gate = Gate()
        self.calls = 0
        self.seen = []
    def prepare(self, request):
        self.seen.append(request)
    def draft(self, token_ids, max_tokens):
        self.calls += 1
        if self.calls == 3:
            self.gate.wait()
        return super().draft(token_ids, max_tokens)

class SlowStart(Right):
    def __init__(self):
        self.gate = Gate()
        self.prepared = []
    def prepare(self, request):
        self.prepared.append(request.id)
        self.gate.wait()

class Full:
    """Two chains from the root: a wrong one and the right one."""
    def __init__(self):
        self.texts = {}
    def open(self, requests):
        for request in requests:
            self.texts[request.id] = [*request.prompt.tolist(), *request.emitted.tolist()]
    def propose(self, batch, budgets):
        return [self.tree(self.texts[i], int(n)) for i, n in zip(batch.request_ids, budgets)]
    def tree(self, text, budget):
        from outrider.scheduler.types import Draft, ints
        if budget < 2:
            return tree.EMPTY
        first = next_token(tuple(text))
        return Draft(ints([(first + 1) % 50, first]), ints([-1, -1]))
    def observe(self, batch, verdict):
        for row, name in enumerate(batch.request_ids):
            self.texts[name] += verdict.tokens(row).tolist()
    def close(self, request_ids):
        for name in request_ids:
            del self.texts[name]
    def shutdown(self): ...

class HangingTree(Full):
    def __init__(self):
        super().__init__()
        self.gate, self.calls = Gate(), 0
    def propose(self, batch, budgets):
        self.calls += 1
        if self.calls == 3:
            self.gate.wait()
        return super().propose(batch, budgets)

class FailingHook(Right):
    def __init__(self, verb):
        setattr(self, verb, self.fail)
        self.calls = []
    def fail(self, *what):
        self.calls.append(what)
        raise RuntimeError("no luck")

class NoObserve:
    def open(self, requests): ...
    def propose(self, batch, budgets): ...
    def close(self, request_ids): ...
    def shutdown(self): ...

class BadVerb(Full):
    def propose(self, batch): ...

class BadDraft:
    def draft(self, token_ids): ...

class BadHook(Right):
    def free(self): ...

class Nothing: ...

class Explodes:
    def __init__(self):
        raise OSError("disk on fire")

constant = 3
'''


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Builds a drafter of the module above.

    Its deadline passes when one of its calls waits at its gate, and never because of the machine;
    with a `timeout_s`, it is a time.
    """
    name = f"user_module_{id(tmp_path)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)

    def make(path: str, /, **options) -> User:
        timeout_s = options.pop("timeout_s", None)
        path = path if ":" in path else f"{name}:{path}"
        if timeout_s is not None:
            return User(UserConfig(drafter=path, options=options, timeout_s=timeout_s))
        drafter = User(UserConfig(drafter=path, options=options))
        made = getattr(drafter._drafter, "_drafter", drafter._drafter)
        drafter._runner._done = Answers(getattr(made, "gate", None))
        return drafter

    yield make
    sys.modules.pop(name, None)


class Answers(threading.Semaphore):
    """Counts the calls that have returned; who waits for one gives up if it hangs."""

    def __init__(self, gate: Any) -> None:
        super().__init__(0)
        self._gate = gate

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if not blocking:
            return super().acquire(blocking=False)
        for _ in range(30_000):
            if super().acquire(timeout=0.001):
                return True
            if self._gate is not None and self._gate.hangs:
                return False
        raise AssertionError("a call neither returns nor hangs")


def serve(loop, request_of, drive, names: str = "ab") -> None:
    wanted = {}
    for index, name in enumerate(names):
        wanted[name] = continuation((index + 1, 2), 30)
        loop.add(request_of(name, (index + 1, 2), 30))
    assert drive(loop) == wanted


@pytest.mark.parametrize("what", ["Right", "Full"])
def test_greedy_output_is_that_of_no_drafter(user, make_loop, request_of, drive, what):
    drafting = Drafting(user(what), VOCAB)
    serve(make_loop(drafting=drafting), request_of, drive)
    stats = drafting.all_stats()[what.lower()]
    assert stats.faults == 0
    assert stats.num_acc_tokens > 0
    drafting.shutdown()


def test_hooks_are_called_and_the_name_is_the_users(user, make_loop, request_of, drive):
    log: list[tuple[str, str]] = []
    drafting = Drafting(user("Hooks", log=log), VOCAB)
    serve(make_loop(drafting=drafting), request_of, drive, "a")
    assert drafting.drafter.name == "hooked"
    assert log[0] == ("prepare", "a")
    assert log[-1] == ("free", "a")
    assert set(log[1:-1]) == {("draft", "a")}


@pytest.mark.parametrize("verb", ["prepare", "free", "shutdown"])
def test_a_hook_that_raises_is_counted_and_the_request_goes_on(
    user, make_loop, request_of, drive, caplog, verb
):
    drafter = user("FailingHook", verb=verb)
    drafting = Drafting(drafter, VOCAB)
    with caplog.at_level(logging.ERROR):
        serve(make_loop(drafting=drafting), request_of, drive)
        drafting.shutdown()
    # Both requests end in one step: one fault, and the other one's resources are freed, too.
    assert drafting.stats.faults == {"prepare": 2, "free": 1, "shutdown": 1}[verb]
    assert len(drafter._drafter._drafter.calls) == {"prepare": 2, "free": 2, "shutdown": 1}[verb]
    assert drafter._drafter._tokens == {}
    assert drafting.stats.num_acc_tokens > 20  # `prepare` is not what it drafts by
    (record,) = caplog.records
    assert isinstance(record.exc_info[1].__cause__, RuntimeError)


BAD_ANSWERS = {
    "raises": RuntimeError,
    "leaves": SystemExit,
    "too many": [1] * 50,
    "unknown id": [VOCAB],
    "negative id": [-1],
    "too large": [2**40],
    "text": "abc",
    "floats": [0.5],
    "a number": 3,
    "a table": [[1, 2], [3, 4]],
}


@pytest.mark.parametrize("what", BAD_ANSWERS.values(), ids=list(BAD_ANSWERS))
def test_bad_answers_cost_their_draft_only(user, make_loop, request_of, drive, caplog, what):
    drafting = Drafting(user("Says", what=what), VOCAB)
    with caplog.at_level(logging.ERROR):
        serve(make_loop(drafting=drafting), request_of, drive)
    assert drafting.stats.faults >= 29
    assert drafting.stats.num_gen_tokens == 0
    logged = [record for record in caplog.records if "says" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info is not None


@pytest.mark.parametrize("what", [None, [], ()])
def test_no_guess_is_no_fault(user, make_loop, request_of, drive, what):
    drafting = Drafting(user("Says", what=what), VOCAB)
    serve(make_loop(drafting=drafting), request_of, drive)
    assert drafting.stats.faults == 0


def test_one_request_that_makes_it_raise_does_not_hurt_the_other(
    user, make_loop, request_of, drive
):
    drafting = Drafting(user("SometimesRaises"), VOCAB)
    serve(make_loop(drafting=drafting), request_of, drive)
    assert drafting.stats.faults > 0
    assert drafting.stats.num_acc_tokens > 15


def test_a_drafter_that_hangs_is_left_behind_and_taken_back(user, make_loop, request_of, drive):
    drafter = user("Hangs")
    hanging = drafter._drafter._drafter
    drafting = Drafting(drafter, VOCAB)
    loop = make_loop(drafting=drafting, max_model_len=120)
    serve(loop, request_of, drive, "a")  # its third call hangs; the request ends without it
    assert drafting.stats.faults == 1
    assert hanging.calls == 3
    loop.add(request_of("b", (7, 7), 80))
    text = ()
    for _ in range(4):
        text += sum((delta.token_ids for delta in loop.step()), ())
    assert len(text) == 4
    assert (drafting.stats.faults, hanging.calls) == (1, 3)
    hanging.gate.set()
    wait_for(drafter)
    text += drive(loop)["b"]
    assert text == continuation((7, 7), 80)
    assert drafting.stats.faults == 1
    assert drafting.stats.num_acc_tokens > 20
    assert hanging.seen[-1].emitted.tolist() == list(text[:4])  # what it had missed
    assert set(drafter._drafter._tokens) == set()
    drafting.shutdown()


def test_a_full_drafter_is_told_anew_what_it_missed(user, make_loop, request_of, drive):
    drafter = user("HangingTree")
    full = drafter._drafter
    drafting = Drafting(drafter, VOCAB)
    loop = make_loop(drafting=drafting, max_model_len=120)
    loop.add(request_of("a", (5, 5), 80))
    text = sum((sum((d.token_ids for d in loop.step()), ()) for _ in range(6)), ())
    assert (drafting.stats.faults, full.calls) == (1, 3)
    full.gate.set()
    wait_for(drafter)
    before = drafting.stats.num_acc_tokens
    text += drive(loop)["a"]
    assert text == continuation((5, 5), 80)  # its text is right again, or it would guess wrong
    assert drafting.stats.num_acc_tokens - before > 20
    assert drafting.stats.faults == 1
    assert full.texts == {}
    drafting.shutdown()


def test_a_slow_start_is_not_repeated(user, make_loop, request_of, drive):
    drafter = user("SlowStart")
    drafting = Drafting(drafter, VOCAB)
    loop = make_loop(drafting=drafting, max_model_len=120)
    loop.add(request_of("a", (5, 5), 80))
    text = sum((sum((d.token_ids for d in loop.step()), ()) for _ in range(3)), ())
    drafter._drafter._drafter.gate.set()
    wait_for(drafter)
    text += drive(loop)["a"]
    assert text == continuation((5, 5), 80)
    assert drafter._drafter._drafter.prepared == ["a"]
    assert drafting.stats.faults == 1
    assert drafting.stats.num_acc_tokens > 20
    drafting.shutdown()


def wait_for(drafter: User) -> None:
    """Until the call that was given up has returned."""
    for _ in range(1000):
        if not drafter._runner.busy:
            return
        time.sleep(0.01)
    raise AssertionError("it still hangs")


def test_shutdown_does_not_wait_for_a_hanging_drafter(user, make_loop, request_of, drive):
    drafter = user("Hangs", timeout_s=0.05)
    drafting = Drafting(drafter, VOCAB)
    serve(make_loop(drafting=drafting), request_of, drive, "a")
    assert drafting.stats.faults >= 1
    done = threading.Thread(target=drafting.shutdown)
    done.start()
    done.join(30)
    assert not done.is_alive()
    drafter._drafter._drafter.gate.set()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no_such_module_at_all:X", "ModuleNotFoundError.*no_such_module_at_all.*PYTHONPATH"),
        ("broken_module:X", "ModuleNotFoundError.*nothing_of_this_name"),
        ("Missing", "no attribute 'Missing'"),
        ("constant", "expected a class, got 3"),
        ("Nothing", "neither `draft"),
        ("NoObserve", "lacks `observe`"),
        ("BadVerb", r"`propose\(batch\)` cannot be called as `propose\(batch, budgets\)`"),
        ("BadDraft", r"`draft\(token_ids\)` cannot be called as `draft\(token_ids, max_tokens\)`"),
        ("BadHook", r"`free\(\)` cannot be called as `free\(request_id\)`"),
    ],
)
def test_what_is_no_drafter_is_said_at_the_start(user, what, message):
    with pytest.raises(ConfigError, match=message) as caught:
        user(what)
    assert caught.value.field == "speculative_config.drafter"


def test_bad_options_name_the_options(user):
    with pytest.raises(ConfigError, match="disk on fire") as caught:
        user("Explodes")
    assert caught.value.field == "speculative_config.options"
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        user("Hooks", colour=1)


def test_the_path_has_a_form():
    with pytest.raises(ConfigError, match="drafter"):
        EngineConfig.load(
            {"model": "m", "speculative_config": {"decoding_type": "User", "drafter": "x.y"}}
        )


def test_the_example_in_the_docs_runs(tiny, tmp_path, monkeypatch):
    page = (Path(outrider.__file__).parent / "docs/drafters/user.md").read_text()
    source, section = (
        re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL).group(1) for kind in ("python", "yaml")
    )
    (tmp_path / "phrasebook.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    speculative = yaml.safe_load(section)["speculative_config"]
    speculative["timeout_s"] = 10  # a busy machine's pauses are no fault of its
    prompts = [*random_prompts(4, 96), [3, 11, 12]]
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9}):
        (plain,) = plain_outputs(tiny.target, prompts, sampling)
        # A phrase that does come up: what the model itself writes.
        speculative["options"] = {"phrases": [list(text) for text in plain.values()]}
        with engine_of(tiny.target, speculative) as engine:
            assert complete(engine, prompts, **sampling)[0] == plain
            stats = engine.stats()["drafters"]["phrasebook"]
            assert stats["faults"] == 0
            assert stats["num_acc_tokens"] > 10
    sys.modules.pop("phrasebook")


class Prepared:
    """TensorRT-LLM's kind of a drafter: it drafts what `Right` does, longer than is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None) -> None:
        resource_manager.calls.append("draft")
        for request in scheduled_requests.generation_requests:
            tokens = request.get_tokens(0)
            self.seen.append((request.request_id, request.py_num_accepted_draft_tokens))
            request.py_draft_tokens = continuation(tuple(tokens), 8)


class Manager:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_resources(self, batch) -> None:
        assert batch.batch_size == len(batch.all_requests())
        self.calls.append("prepare")

    def update_resources(self, batch) -> None:
        self.calls.append("update")

    def free_resources(self, request) -> None:
        self.calls.append(f"free {request.py_request_id}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_drafter_of_tensorrt_llms(make_loop, request_of, drive):
    """The object itself drafts, and its manager's hooks come in their order."""
    drafter, manager = Prepared(), Manager()
    config = outrider.UserProvidedDecodingConfig(
        max_draft_len=3, drafter=drafter, resource_manager=manager, timeout_s=60
    )
    assert (config.drafter, config.resource_manager) == (drafter, manager)
    drafting = Drafting(User(config), VOCAB)
    serve(make_loop(drafting=drafting), request_of, drive)
    stats = drafting.all_stats()["prepared"]
    assert stats.faults == 0
    assert stats.num_acc_tokens > 0
    assert {number for number, _ in drafter.seen} == {1, 2}
    assert max(accepted for _, accepted in drafter.seen) > 0
    steps = [each for each in manager.calls if each in ("prepare", "draft", "update")]
    assert steps[-3:] == ["prepare", "draft", "update"] or steps[-2:] == ["prepare", "update"]
    assert {"free 1", "free 2"} <= set(manager.calls)
    drafting.shutdown()
    assert manager.calls[-1] == "shutdown"


def test_an_object_drafts_in_an_engine(tiny):
    prompts = random_prompts(2, 96)
    (plain,) = plain_outputs(tiny.target, prompts, {"temperature": 0.9})
    texts = [list(text) for text in plain.values()]

    class Memory:
        def draft(self, token_ids, max_tokens):
            for text in texts:
                for known in range(min(len(text), len(token_ids)), 0, -1):
                    if token_ids[-known:] == text[:known]:
                        return text[known : known + max_tokens]
            return []

    section = {"decoding_type": "User_Provided", "drafter": Memory(), "timeout_s": 10}
    with engine_of(tiny.target, section) as engine:
        assert complete(engine, prompts, temperature=0.9)[0] == plain
        assert engine.stats()["drafters"]["memory"]["num_acc_tokens"] > 0


@pytest.mark.parametrize(
    ("keys", "field", "hint"),
    [
        ({"drafter": 3}, "drafter", "an object with draft or propose or prepare_draft_tokens"),
        ({"drafter": {"a": 1}}, "drafter", "expected an import path"),
        ({"drafter": "m:C", "resource_manager": "m:R"}, "resource_manager", "only Python can give"),
        ({"drafter": Prepared(), "options": {"a": 1}}, "options", "the drafter is an object"),
    ],
)
def test_what_is_no_object_of_a_drafter_is_named(keys, field, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        outrider.UserProvidedDecodingConfig(**keys)
    assert caught.value.field == field


def test_a_manager_belongs_to_tensorrt_llms_kind():
    class Draft:
        def draft(self, token_ids, max_tokens):
            return []

    config = UserConfig(drafter=Draft(), resource_manager=Manager())
    with pytest.raises(ConfigError, match="has no `prepare_draft_tokens`"):
        User(config)


def test_a_request_names_what_it_has(request_of):
    from outrider.drafters.user import LlmRequest

    request = LlmRequest(1, request_of("a", (1, 2), 3))
    assert (request.get_num_tokens(0), request.get_last_tokens(0)) == (2, 2)
    with pytest.raises(AttributeError, match="no 'py_nothing' here; there are .*py_draft_tokens"):
        _ = request.py_nothing


def test_what_is_written_of_an_object_is_no_path():
    given = UserConfig(drafter=Prepared()).model_dump(mode="json")
    assert given["drafter"].startswith("<")
    with pytest.raises(ConfigError, match="import path"):
        EngineConfig.load({"model": "m", "speculative_config": given})


def test_the_toy_language_is_what_the_modules_think():
    assert next_token((1, 2)) == continuation((1, 2), 1)[0]
