"""A suffix automaton that counts: how often every string of up to `max_depth` tokens occurred.

Blumer et al. 1985, cut at a depth: a state stands for all strings within `max_depth` that end at
the same places; their lengths are (length[link], length]. A link leads to the longest suffix that
ended in more places. A string as long as `max_depth` is counted and does not go on, so that text
which repeats makes no new states.

A token is appended in one walk over the suffixes of the text before it, longest first: what each
becomes is counted, and is its likeliest continuation unless another was seen more often.

Called by `suffix.py` and `ngram_cache.py`. Lists of ints, and dicts only where a state goes on in
several ways: what a look-up costs is the memory that it has to fetch.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class SuffixIndex:
    """Over one text, or over several: `begin_text` starts the next one."""

    __slots__ = (
        "_suffixes",
        "_tie",
        "after_best",
        "best",
        "count",
        "length",
        "link",
        "max_depth",
        "others",
        "size",
    )

    def __init__(self, max_depth: int, *, keeps_best: bool = False) -> None:
        self.max_depth = max_depth
        # Of equally frequent continuations, the one that got there first is kept, or the last.
        self._tie = int(keeps_best)
        self.size = 0  # tokens of all texts
        self.length = [0]
        self.link = [-1]
        self.count = [0]  # occurrences; not of the root
        self.best = [-1]  # token that followed most often; -1: none did
        self.after_best = [-1]  # and the state that it leads to
        # Where several tokens followed: state -> token -> state, of all of them.
        self.others: dict[int, dict[int, int]] = {}
        self._suffixes = [ROOT]  # states of the text's suffixes, longest first

    def begin_text(self) -> None:
        """What comes next does not follow what came before."""
        self._suffixes = [ROOT]

    def after(self, state: int, token: int) -> int:
        """Where `token` leads; -1 if it never followed."""
        if self.best[state] == token:
            return self.after_best[state]
        some = self.others.get(state)
        return -1 if some is None else some.get(token, -1)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the current text."""
        length, link, count = self.length, self.link, self.count
        best, after_best, others = self.best, self.after_best, self.others
        longest, tie = self.max_depth - 1, self._tie  # the longest that goes on
        suffixes = self._suffixes
        for token in tokens:
            if length[suffixes[0]] > longest and length[suffixes[1]] == longest:
                del suffixes[0]  # a single string, and it does not go on
            grown: list[int] = []
            last = new = whole = part = -1
            for state in suffixes:
                known = best[state]
                if known == token:
                    after = after_best[state]
                else:
                    after = others[state].get(token, -1) if state in others else -1
                if after < 0:
                    if new < 0:
                        new = last = len(link)
                        self._add(min(length[state], longest) + 1, ROOT, 1, -1, -1)
                        grown.append(new)
                    if known >= 0:
                        if state not in others:
                            others[state] = {known: after_best[state]}
                        others[state][token] = new
                    if known < 0 or count[after_best[state]] + tie == 1:
                        best[state], after_best[state] = token, new
                    continue
                if last == new:  # the first that knows the token
                    size = min(length[state], longest) + 1
                    if length[after] != size:
                        whole, part = after, self._split(after, size)
                    if new >= 0:
                        link[new] = after if part < 0 else part
                if after == whole:
                    after = part
                    if known == token:
                        after_best[state] = part
                    if state in others:
                        others[state][token] = part
                if after != last:
                    last = after
                    grown.append(after)
                    count[after] += 1
                if known != token and count[after] >= count[after_best[state]] + tie:
                    best[state], after_best[state] = token, after
            grown.append(ROOT)
            suffixes = grown
            self.size += 1
        self._suffixes = suffixes

    def tail(self) -> tuple[int, int]:
        """State and length of the text's longest suffix below `max_depth`."""
        return self.within(self._suffixes[0], self.max_depth - 1)

    def repeated(self) -> tuple[int, int]:
        """State and length of the text's longest suffix below `max_depth` that occurred before."""
        state = self._suffixes[0]
        if state != ROOT and self.count[state] == 1:
            state = self._suffixes[1]
        return self.within(state, self.max_depth - 1)

    def is_tail(self, state: int) -> bool:
        """Whether the text ends with the strings of `state`: nothing followed them there."""
        return state in self._suffixes

    def within(self, state: int, max_len: int) -> tuple[int, int]:
        """Of a suffix in `state`, the part of at most `max_len` tokens: its state and length."""
        link, length = self.link, self.length
        while state > ROOT and length[link[state]] >= max_len:
            state = link[state]
        return state, length[state] if length[state] < max_len else max_len

    def follow(self, state: int, matched: int, tokens: Iterable[int]) -> tuple[int, int]:
        """From a match on: the longest suffix below `max_depth` that occurs, as `within`."""
        length, link, best, others = self.length, self.link, self.best, self.others
        longest = self.max_depth - 1
        state, matched = self.within(state, matched)  # it may have been split since
        for token in tokens:
            while True:
                if best[state] == token:
                    state = self.after_best[state]
                elif state in others and token in others[state]:
                    state = others[state][token]
                elif state == ROOT:
                    matched = 0
                    break
                else:
                    state = link[state]
                    matched = length[state]
                    continue
                if matched < longest:
                    matched += 1
                elif length[link[state]] == longest:
                    state = link[state]
                break
        return state, matched

    def _split(self, state: int, size: int) -> int:
        """The strings of `state` of up to `size` tokens, as a state of their own."""
        part = len(self.link)
        self._add(
            size, self.link[state], self.count[state], self.best[state], self.after_best[state]
        )
        self.link[state] = part
        if state in self.others:
            self.others[part] = dict(self.others[state])
        return part

    def _add(self, length: int, link: int, count: int, best: int, after_best: int) -> None:
        """A state."""
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.best.append(best)
        self.after_best.append(after_best)
