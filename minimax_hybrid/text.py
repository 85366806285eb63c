"""Text in, text out: prompts to one batch of tokens, text as it comes, and what it took.

tokenizer = load_tokenizer(folder)
prompts = [encode(tokenizer, "12+34=")]
result = generate_text(load_model(folder), tokenizer, prompts, GenerationSettings())
result.texts, result.reasons, result.summary()
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .config import MiniMaxM1Config, read_config
from .generation import RepetitionStop, finish_reasons
from .model import MiniMaxM1ForCausalLM

DEMO = Path(__file__).parent / "demo"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_REASONS = {"end": "end of text", "length": "length limit", "repetition": "repetition stop"}


@dataclass(frozen=True)
class GenerationSettings:
    """How to choose tokens; the defaults are those of the M1 report's evaluations.

    Args:
        temperature: divides the logits; None is greedy.
        top_p: the smallest set of tokens with this probability in all is sampled from.
        repetition_stop: ends a sequence that repeats itself; off if None.
    """

    max_new_tokens: int = 256
    temperature: float | None = 1.0
    top_p: float = 0.95
    repetition_stop: RepetitionStop | None = None


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts of one batch, each with why it ended ("end", "length" or "repetition"), and the time taken."""

    texts: list[str]
    reasons: list[str]
    new_tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    def summary(self) -> str:
        decoded = sum(self.new_tokens) - len(self.texts)  # the first token of each text is prefill's
        lines = [f"prefill {_speed_text(self.prompt_tokens, self.prefill_seconds)}"]
        lines += [f"decode  {_speed_text(decoded, self.decode_seconds)}"] if decoded else []
        for i, (reason, count) in enumerate(zip(self.reasons, self.new_tokens, strict=True), start=1):
            which = f"text {i} " if len(self.texts) > 1 else ""
            lines.append(f"{which}ended: {_REASONS[reason]} after {count:,} tokens")
        return "\n".join(lines)


def load_tokenizer(folder: str | Path, *, config: MiniMaxM1Config | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, from a local folder; nothing is downloaded.

    Args:
        config: the folder's configuration, if it is read already.

    Raises:
        ValueError: no such folder, no model of ours in it, no tokenizer or a damaged one.
    """
    config = read_config(folder) if config is None else config
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json); copy it there from its release")
    try:
        return AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser does
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error


def load_model(
    folder: str | Path,
    *,
    config: MiniMaxM1Config | None = None,
    dtype: str = "auto",
    device: str = "cpu",
) -> MiniMaxM1ForCausalLM:
    """The model of a checkpoint, in evaluation mode, from a local folder; nothing is downloaded.

    Args:
        config: the folder's configuration, if it is read already.

    Raises:
        ValueError: tensors that do not fit, or a device that is not there.
        FileNotFoundError: weights or shards that are not there.
    """
    target = _checked_device(device)
    config = read_config(folder) if config is None else config
    model = MiniMaxM1ForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    return model.to(target).eval()


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool = True) -> list[int]:
    """The tokens of a prompt, all of whose characters the tokenizer knows.

    Args:
        special_tokens: let the tokenizer add its marks; False for text of a chat template, which has them.

    Raises:
        ValueError: an empty prompt, or characters that would be lost.
    """
    if not text:
        raise ValueError("the prompt is empty; give some text")
    try:
        text.encode("utf-8")
        tokens = tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        lost = _unknown_characters(tokenizer, text)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"the tokenizer refuses the prompt: {error}") from error
    if lost:
        raise ValueError(f"the tokenizer does not know these characters of the prompt: {lost!r}")
    if not tokens:
        raise ValueError(f"the prompt {text!r:.80} has no tokens")
    return tokens


def generate_text(
    model: MiniMaxM1ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    show: Callable[[str], Any] | None = None,
) -> GeneratedTexts:
    """Continue a batch of prompts.

    Args:
        prompts: tokens of each, of any lengths.
        show: called with every new piece of text; for a single prompt only.
    """
    if show is not None and len(prompts) > 1:
        raise ValueError(f"text can be shown as it comes for one prompt only, got {len(prompts)}")
    ends = _end_tokens(model, tokenizer)
    pads = (model.config.pad_token_id, tokenizer.pad_token_id, *ends, 0)
    pad = next(token for token in pads if token is not None)
    input_ids, mask = _left_padded(prompts, pad, model.config.vocab_size)
    stream = TokenStream(tokenizer, show)
    sampling: dict[str, Any] = dict(do_sample=False)
    if settings.temperature is not None:
        sampling = dict(do_sample=True, temperature=settings.temperature, top_p=settings.top_p, top_k=0)
    with torch.inference_mode():
        tokens = model.generate(
            input_ids.to(model.device), attention_mask=mask.to(model.device),
            max_new_tokens=settings.max_new_tokens, num_beams=1, **sampling,
            eos_token_id=ends or None, pad_token_id=pad,
            repetition_stop=settings.repetition_stop, streamer=stream,
        )  # fmt: skip
    new = tokens[:, input_ids.shape[1] :].cpu()
    reasons = finish_reasons(new, end_tokens=ends, repetition_stop=settings.repetition_stop)
    kept = [
        _trim_after_end(tokens, reason, ends, pad)
        for tokens, reason in zip(new.tolist(), reasons, strict=True)
    ]
    return GeneratedTexts(
        texts=[_decode(tokenizer, tokens) for tokens in kept],
        reasons=reasons,
        new_tokens=[len(tokens) for tokens in kept],
        prompt_tokens=int(mask.sum()),
        prefill_seconds=stream.first - stream.start,
        decode_seconds=stream.last - stream.first,
    )


class TokenStream(BaseStreamer):
    """Notes when tokens come, and shows the text of one sequence in whole characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], Any] | None):
        self.tokenizer, self.show = tokenizer, show
        self.start = self.first = self.last = 0.0
        self.ids: list[int] = []
        # the text of ids[begin:shown] is on the screen; the rest is decoded after it, as blanks depend on it
        self.begin = self.shown = 0

    def put(self, value: Tensor) -> None:
        now = time.perf_counter()
        if not self.start:  # the first call brings the prompt
            self.start = self.first = self.last = now
            return
        if self.first == self.start:
            self.first = now
        self.last = now
        if self.show is not None:
            self.ids += value.flatten().tolist()
            self._show(self.show, whole=False)

    def end(self) -> None:
        if self.show is not None:
            self._show(self.show, whole=True)

    def _show(self, show: Callable[[str], Any], *, whole: bool) -> None:
        before, after = (
            _decode(self.tokenizer, ids)
            for ids in (self.ids[self.begin : self.shown], self.ids[self.begin :])
        )
        # a character may need several tokens; until they are there it decodes to U+FFFD
        if len(after) > len(before) and (whole or not after.endswith("\ufffd")):
            show(after[len(before) :])
            self.begin, self.shown = self.shown, len(self.ids)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    # a list of texts comes back only for a list of lists
    return cast(str, tokenizer.decode(ids, skip_special_tokens=True))


def _checked_device(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()  # what cannot do this cannot compute: absent, or "meta"
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return found


def _unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The characters that become the unknown token, or nothing at all (blanks may)."""
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, "")
    characters = sorted(set(text))
    encoded = tokenizer(characters, add_special_tokens=False)["input_ids"] if characters else []
    unknown = tokenizer.unk_token_id
    return "".join(
        c for c, ids in zip(characters, encoded, strict=True) if unknown in ids or not ids and not c.isspace()
    )


def _end_tokens(model: MiniMaxM1ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    given = model.generation_config.eos_token_id
    given = tokenizer.eos_token_id if given is None else given
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, V: int) -> tuple[Tensor, Tensor]:
    lengths = [len(tokens) for tokens in prompts]
    if not lengths or not min(lengths):
        raise ValueError(f"prompts hold {lengths} tokens; give at least one prompt, and a token in each")
    largest = max(max(tokens) for tokens in prompts)
    if largest >= V:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model has {V}; use the tokenizer of its checkpoint"
        )
    T = max(lengths)
    ids = torch.tensor([[pad] * (T - len(tokens)) + list(tokens) for tokens in prompts])
    mask = torch.tensor([[0] * (T - len(tokens)) + [1] * len(tokens) for tokens in prompts])
    return ids, mask


def _trim_after_end(tokens: list[int], reason: str, ends: list[int], pad: int) -> list[int]:
    """New tokens up to their end; a text that ended before others is filled with `pad`."""
    if reason == "end":
        return tokens[: next(i for i, token in enumerate(tokens) if token in ends) + 1]
    while reason == "repetition" and tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens


def _speed_text(count: int, seconds: float) -> str:
    return f"{count:,} tokens in {seconds:.2f} s: {count / max(seconds, 1e-9):,.1f} tokens/s"
