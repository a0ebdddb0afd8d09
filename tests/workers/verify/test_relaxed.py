"""Relaxed acceptance: its criterion at every node, the phase of every node, greedy without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.config import EngineConfig, NGramConfig, parse
from outrider.engine.preflight import check_thinking_tokens
from outrider.errors import ConfigError
from outrider.scheduler import tree
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Draft, Verdict, ints
from outrider.tests.helpers.verification import make_step, paths, sampling_rows
from outrider.workers.verify import make_rule, verify

VOCAB, BEGIN, END = 12, 10, 11
RULE = {"topk": 3, "delta": 0.2, "begin": BEGIN, "end": END}
SECTION = {
    "decoding_type": "NGram",
    "verification": "relaxed",
    "lossy": True,
    "relaxed_topk": 3,
    "relaxed_delta": 0.2,
    "begin_thinking_phase_token": BEGIN,
    "end_thinking_phase_token": END,
}


def random_draft(rng: np.random.Generator, num_nodes: int, chain: bool) -> Draft:
    parents: list[int] = []
    tokens: list[int] = []
    while len(tokens) < num_nodes:
        parent = len(tokens) - 1 if chain else int(rng.integers(-1, len(tokens)))
        token = int(rng.integers(VOCAB))
        if (parent, token) not in set(zip(parents, tokens)):
            parents.append(parent)
            tokens.append(token)
    return Draft(ints(tokens), ints(parents))


def reference(draft, logits, own, temperature, top_k, thinking) -> list[int]:
    """The path that the rule accepts, by looking at every path on its own."""
    limits = (logits.double() / (temperature or 1.0)).clone()
    if temperature and top_k:
        for row in limits:
            row[row < row.sort(descending=True).values[top_k - 1]] = -torch.inf
    probs = limits.softmax(1).numpy()
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for path in paths(draft):
        state, row, score = thinking, 0, 0.0
        for node in path:
            token = int(draft.tokens[node])
            chance = probs[row, token]
            ranked = sorted(probs[row], reverse=True)
            near = 0 < chance >= ranked[0] - RULE["delta"] and chance >= ranked[RULE["topk"] - 1]
            if token != own[row] and not (state and near):
                break
            score += float(np.log(chance))
            state = token == BEGIN or (state and token != END)
            row = node + 1
        else:
            if (len(path), score) > best[:2] or not best[2]:
                best = (len(path), score, path)
    return best[2]


@pytest.mark.parametrize("chain", [True, False])
def test_the_accepted_path_by_brute_force(chain):
    rng = np.random.default_rng(4)
    num_accepted, num_relaxed = 0, 0
    for trial in range(120):
        draft = random_draft(rng, 7, chain)
        temperature, top_k = float(rng.choice([0.0, 0.7, 1.0])), int(rng.choice([0, 2, 5]))
        thinking = bool(rng.random() < 0.6)
        logits = torch.from_numpy(rng.standard_normal((8, VOCAB), dtype=np.float32) * 0.7)
        for node, parent in enumerate(draft.parents.tolist()):  # let paths be long, marks common
            if rng.random() < 0.6:
                logits[parent + 1, draft.tokens[node]] = logits[parent + 1].max() + 0.1
        settings = {"temperature": temperature, "top_k": top_k, "seeds": [trial]}
        step = make_step([draft], sampling_rows(1, **settings, thinking=np.array([thinking])))
        result = verify(make_rule("relaxed", **RULE), step, logits)
        own = [
            int(verify(make_rule("coupled"), at, logits[row : row + 1]).emitted[0])
            for row, at in enumerate(_alone(draft, settings))
        ]
        wanted = reference(draft, logits, own, temperature, top_k, thinking)
        assert result.nodes(0).tolist() == wanted
        assert result.tokens(0)[:-1].tolist() == draft.tokens[wanted].tolist()
        assert result.tokens(0)[-1] == own[wanted[-1] + 1 if wanted else 0]
        num_accepted += len(wanted)
        plain = verify(make_rule("coupled"), step, logits)
        num_relaxed += result.nodes(0).tolist() != plain.nodes(0).tolist()
        assert len(result.nodes(0)) >= len(plain.nodes(0))
        if not thinking and BEGIN not in draft.tokens:
            assert result.tokens(0).tolist() == plain.tokens(0).tolist()
    assert num_accepted > 120
    assert num_relaxed > 20


def _alone(draft: Draft, settings: dict):
    """Steps without a draft whose root stands where each of the draft's rows does."""
    depths = [0, *tree.depths(draft.parents).tolist()]
    return [make_step([tree.EMPTY], sampling_rows(1, **settings), depth + 1) for depth in depths]


def test_delta_0_and_topk_1_are_greedy_up_to_ties():
    rng = np.random.default_rng(2)
    for trial in range(30):
        drafts = [random_draft(rng, 6, chain=trial % 2 == 0) for _ in range(2)]
        logits = torch.from_numpy(rng.integers(0, 4, (14, VOCAB)).astype(np.float32))  # with ties
        sampling = sampling_rows(2, temperature=[0.0, 0.9], thinking=np.array([True, True]))
        step = make_step(drafts, sampling)
        plain = verify(make_rule("coupled"), step, logits)
        for changed in ({"delta": 0.0}, {"topk": 1}):
            result = verify(make_rule("relaxed", **{**RULE, **changed}), step, logits)
            assert result.emitted.tolist() == plain.emitted.tolist()


def test_the_phase_changes_inside_a_draft_and_the_batch_is_mixed():
    """Second best tokens all along: accepted only where the parent is in the phase."""

    def accepted(tokens: list[int], thinking: bool) -> int:
        rows = torch.zeros(len(tokens) + 1, VOCAB)
        rows[:, 1] = 2.0
        for row, token in enumerate(tokens):
            rows[row, token] = 2.5 if token == BEGIN else max(1.95, float(rows[row, token]))
        sampling = sampling_rows(1, thinking=np.array([thinking]))
        step = make_step([tree.chain(tokens, "t")], sampling)
        return len(verify(make_rule("relaxed", **RULE), step, rows).path)

    assert accepted([2, 3, 4], thinking=True) == 3
    assert accepted([2, 3, 4], thinking=False) == 0
    assert accepted([1, 2], thinking=False) == 1
    assert accepted([BEGIN, 2, 3], thinking=False) == 3  # it begins to think in the draft
    assert accepted([2, END, 3, 4], thinking=True) == 2  # and ends
    assert accepted([2, END, BEGIN, 4], thinking=True) == 4
    assert accepted([1, 1, 3], thinking=False) == 2


# -- the phase of a sequence, from its tokens


def thinking_after(tokens: list[int]) -> bool:
    marks = [token for token in tokens if token in (BEGIN, END)]
    return bool(marks) and marks[-1] == BEGIN


def test_the_phase_follows_what_is_committed_preempted_and_replayed(request_of):
    rng = np.random.default_rng(6)
    config = EngineConfig.load(
        {"model": "m", "block_size": 4, "max_num_seqs": 3, "speculative_config": SECTION}
    )
    scheduler = Scheduler(config, num_blocks=30, max_model_len=60)
    tokens = {str(index): rng.integers(6, VOCAB, 5).tolist() for index in range(4)}
    for name, prompt in tokens.items():
        scheduler.add(request_of(name, tuple(prompt), max_tokens=30))
    seen = set()
    for step in range(200):
        if not scheduler.has_work:
            break
        if step % 7 == 6:
            scheduler.requeue_all()  # as after a death of the workers
        batch = scheduler.schedule()
        phases = batch.plan.thinking
        assert phases.tolist() == [thinking_after(tokens[name]) for name in batch.request_ids]
        seen |= set(phases.tolist())
        emitted = [rng.integers(6, VOCAB, 1 + step % 3) for _ in batch.request_ids]
        drafts = [
            tree.truncate(tree.chain(new[:-1], "t"), int(room))
            for new, room in zip(emitted, batch.max_nodes)
        ]
        emitted = [new[: draft.num_nodes + 1] for new, draft in zip(emitted, drafts)]
        for delta in scheduler.commit(batch, drafts, accepting(batch.step, emitted)):
            tokens[delta.request_id] += delta.token_ids
    assert seen == {False, True}
    again = request_of("a", (1, BEGIN, 2), emitted=ints([END, 3, BEGIN]))  # replayed elsewhere
    scheduler.add(again)
    scheduler.add(request_of("b", (1, BEGIN, 2), emitted=ints([END])))
    assert scheduler.schedule().plan.thinking.tolist() == [True, False]


def accepting(step: int, emitted: list[np.ndarray]) -> Verdict:
    starts = np.concatenate([[0], np.cumsum([len(new) for new in emitted])])
    path = [np.arange(len(new) - 1) for new in emitted]
    ends = np.concatenate([[0], np.cumsum([len(nodes) for nodes in path])])
    return Verdict(
        step, ints(np.concatenate(emitted)), ints(starts), ints(np.concatenate(path)), ints(ends)
    )


def test_other_rules_ship_no_phase(request_of):
    scheduler = Scheduler(EngineConfig.load({"model": "m"}), 8, 64)
    scheduler.add(request_of("a", (BEGIN,)))
    assert scheduler.schedule().plan.thinking is None


# -- configuration


def test_it_is_asked_for_by_name():
    config = EngineConfig.load({"model": "m", "speculative_config": SECTION}).speculative_config
    assert make_rule("relaxed", **dict(config.rule_parameters)) == make_rule("relaxed", **RULE)
    assert parse(NGramConfig, config.model_dump()) == config
    theirs = {
        "decoding_type": "NGram",
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": 10,
        "relaxed_delta": 0.6,
    }
    config = EngineConfig.load({"model": "m", "speculative_config": theirs}).speculative_config
    assert (config.verification, config.lossy) == ("relaxed", True)
    assert config.thinking_tokens == (128798, 128799)
    off = {"decoding_type": "NGram", "use_relaxed_acceptance_for_thinking": False}
    config = EngineConfig.load({"model": "m", "speculative_config": off}).speculative_config
    assert config == NGramConfig()
    block = {"decoding_type": "NGram", "rejection_sample_method": "block"}
    config = EngineConfig.load({"model": "m", "speculative_config": block}).speculative_config
    assert (config.verification, config.lossy) == ("block", False)
    joint = {**theirs, "decoding_type": "Compose", "members": [{"decoding_type": "NGram"}]}
    config = EngineConfig.load({"model": "m", "speculative_config": joint}).speculative_config
    assert config.members[0].rule_parameters == config.rule_parameters


SWITCH = "use_relaxed_acceptance_for_thinking"
NGRAM = {"decoding_type": "NGram"}
BAD = [
    ({**NGRAM, "verification": "relaxed"}, "lossy"),
    ({**NGRAM, "lossy": True}, "lossy"),
    ({**NGRAM, SWITCH: True, "lossy": False}, "lossy"),
    ({**NGRAM, SWITCH: True, "verification": "block"}, "verification: given twice"),
    ({**NGRAM, SWITCH: 3}, "allowed: true, false"),
    ({**NGRAM, "relaxed_delta": 0.5}, "relaxed_delta belongs to verification 'relaxed'"),
    ({**NGRAM, SWITCH: True, "posterior_alpha": 1}, "posterior_alpha belongs to"),
    ({**NGRAM, SWITCH: True, "relaxed_delta": -1}, "relaxed_delta"),
    ({**NGRAM, SWITCH: True, "relaxed_topk": 0}, "relaxed_topk"),
    ({**SECTION, "end_thinking_phase_token": BEGIN}, "the same token"),
    (
        {**SECTION, "decoding_type": "Compose", "members": [{**NGRAM, "relaxed_topk": 5}]},
        "hold for all members",
    ),
]


@pytest.mark.parametrize(("section", "words"), BAD)
def test_refusals(section, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.load({"model": "m", "speculative_config": section})


def test_its_tokens_must_be_the_targets():
    config = EngineConfig.load({"model": "m", "speculative_config": SECTION})
    check_thinking_tokens(config, VOCAB)
    with pytest.raises(ConfigError, match="vocabulary of 11") as caught:
        check_thinking_tokens(config, VOCAB - 1)
    assert caught.value.field == "speculative_config.end_thinking_phase_token"
    check_thinking_tokens(EngineConfig.load({"model": "m", "speculative_config": NGRAM}), VOCAB)
