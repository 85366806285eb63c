"""A checkpoint folder in miniature: random weights, one token for each character, a chat template."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz .:\n"
STRING_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def character_tokenizer(*, ends: bool = True) -> PreTrainedTokenizerFast:
    """One token for each character and, if texts are to end, one for that; other characters have none."""
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    if ends:
        tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<end>"} if ends else {}))
    fast.chat_template = STRING_TEMPLATE
    return fast


def tiny_checkpoint(folder: Path, *, seed: int = 0, ends: bool = True, **changes: object) -> Path:
    """A random two-layer model and its tokenizer in `folder`."""
    tokenizer = character_tokenizer(ends=ends)
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, attn_type_list=[0, 1],
        initializer_range=0.15, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(**{**sizes, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
