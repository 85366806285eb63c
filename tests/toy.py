"""The smallest thing a trainer can train on: six letters, and a reward for saying "a"."""

import dataclasses
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.rl.objective import CISPO
from minimax_hybrid.rl.settings import Settings
from minimax_hybrid.rl.tasks import Problem

VOCABULARY = ["<pad>", "<end>", "a", "b", "c", "d", "e", "f"]


def tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="f")
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")


def say_a(rng: random.Random, difficulty: int) -> Problem:
    """Any prompt of letters; the reward is the share of the response that is "a"."""
    prompt = "".join(rng.choices("bcdef", k=difficulty))
    return Problem(prompt, lambda text: text.replace(" ", "").count("a") / max(1, len(text.replace(" ", ""))))


def model(layers: int = 2, seed: int = 0) -> MiniMaxM1ForCausalLM:
    torch.manual_seed(seed)
    kinds = [0] * (layers - 1) + [1]
    return MiniMaxM1ForCausalLM(
        MiniMaxM1Config.tiny(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            num_hidden_layers=layers,
            attn_type_list=kinds,
            head_dim=16,
            rotary_dim=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def settings(folder: Path, **changes: object) -> Settings:
    plain = Settings(
        model="unused",
        output=str(folder),
        task="toy:say_a",
        difficulty=4,
        objective=CISPO(ratio_max=5.0),
        learning_rate=3e-3,
        batches=4,
        windows=(6,),
        prompts=4,
        responses=4,
        updates=4,
        evaluate_every=100,
        evaluation_problems=4,
        save_every=1,
    )
    return dataclasses.replace(plain, **changes)
