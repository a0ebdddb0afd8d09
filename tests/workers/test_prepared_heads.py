"""Separate heads that prepare the next round: the same tokens, and drafts from the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.config import Eagle3Config, EagleConfig, EngineConfig, MTPConfig
from outrider.drafters.heads.protocol import Verified
from outrider.drafters.protocol import Preparation
from outrider.errors import ConfigError
from outrider.scheduler.types import Draft, JoinedDrafts, Verdict, ints
from outrider.tests.helpers.head_files import eagle_tensors, write_eagle
from outrider.tests.helpers.heads.remote import plain, runner, separate, write_shapes
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.mtp import Made
from outrider.tests.helpers.ports import wait_for
from outrider.workers.collective import Collective
from outrider.workers.head import HeadService
from outrider.workers.model.target import load_model

SAMPLED = {"temperature": 0.8, "top_p": 0.9}
CACHE = {"outcomes": 12, "adaptive": False}
CHAINS = ["eagle1-chain", "eagle3-chain", "mtp"]
DEPTH, LONGEST = 3, 6


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> str:
    return write_guessable(tmp_path_factory.mktemp("six") / "target")


@pytest.fixture(scope="module")
def made(six, tmp_path_factory):
    """By shape: the target and the head's section."""
    return write_shapes(six, tmp_path_factory.mktemp("heads"))


@pytest.fixture
def run(monkeypatch):
    return runner(monkeypatch)


# -- what a head prepares, against what it drafts


class Round:
    """Two sequences after a step, the first with a tree of which a path was accepted."""

    def __init__(self, head, done: Verified) -> None:
        self.head, self.done = head, done

    @torch.inference_mode()
    def drafts(self) -> list[list[int]]:
        """Chains that the head drafts."""
        step = replace(self.done.step, max_nodes=ints([LONGEST, LONGEST]))
        hidden = tuple(self.done.hidden[layer] for layer in self.head.capture)
        found = self.head.run(step, self.done.verdict, hidden)
        assert not found.error
        return [found.tokens[a:b].tolist() for a, b in zip(found.start, found.start[1:])]

    def prepare(self, *chains: list[int], reach=(40, 40), num_outcomes=(90, 90), num_rows=None):
        """What is prepared: by sequence, accepted nodes and bonus token, the rank and the chain."""
        joined = JoinedDrafts(ints(sum(chains, [])), ints([len(chain) for chain in chains]))
        rates = np.full(LONGEST, 0.7, np.float32), np.full((2, 12), 0.1, np.float32)
        given = (DEPTH, ints(list(num_outcomes)), ints(list(reach)), *rates, True, None)
        preparation = Preparation(*given, num_rows if num_rows is None else ints(num_rows))
        drafted = self.head.prepare(self.done, joined, preparation)
        columns = drafted.outcomes.seqs, drafted.outcomes.num_accepted, drafted.outcomes.bonus
        keys = zip(*(each.tolist() for each in columns))
        bounds = zip(drafted.start, drafted.start[1:])
        return {
            key: (rank, drafted.tokens[begin:end].tolist())
            for key, rank, (begin, end) in zip(keys, drafted.outcomes.ranks.tolist(), bounds)
        }


def rows_of(head) -> torch.Tensor:
    """Keys and values of the head's layers, without those of drafts."""
    cache, first = head._cache, head.first_layer
    return torch.cat(
        [each[: cache.num_slots].flatten() for each in (*cache.keys[first:], *cache.values[first:])]
    )


def section_of(kind: str, six: str, folder: Path, **options):
    """The target of a head, and its section."""
    options |= {"max_draft_len": LONGEST, "placement": "separate"}
    options["speculation_cache"] = {"depth": DEPTH, "budget": 200}
    if kind.startswith("mtp"):
        target = Made(folder / "mtp", "llama", int(kind[-1])).folder
        return target, MTPConfig(speculative_model=target, **options)
    version = int(kind[-1])
    vocab = {} if version == 1 else {"draft_vocab": 80}
    head = write_eagle(folder / "head", *eagle_tensors(six, version, **vocab))
    return six, {1: EagleConfig, 3: Eagle3Config}[version](speculative_model=head, **options)


@pytest.fixture
def round_of(part, build_step):
    """`round_of(target, section, temperature)`: as in a head's own worker, over single slots."""

    @torch.inference_mode()
    def make(target: str, config, temperature: float, min_probs=None) -> Round:
        alone = Collective(0, 1, None)
        cpu = torch.device("cpu")
        model = load_model(Path(target), dtype=torch.float32, device=cpu, collective=alone)
        head = HeadService(config, model, Path(target), max_num_seqs=2)
        cache = model.new_cache(64, 1, head.kv_shapes)
        head.attach(cache)
        tables = list(range(20, 36)), list(range(40, 52))
        draft = Draft(ints([20, 21, 22, 23]), ints([-1, -1, 1, 2]))
        steps = (
            [part([7, 3, 50, 21, 9, 4], 0, tables[0]), part([11, 12, 13], 0, tables[1])],
            [part([5], 6, tables[0], draft=draft), part([6], 3, tables[1])],
        )
        verdicts = (
            Verdict(0, ints([5, 6]), ints([0, 1, 2]), ints([]), ints([0, 0, 0])),
            # nodes 1 and 2 of the first are accepted: they are not where the next step has them
            Verdict(0, ints([21, 22, 40, 41]), ints([0, 3, 4]), ints([1, 2]), ints([0, 2, 2])),
        )
        for parts, verdict in zip(steps, verdicts, strict=True):
            step = build_step(parts, 1)
            sampling = replace(
                step.sampling,
                temperature=np.full(2, temperature, np.float32),
                min_probs=min_probs and np.array(min_probs, np.float32),
            )
            step = replace(step, max_nodes=ints([0, 0]), sampling=sampling)
            hidden = model.forward_capturing(step, cache, head.capture)[1]
            assert not head.run(step, verdict, hidden).error
        return Round(head, Verified(step, verdict, dict(zip(head.capture, hidden, strict=True))))

    return make


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp1", "mtp3"])
def test_what_is_prepared_is_what_a_longer_draft_would_be(
    six, round_of, tmp_path, kind, temperature
):
    """Behind the whole chain the likeliest token is the next of the head's own chain."""
    round_ = round_of(*section_of(kind, six, tmp_path), temperature)
    chains, rows = round_.drafts(), rows_of(round_.head)
    assert [len(chain) for chain in chains] == [LONGEST, LONGEST]
    # Of three modules, the first predicts what follows a multiple of three.
    for length in (2,) if kind == "mtp3" else (0, 1, 2):
        found = round_.prepare(*(chain[:length] for chain in chains))
        for seq, chain in enumerate(chains):
            rank, prepared = found[seq, length, chain[length]]
            assert rank == 0
            assert prepared == chain[length + 1 :][:DEPTH]
    torch.testing.assert_close(rows_of(round_.head), rows)
    assert round_.drafts() == chains


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp1"])
def test_behind_other_tokens_it_is_what_would_follow_in_the_chain(
    six, round_of, tmp_path, kind, temperature
):
    """An outcome's tokens as the chain that is verified: its own outcomes go on alike."""
    round_ = round_of(*section_of(kind, six, tmp_path), temperature)
    chains = [chain[:2] for chain in round_.drafts()]
    found = round_.prepare(*chains)
    assert {key[:2] for key in found} == {(seq, place) for seq in (0, 1) for place in (0, 1, 2)}
    for seq, num_accepted, bonus in list(found)[::7]:
        prepared = found[seq, num_accepted, bonus][1]
        other = [*chains]
        other[seq] = [*chains[seq][:num_accepted], bonus, *prepared[:-1]]
        place = len(other[seq])
        again = round_.prepare(*other)
        assert again[seq, place, prepared[-1]][0] == 0
        other[seq] = other[seq][: num_accepted + 1]
        rank, rest = round_.prepare(*other)[seq, num_accepted + 1, prepared[0]]
        assert rank == 0
        assert rest[:-1] == prepared[1:]


def test_how_much_is_prepared(six, round_of, tmp_path):
    round_ = round_of(*section_of("eagle3", six, tmp_path), 0.0)
    chains = [chain[:2] for chain in round_.drafts()]
    whole = round_.prepare(*chains)
    for key, (_, chain) in round_.prepare(*chains, reach=(3, 40)).items():
        # a sequence that may have three more tokens
        most = 3 - key[1] - 1 if key[0] == 0 else DEPTH
        assert chain == whole[key][1][:most]
    few = round_.prepare(*chains, num_rows=(10, 3))
    assert len({len(chain) for _, chain in few.values()}) > 1
    for seq, most in ((0, 10), (1, 3)):
        parts = {key: chain for key, (_, chain) in few.items() if key[0] == seq}
        assert sum(map(len, parts.values())) == most
        assert all(chain == whole[key][1][: len(chain)] for key, chain in parts.items())
    assert {key[0] for key in round_.prepare(*chains, num_outcomes=(0, 5))} == {1}
    assert round_.prepare(*chains, num_outcomes=(0, 0)) == {}


def test_what_is_prepared_ends_where_the_head_is_unsure(six, round_of, tmp_path):
    config = section_of("eagle3", six, tmp_path)
    chains = [chain[:2] for chain in round_of(*config, 0.0).drafts()]
    whole = round_of(*config, 0.0).prepare(*chains)
    lens = set()
    for least in (0.08, 0.12, 0.2, 0.3):
        cut = round_of(*config, 0.0, min_probs=[least, 1.0]).prepare(*chains)
        assert cut.keys() == whole.keys()
        assert all(not chain for (seq, *_), (_, chain) in cut.items() if seq == 1)
        assert all(chain == whole[key][1][: len(chain)] for key, (_, chain) in cut.items())
        lens.update(len(chain) for (seq, *_), (_, chain) in cut.items() if seq == 0)
    assert len(lens) > 2


# -- engines


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", CHAINS)
def test_the_plain_tokens_with_prepared_drafts(made, run, shape, sampling):
    """One at a time or eight, with preemption and prefix hits."""
    target, section = made[shape]
    for at_once, on_miss in ((1, "draft"), (8, "draft"), (8, "none"), (8, "auto")):
        wanted = separate(section, speculation_cache={**CACHE, "on_miss": on_miss})
        seen = run(target, wanted, sampling=sampling, at_once=at_once)
        assert seen.outputs.items() <= plain(target, **sampling).items()
        assert seen.drafter["faults"] == 0
        cache = seen.drafter["speculation_cache"]
        assert cache["num_hits"] > 0.15 * cache["num_lookups"]
        assert cache["num_used_tokens"] > 0
        assert cache["num_lookups"] == sum(
            cache[f"num_{kind}"] for kind in ("hits", "unprepared", "stale", "absent")
        )
        assert (cache["num_waited_drafts"] > 0) == (on_miss != "none")


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_see_tokens_that_depend_on_the_text_alone(made, run, rule):
    """Greedy: these rules then emit the target's own tokens."""
    target, section = made["eagle3-chain"]
    wanted = separate(section, speculation_cache=CACHE, verification=rule)
    seen = run(target, wanted)
    assert seen.outputs == plain(target)
    assert seen.drafter["speculation_cache"]["num_hits"] > 0
    assert seen.drafter["faults"] == 0


def test_a_dead_head_costs_its_drafts_and_comes_back(made, run):
    target, section = made["eagle3-chain"]
    before = []

    def strike(engine, count):
        group = engine._drafting.drafter._model._group
        if count == 20:
            group.shutdown()
        if count == 60:  # it was missed long since
            wait_for(lambda: group.alive)
            (drafter,) = engine.stats()["drafters"].values()
            before.append(drafter["speculation_cache"]["num_hits"])

    seen = run(target, separate(section, speculation_cache=CACHE), strike=strike)
    assert seen.outputs == plain(target)
    assert seen.drafter["faults"] == 1
    assert seen.drafter["speculation_cache"]["num_hits"] > before[0] + 5


def test_what_cannot_be_prepared_is_refused():
    tree_ = {"decoding_type": "Eagle3", "use_dynamic_tree": True}
    for wrong, message in (
        ({"placement": "colocated"}, "speculation_cache belongs to placement 'separate'"),
        ({"speculation_cache": {"depth": 9}}, r"speculation_cache\.depth \(9\) must not exceed"),
        (tree_, "speculation_cache prepares chains"),
        ({"eagle_choices": [[0], [0, 0]]}, "speculation_cache prepares chains"),
        ({"decoding_type": "PEagle"}, "speculation_cache needs a head that reads its own output"),
        ({"decoding_type": "Medusa"}, "speculation_cache"),
    ):
        section = {"decoding_type": "Eagle", "speculative_model": "head", "placement": "separate"}
        section |= {"speculation_cache": {}, **wrong}
        with pytest.raises(ConfigError, match=message):
            EngineConfig.load({"model": "m", "speculative_config": section})
