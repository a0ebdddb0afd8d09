"""A drafter such as a user would write: what one costs that is called request by request."""

from __future__ import annotations


class LastTime:
    """What followed the newest two tokens when they were last there."""

    def draft(self, token_ids: list[int], max_tokens: int) -> list[int]:
        tail = token_ids[-2:]
        for end in range(len(token_ids) - 1, 1, -1):
            if token_ids[end - 2 : end] == tail:
                return token_ids[end : end + max_tokens]
        return []
