"""Suffix decoding against counting strings in lists; bounds; tenants."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from outrider.drafters.lookup.kernels import suffix as loops
from outrider.drafters.lookup.suffix import SuffixIndex
from outrider.scheduler.types import SpeculationOptions
from outrider.tests.helpers import lookups
from outrider.tests.helpers.lookups import (
    TextOracle,
    drafter_of,
    growing,
    observe,
    propose,
    request_of,
    walk,
)


def ends(texts, string):
    """Where `string` ends, over all texts, as one running number; in order."""
    found, offset = [], 0
    for text in texts:
        for end in range(len(string), len(text) + 1):
            if text[end - len(string) : end] == string:
                found.append(offset + end)
        offset += len(text) + 1
    return found


class SlowSuffix(TextOracle):
    def __init__(self, past, corpus, *, depth, factor, min_prob, shape, vocab) -> None:
        super().__init__()
        self.past, self.corpus, self.depth, self.factor = past, corpus, depth, factor
        self.min_prob, self.shape, self.vocab = min_prob, shape, vocab

    def one(self, name, tokens, budget):
        best = (0.0, [], [])
        for texts in ([tokens], self.past, self.corpus):
            for size in range(min(self.depth - 1, len(tokens)), 0, -1):
                total = len(ends(texts, tokens[-size:]))
                limit = min(budget, int(size * self.factor + 1e-6), self.depth - size)
                if total <= 0 or limit <= 0:
                    continue
                grow = self.tree if self.shape == "tree" else self.chain
                found = grow(texts, tokens[-size:], total, limit)
                if found[0] > best[0]:
                    best = found
        return best[1] if self.shape == "chain" else list(zip(best[1], best[2]))

    def chain(self, texts, tail, total, limit):
        prob, score, chain = 1.0, 0.0, []
        while len(chain) < limit:
            seen = {t: ends(texts, [*tail, t]) for t in range(self.vocab)}
            token = max(seen, key=lambda t: (len(seen[t]), seen[t][-1:]))
            if not seen[token]:
                break
            prob *= len(seen[token]) / total
            if prob < self.min_prob:
                break
            total = len(seen[token])
            score += prob
            chain.append(token)
            tail = [*tail, token]
        return score, chain, []

    def tree(self, texts, tail, total, limit):
        score, tokens, parents = 0.0, [], []
        open_nodes = [(-1, tail, 1.0, total)]
        offers = []
        while len(tokens) < limit:
            for parent, path, prob, count in open_nodes:
                for token in range(self.vocab):
                    places = ends(texts, [*path, token])
                    share = prob * (len(places) / count)
                    if share >= self.min_prob and share > 0:
                        offers.append((-share, parent, -places[-1], [*path, token]))
            if not offers:
                break
            offers.sort(key=lambda offer: offer[:3])
            negative, parent, _, path = offers.pop(0)
            score -= negative
            tokens.append(path[-1])
            parents.append(parent)
            open_nodes = [(len(tokens) - 1, path, -negative, len(ends(texts, path)))]
        return score, tokens, parents


def shaped(draft):
    return list(zip(draft.tokens.tolist(), draft.parents.tolist()))


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(
    ("depth", "factor", "min_prob"), [(6, 1.0, 0.1), (9, 2.5, 0.3), (24, 1.0, 0.0), (3, 0.7, 0.1)]
)
@pytest.mark.parametrize(
    ("with_past", "with_corpus"), [(False, False), (True, False), (True, True)]
)
def test_against_counting(
    shape, depth, factor, min_prob, with_past, with_corpus, monkeypatch, tmp_path
):
    vocab, rng = 4, random.Random(depth)
    past = [growing(rng, [], 25, vocab) for _ in range(3)] if with_past else []
    corpus = [growing(rng, [], 30, vocab) for _ in range(2)] if with_corpus else []

    def primed(section, vocab_size):
        drafter = drafter_of(section, vocab_size)
        for index, text in enumerate(past):
            drafter.open([request_of(f"past {index}", [])])
            drafter._memories[f"past {index}"].learn(text)
            drafter.close([f"past {index}"])
        drafter.work(10_000)
        return drafter

    monkeypatch.setattr(lookups, "drafter_of", primed)
    section = {
        "decoding_type": "Suffix", "max_tree_depth": depth, "max_spec_factor": factor,
        "min_token_prob": min_prob, "shape": shape, "corpora": written(tmp_path, corpus),
    }  # fmt: skip
    oracle = SlowSuffix(
        past, corpus, depth=depth, factor=factor, min_prob=min_prob, shape=shape, vocab=vocab
    )
    count = walk(
        section, oracle, seed=depth, vocab=vocab, prompt_len=20, steps=12, num_requests=2,
        **({"shaped": shaped} if shape == "tree" else {}),
    )  # fmt: skip
    assert count > 10


def written(folder, corpus):
    """Corpora of token ids, a file each."""
    paths = [folder / f"{index}.jsonl" for index in range(len(corpus))]
    for path, text in zip(paths, corpus, strict=True):
        path.write_text("\n" + json.dumps({"tokens": text}) + "\n")
    return list(map(str, paths))


def test_a_match_seen_once_is_half_likely():
    """The end of the text is an occurrence too, of which nobody knows what follows."""
    text = [9, 1, 2, 3, 4, 5, 1, 2]
    for least, drafted in ((0.5, [3, 4]), (0.51, [])):
        drafter = drafter_of({"decoding_type": "Suffix", "min_token_prob": least})
        drafter.open([request_of("a", text)])
        assert propose(drafter, ["a"], [8])[0].tokens.tolist() == drafted


def test_of_equals_a_tree_takes_the_one_seen_last():
    drafter = drafter_of({"decoding_type": "Suffix", "shape": "tree"})
    drafter.open([request_of("a", [1, 5, 1, 7, 1, 6, 1])])
    assert propose(drafter, ["a"], [1])[0].tokens.tolist() == [6]


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


def column(index, state, name):
    return index.nodes[state, getattr(loops, name)]


def after(index, state, token):
    return loops.after(index.nodes, index.edges, state, token)


def repeats(index, texts, strings, vocab):
    """How often each string occurred, and what most often followed it, by the index."""
    for string in strings:
        state = 0
        for token in string:
            state = after(index, state, token)
            if state < 0:
                break
        seen = ends(texts, string)
        assert (column(index, state, "COUNT") if state > 0 else 0) == len(seen)
        if state > 0 and len(string) < index.max_depth:
            follow = {token: ends(texts, [*string, token]) for token in range(vocab)}
            likeliest = max(follow, key=lambda t: (len(follow[t]), follow[t][-1:]))
            likeliest = likeliest if follow[likeliest] else -1
            assert column(index, state, "BEST") == likeliest
            assert column(index, state, "AFTER") == after(index, state, likeliest)
            edge, degree = column(index, state, "LAST"), sum(map(bool, follow.values()))
            assert column(index, state, "DEGREE") == (degree if degree > 1 else 0)
            listed = set()
            for _ in range(degree if degree > 1 else 0):
                edge = index.edges[0][edge, loops.NEXT]
                listed.add(int(index.edges[0][edge, loops.TOKEN]))
            assert listed == ({t for t in follow if follow[t]} if degree > 1 else set())
            assert edge == column(index, state, "LAST")


@pytest.mark.parametrize("num_texts", [1, 3])
@pytest.mark.parametrize("depth", [2, 3, 5, 9])
def test_the_index_counts(num_texts, depth):
    rng = random.Random(num_texts)
    for vocab in (1, 2, 5, 60):
        index, texts, strings = SuffixIndex(depth), [], []
        for _ in range(num_texts):
            text, cut = growing(rng, [], 40, vocab), rng.randrange(40)
            texts.append(text)
            index.extend(ids(text[:cut]))
            index.extend(ids(text[cut:]))
            index.begin_text()
        for _ in range(200):
            begin, size = rng.randrange(40), rng.randrange(1, depth + 1)
            strings.append(rng.choice(texts)[begin : begin + size])
            if rng.random() < 0.3:
                strings[-1][-1] = rng.randrange(vocab)
        repeats(index, texts, strings, vocab)


def test_a_match_is_followed_as_the_text_grows():
    rng, depth, vocab = random.Random(3), 5, 3
    index, text, read = SuffixIndex(depth), [], []
    matches = np.zeros((2, 2), dtype=np.int32)
    for _ in range(60):
        more = [rng.randrange(vocab) for _ in range(rng.randrange(4))]
        index.extend(ids(more))
        text += more
        read += [rng.randrange(vocab) for _ in range(rng.randrange(4))]
        matches[1] = 0
        index.follow(matches, 1, ids(read))
        known = [size for size in range(depth) if not size or ends([text], read[-size:])]
        assert matches[1, 1] == max(size for size in known if size <= len(read))
        if matches[1, 1]:
            state, size = matches[1]
            assert column(index, state, "COUNT") == len(ends([text], read[-size:]))


def test_text_that_repeats_makes_no_states():
    index = SuffixIndex(24)
    index.extend(ids([7] * 20_000))
    assert index.walk[loops.NUM_STATES] == 25
    longest = index.walk[loops.SUFFIXES + 1]
    assert (column(index, longest, "LENGTH"), column(index, longest, "COUNT")) == (23, 20_000 - 22)
    phrase = list(range(60))
    index = SuffixIndex(24)
    index.extend(ids(phrase * 2))
    known = index.walk[loops.NUM_STATES]
    index.extend(ids(phrase * 100))
    assert index.walk[loops.NUM_STATES] == known


def finish(drafter, name, output, tenant):
    drafter.open([request_of(name, [49], tenant)])
    observe(drafter, [name], [output])
    drafter.close([name])


def test_past_outputs_are_a_tenants_own_and_prompts_are_not_kept():
    drafter = drafter_of({"decoding_type": "Suffix"})
    finish(drafter, "1", [1, 2, 3, 4], "x")
    observe(drafter, [], [])
    drafter.open([request_of("a", [9, 1, 2], "x"), request_of("b", [9, 1, 2], "y")])
    drafter.open([request_of("c", [49], "x")])
    drafts = propose(drafter, ["a", "b", "c"], [4, 4, 4])
    assert [draft.tokens.tolist() for draft in drafts] == [[3, 4], [], []]


def test_a_running_request_sees_what_finishes():
    drafter = drafter_of({"decoding_type": "Suffix"})
    drafter.open([request_of("a", [9, 1, 2])])
    finish(drafter, "1", [1, 2, 3], "")
    observe(drafter, ["a"], [[5]])
    assert propose(drafter, ["a"], [1])[0].num_nodes == 0
    observe(drafter, ["a"], [[1, 2]])
    assert propose(drafter, ["a"], [1])[0].num_nodes == 1


def test_what_finishes_is_found_at_once_and_from_its_beginning():
    drafter = drafter_of({"decoding_type": "Suffix"})
    drafter.open([request_of("a", [5, 9, 1, 2])])
    assert not propose(drafter, ["a"], [8])[0].num_nodes
    finish(drafter, "1", [5, 9, 1, 2, 3, 4, 7], "")
    observe(drafter, [], [])
    assert propose(drafter, ["a"], [8])[0].tokens.tolist() == [3, 4, 7]


@pytest.mark.parametrize("limits", [{"max_cached_requests": 4}, {"max_cached_tokens": 200}])
def test_the_past_is_bounded(limits):
    drafter = drafter_of({"decoding_type": "Suffix", **limits})
    rng = random.Random(0)
    for index in range(40):
        finish(drafter, str(index), [rng.randrange(50) for _ in range(30)], str(index % 3))
        drafter.work(1000)
        sizes = [past.size for past in drafter._pasts.values()]
        assert sum(sizes) <= limits.get("max_cached_tokens", 3 * 4 * 30)
    drafter.open([request_of("a", [1], "0")])


def test_no_past_at_all():
    drafter = drafter_of({"decoding_type": "Suffix", "max_cached_requests": 0})
    finish(drafter, "1", [1, 2, 3], "")
    drafter.open([request_of("a", [9, 1, 2])])
    assert not propose(drafter, ["a"], [4])[0].num_nodes
    assert not drafter._pasts


def test_a_request_may_ask_for_likelier_tokens():
    """What followed twice in three times is drafted unless more is asked for, or nothing is."""
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    wishes = {"engine": None, "sure": 0.9, "any": 0.0}
    drafter = drafter_of({"decoding_type": "Suffix", "min_token_prob": 0.5, "max_draft_len": 2})
    for name, wish in wishes.items():
        speculation = SpeculationOptions(min_prob=wish, isolated=True)
        drafter.open([request_of(name, text, speculation=speculation)])
    drafts = propose(drafter, list(wishes), [1, 1, 1])
    assert [draft.tokens.tolist() for draft in drafts] == [[3], [], [3]]
