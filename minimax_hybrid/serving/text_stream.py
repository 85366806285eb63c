"""Tokens of one answer to text, piece by piece: whole characters, and nothing a stop text may take back."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TextStream:
    """`put` and `end` return the new text; `stopped` says that a stop text ended it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        self._ids: list[int] = []
        # the text of ids[begin:decoded] is known; the rest is decoded after it, as blanks depend on it
        self._begin = self._decoded = 0
        self._waiting = ""  # may be the start of a stop text

    def put(self, token: int) -> str:
        self._ids.append(token)
        return self._released(self._new_text(whole=False), whole=False)

    def end(self) -> str:
        """The rest, once no more tokens come."""
        return "" if self.stopped else self._released(self._new_text(whole=True), whole=True)

    def whole(self, tokens: list[int]) -> str:
        """The text of all tokens at once, for an answer that was not streamed."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _new_text(self, *, whole: bool) -> str:
        before, after = (
            self.whole(ids) for ids in (self._ids[self._begin : self._decoded], self._ids[self._begin :])
        )
        # a character may need several tokens; until they are there it decodes to U+FFFD
        if len(after) <= len(before) or after.endswith("\ufffd") and not whole:
            return ""
        self._begin, self._decoded = self._decoded, len(self._ids)
        return after[len(before) :]

    def _released(self, new: str, *, whole: bool) -> str:
        text = self._waiting + new
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        kept = 0 if whole else max((_overlap(text, stop) for stop in self.stop), default=0)
        self._waiting = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that a stop text begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
