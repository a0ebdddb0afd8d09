"""What steps cost is measured at a start; what draft lengths have learned outlives an engine, in a
file that may be missing or damaged.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest

from outrider.config import EngineConfig
from outrider.config.section import MEASURE_S, seconds_to_measure
from outrider.drafters.drafting import Drafting
from outrider.engine import known_lengths
from outrider.engine.preflight import preflight
from outrider.errors import ConfigError, StepMemoryError
from outrider.scheduler.loop import Loop
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.step_costs import lengths_of
from outrider.workers.group import LocalGroup

from ..helpers.engines import complete, engine_of, random_prompts

LOGGER = known_lengths.log.name
PROMPTS = random_prompts(3, 24)
SECTION = {"decoding_type": "NGram", "max_draft_len": 4, "adaptive_draft_len": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(known_lengths.FOLDER, str(tmp_path / "kept"))
    monkeypatch.setattr(known_lengths, "_LEAST_NEW", 0)
    return tmp_path / "kept"


def run(target, section=SECTION):
    """Tokens of a run, and what its engine knew before it."""
    with engine_of(target, section) as engine:
        known = deepcopy(engine._loop.scheduler.budget.knowledge())
        return complete(engine, PROMPTS, at_once=3)[0], known


def test_the_next_engine_begins_with_it(tiny, folder):
    tokens, before = run(tiny.target)
    (file,) = folder.iterdir()
    again, known = run(tiny.target)
    assert again == tokens
    assert (known.accepted != before.accepted).any()
    run(tiny.target, {**SECTION, "max_draft_len": 3})
    assert len(list(folder.iterdir())) == 2  # what was learned with other drafters is kept apart
    assert file.exists()


def changed(data, at=40):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:200],
    "longer": lambda data: data + b"x",
    "changed": changed,
    "digest": lambda data: changed(data, 0),
    "foreign": lambda data: b"\x93NUMPY" + bytes(len(data) - 6),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored(tiny, folder, caplog, damage):
    tokens, before = run(tiny.target)
    (file,) = folder.iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    again, known = run(tiny.target)
    assert again == tokens
    assert all((one == two).all() for one, two in zip(known, before, strict=True))
    assert [each.name for each in caplog.records if "anew" in each.message] == [LOGGER]
    run(tiny.target)
    assert (run(tiny.target)[1].accepted != before.accepted).any()  # it was written again


def test_a_file_of_another_kind_of_engine_is_ignored(tiny, folder):
    before = run(tiny.target)[1]
    (file,) = folder.iterdir()
    run(tiny.target, {**SECTION, "max_matching_ngram_size": 3})
    (other,) = set(folder.iterdir()) - {file}
    assert other.stat().st_size == file.stat().st_size
    other.replace(file)
    assert (run(tiny.target)[1].accepted == before.accepted).all()


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_cannot_be_written_is_no_error(tiny, folder, caplog, is_folder):
    """Neither a file in the folder's place, nor a folder in the file's."""
    if is_folder:
        tokens = run(tiny.target)[0]
        (file,) = folder.iterdir()
        file.unlink()
        (file / "occupied").mkdir(parents=True)
    else:
        folder.write_text("a file")
        tokens = run(tiny.target)[0]
    caplog.clear()
    again, _ = run(tiny.target)
    assert again == tokens
    assert len([each for each in caplog.records if "not kept" in each.message]) == 1
    if is_folder:
        assert list(folder.iterdir()) == [file]  # no partial file is left


def test_nothing_is_kept_where_lengths_are_fixed_or_no_folder_is_wanted(tiny, folder, monkeypatch):
    run(tiny.target, {**SECTION, "adaptive_draft_len": False})
    assert not folder.exists()
    monkeypatch.setenv(known_lengths.FOLDER, "")
    run(tiny.target)
    assert not folder.exists()


DRAFT = {"decoding_type": "DraftTarget", "max_draft_len": 3}
SECTIONS = {
    "chain": SECTION,
    "tree": {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 8},
    "both": {"decoding_type": "Compose", "members": [{"decoding_type": "NGram"}, DRAFT]},
    "draft model": DRAFT,
    "prepared": {**DRAFT, "speculation_cache": {}},
}


def costs_of(engine):
    return engine._loop.scheduler.budget._lengths._costs


@pytest.mark.parametrize(
    ("name", "overlaps"), [(name, number % 2 == 0) for number, name in enumerate(SECTIONS)]
)
def test_what_steps_cost_is_measured_before_the_first_request(tiny, monkeypatch, name, overlaps):
    """And nothing of it is left: neither in tokens, nor in counts, nor in what look-ups know.

    Here a prompt's token takes 3 ms longer where its request drafts, as far as that is measured.
    """
    begin_ms = known_lengths._Crowd._begin_ms

    def slower(self, num_prompt, length):
        begin_ms(self, num_prompt, length)
        return 100.0 + (5.0 if length else 2.0) * num_prompt

    monkeypatch.setattr(known_lengths._Crowd, "_begin_ms", slower)
    monkeypatch.setattr(LocalGroup, "is_concurrent", overlaps)
    section = {**SECTIONS[name], "adaptive_draft_len": True}
    for each in (section, *section.get("members", ())):
        if each["decoding_type"] == "DraftTarget":
            each["speculative_model"] = tiny.draft
    with engine_of(tiny.target, section, max_num_seqs=8) as engine:
        assert not costs_of(engine).num_lessons
        wanted = complete(engine, PROMPTS, at_once=3)[0]
    monkeypatch.setenv(MEASURE_S, "60")
    with engine_of(tiny.target, section, max_num_seqs=8) as engine:
        found = costs_of(engine).stats()
        assert costs_of(engine).num_lessons >= 4 * 4  # requests, lengths
        most = engine._loop.scheduler.budget.max_draft_len
        assert list(found["8"]) == [str(each) for each in lengths_of(most)]
        assert all(0 < each < 1e4 for row in found.values() for each in row.values())
        opening_ms = engine._loop.scheduler.budget.knowledge().opening[0]
        assert opening_ms == 3.0 if name in ("draft model", "prepared") else opening_ms == 0.0
        stats = engine.stats()
        assert stats["steps"]["num_steps"] == stats["requests"]["num_prompt_tokens"] == 0
        assert not any(any(each["num_calls"]) for each in stats["drafters"].values())
        caches = [each["speculation_cache"] or {} for each in stats["drafters"].values()]
        assert not any(any(each.values()) for each in caches)
        assert any(caches) == ("speculation_cache" in section)
        assert complete(engine, PROMPTS, at_once=3)[0] == wanted


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_start_whose_measuring_fails_serves_all_the_same(tiny, monkeypatch, caplog, overlaps):
    """And its drafter closes what it opened."""
    monkeypatch.setenv(MEASURE_S, "60")
    monkeypatch.setattr(LocalGroup, "is_concurrent", overlaps)
    section = {**DRAFT, "speculative_model": tiny.draft, "adaptive_draft_len": True}
    wanted = run(tiny.target, section)[0]
    opened, steps = set(), []
    add, close, plan = Loop.add, Drafting.close, Scheduler.schedule
    monkeypatch.setattr(Loop, "add", lambda self, each: opened.add(each.id) or add(self, each))

    def note_and_close(self, names):
        opened.difference_update(names)
        close(self, names)

    def fails_late(self):
        steps.append(None)
        if len(steps) == 20:
            raise StepMemoryError("out of memory")
        return plan(self)

    monkeypatch.setattr(Drafting, "close", note_and_close)
    monkeypatch.setattr(Scheduler, "schedule", fails_late)
    assert run(tiny.target, section)[0] == wanted
    assert "what steps cost is assumed" in caplog.text
    assert not opened


def test_a_start_measures_no_longer_than_it_may(tiny, monkeypatch):
    """However long steps take: here a second each, by the measuring's clock."""
    monkeypatch.setenv(MEASURE_S, "3")
    ticks = iter(range(1_000_000))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(known_lengths, "time", clock)
    begun = []
    step = Loop.step
    monkeypatch.setattr(Loop, "step", lambda self: begun.append(1) or step(self))
    with engine_of(tiny.target, SECTION) as engine:
        assert len(begun) <= 10
        assert engine.stats()["steps"]["num_steps"] == 0
    assert next(ticks) < 60


def test_a_model_without_room_for_made_up_requests_is_served(tiny, monkeypatch):
    monkeypatch.setenv(MEASURE_S, "60")
    with engine_of(tiny.target, SECTION, num_kv_blocks=2, max_model_len=16) as engine:
        assert not costs_of(engine).num_lessons
        assert complete(engine, [[3, 4, 5]], max_tokens=4)[0]


@pytest.mark.parametrize(("given", "seconds"), [("0.5", 0.5), ("0", 0.0), ("", 2.0)])
def test_seconds_to_measure(monkeypatch, given, seconds):
    monkeypatch.setenv(MEASURE_S, given)
    assert seconds_to_measure() == seconds


@pytest.mark.parametrize("given", ["-1", "x", "nan", "inf", "1e9"])
def test_what_is_no_time_to_measure(tiny, monkeypatch, given):
    monkeypatch.setenv(MEASURE_S, given)
    message = f"{MEASURE_S}: '{given}' is no number of seconds"
    with pytest.raises(ConfigError, match=message):
        run(tiny.target)
    with pytest.raises(ConfigError, match=message):
        preflight(EngineConfig.load({"model": tiny.target, "executor": "local"}))
