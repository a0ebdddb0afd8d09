"""A suffix automaton that counts: how often every string of up to `max_depth` tokens occurred.

Blumer et al. 1985: a state stands for all strings with the same end positions, their lengths are
(length[link], length]; a link leads to the longest suffix that ended in more places. Appending a
token is amortised O(1), and counting walks the links of the newest state; since lengths beyond
`max_depth` are never asked for, the walk begins at the first state that has shorter ones, so that
it has at most `max_depth` stops even in a text of one token.

Every state also knows its most frequent continuation; of equals, the one seen last.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class SuffixIndex:
    """Over one text, or over several: `begin_text` starts the next one."""

    __slots__ = ("_jump", "_last", "best", "count", "length", "link", "max_depth", "next", "size")

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.size = 0  # tokens of all texts
        self.next: list[dict[int, int]] = [{}]  # state -> token -> state
        self.link = [-1]
        self.length = [0]
        self.count = [0]  # occurrences; right for states with strings within `max_depth`
        self.best = [-1]  # token that followed most often
        self._jump = [ROOT]  # where `_top` got to last time
        self._last = ROOT

    def begin_text(self) -> None:
        """What comes next does not follow what came before."""
        self._last = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the current text."""
        following, link, count, best = self.next, self.link, self.count, self.best
        top = self._top(self._last)
        for token in tokens:
            parent = top
            self._append(token)
            self.size += 1
            state = top = self._top(self._last)
            while state > ROOT:
                count[state] += 1
                state = link[state]
            count[ROOT] += 1
            # The states of the text before this token, some of them perhaps new.
            while parent >= ROOT:
                known = best[parent]
                if known != token:
                    follows = following[parent]
                    if known < 0 or count[follows[token]] >= count[follows[known]]:
                        best[parent] = token
                parent = link[parent]

    def repeated(self) -> tuple[int, int]:
        """State and length of the text's longest suffix below `max_depth` that occurred before."""
        state = self._top(self._last)
        if state == self._last and state != ROOT:
            state = self.link[state]
        return self.within(state, self.max_depth - 1)

    def within(self, state: int, max_len: int) -> tuple[int, int]:
        """Of a suffix in `state`, the part of at most `max_len` tokens: its state and length."""
        link, length = self.link, self.length
        while state > ROOT and length[link[state]] >= max_len:
            state = link[state]
        return state, min(length[state], max_len)

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest suffix of (a match, token) that occurs: its state and length."""
        following, link, length = self.next, self.link, self.length
        while state > ROOT and length[link[state]] >= matched:  # it was split since
            state = link[state]
        while state > ROOT and token not in following[state]:
            state = link[state]
            matched = length[state]
        after = following[state].get(token)
        return (ROOT, 0) if after is None else (after, matched + 1)

    def _append(self, token: int) -> None:
        following, link, length = self.next, self.link, self.length
        last = self._last
        known = following[last].get(token)
        if known is not None:  # only where another text went on like this
            fits = length[known] == length[last] + 1
            self._last = known if fits else self._split(last, token, known)
            return
        new = self._state({}, length[last] + 1, ROOT, 0, -1)
        following[last][token] = new
        state = link[last]
        while state >= ROOT:
            onward = following[state]
            if token in onward:
                break
            onward[token] = new
            state = link[state]
        if state >= ROOT:
            known = following[state][token]
            fits = length[known] == length[state] + 1
            link[new] = known if fits else self._split(state, token, known)
        self._last = new

    def _split(self, state: int, token: int, known: int) -> int:
        """The shorter strings of `known`, those that end `state`'s and `token`, as a state."""
        following, link = self.next, self.link
        part = self._state(
            dict(following[known]),
            self.length[state] + 1,
            link[known],
            self.count[known],
            self.best[known],
        )
        while state >= ROOT and following[state].get(token) == known:
            following[state][token] = part
            state = link[state]
        link[known] = part
        return part

    def _state(
        self, following: dict[int, int], length: int, link: int, count: int, best: int
    ) -> int:
        state = len(self.link)
        self.next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.best.append(best)
        self._jump.append(state)
        return state

    def _top(self, state: int) -> int:
        """The first state on the way to the root that has a string within `max_depth`."""
        if state == ROOT:
            return ROOT
        link, length, jump, depth = self.link, self.length, self._jump, self.max_depth
        top = jump[state]
        while length[link[top]] >= depth:
            top = jump[link[top]]
        jump[state] = top
        return top
