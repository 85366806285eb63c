"""The bundled demo checkpoint is what its card says, and its script makes such things."""

import random
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import minimax_hybrid
from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.rl.tasks import addition, draw

DEMO = Path(minimax_hybrid.__file__).parent / "demo"
SCRIPTS = DEMO.parents[1] / "scripts"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype=torch.float32).eval()


def continued(model, tokenizer, prompts: list[str], *, max_new_tokens: int) -> list[str]:
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    tokens = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def test_auto_classes_load_the_hybrid_in_the_release_pattern(model):
    assert isinstance(model, MiniMaxM1ForCausalLM)
    assert model.config.attn_type_list == [0] * 7 + [1]
    assert model.config.num_experts_per_tok == 2 and model.config.postnorm
    assert model.config.layernorm_linear_attention_alpha == pytest.approx(16**0.25)


def test_the_files_stay_small():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 5e6


def test_greedy_accuracy_on_held_out_additions_is_the_cards(model, tokenizer):
    """There is room to learn; 400 problems drawn anew agree within four standard deviations."""
    claimed = float(re.search(r"greedy \| (0\.\d+)", (DEMO / "README.md").read_text())[1])
    assert 0.7 <= claimed <= 0.85
    problems = draw(addition, random.Random(12), difficulty=2, count=400, held_out_only=True)
    answers = continued(model, tokenizer, [p.prompt for p in problems], max_new_tokens=9)
    right = sum(p.reward(answer) for p, answer in zip(problems, answers, strict=True)) / len(problems)
    assert abs(right - claimed) < 4 * (claimed * (1 - claimed) / len(problems)) ** 0.5


def test_free_text_is_sentences_and_the_same_every_time(model, tokenizer):
    prompts = ["The fox", "Once upon a time", "Tod"]
    first = continued(model, tokenizer, prompts, max_new_tokens=160)
    assert first == continued(model, tokenizer, prompts, max_new_tokens=160)
    known = _words_of_the_corpus()
    for prompt, text in zip(prompts, first, strict=True):
        words = re.findall(r"[a-z]+", (prompt + text).lower())
        right = sum(word in known for word in words) / len(words)
        assert len(words) >= 5 and right > 0.75, f"{sorted(set(words) - known)} in {prompt + text!r}"


def test_a_chat_is_answered(model, tokenizer):
    messages = [{"role": "user", "content": "How many legs does a spider have?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    (answer,) = continued(model, tokenizer, [prompt], max_new_tokens=60)
    assert answer.startswith("A") and answer.endswith(".")


def test_the_chat_template_reads_strings_and_parts_alike(tokenizer):
    spellings = "Hello", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    written = {
        tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for content in spellings
    }
    assert written == {"<beginning_of_sentence>user\nHello<end_of_sentence>\n"}


def test_the_tokenizer_returns_every_printable_ascii_character(tokenizer):
    text = "".join(c for c in string.printable if c not in "\r\x0b\x0c")
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer(" a  b .").input_ids) == " a  b ."


def test_what_the_tokenizer_does_not_know_is_one_unknown_token(tokenizer):
    assert tokenizer("\N{SNOWMAN}").input_ids == [tokenizer.unk_token_id]


def test_special_tokens_are_the_models(model, tokenizer):
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    ids = [getattr(tokenizer, name) for name in names]
    for config in (model.config, model.generation_config):
        assert [getattr(config, name) for name in names] == ids
    assert len(set(ids)) == 3 and len(tokenizer) == model.config.vocab_size


def test_no_embedding_is_near_zero(model):
    """A policy that samples a token with a zero embedding gets gradients that overflow."""
    assert _norms(model).min() > 0.05 * _norms(model).median()


@pytest.mark.slow
def test_the_script_lowers_the_loss_and_its_result_loads(tmp_path):
    command = [sys.executable, SCRIPTS / "train_demo.py", "--quick", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    losses = _curve((tmp_path / "README.md").read_text())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.2
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 101


def test_the_cards_curve_falls():
    losses = _curve((DEMO / "README.md").read_text())
    assert len(losses) >= 10 and losses[-1] < 0.5 * losses[0]


def _curve(card: str) -> list[float]:
    """Loss on texts, row by row of the card's table."""
    return [float(row.split("|")[4]) for row in card.splitlines() if re.match(r"\| (pre|cold)", row)]


def _norms(model) -> Tensor:
    return model.get_input_embeddings().weight.norm(dim=1)


def _words_of_the_corpus() -> set[str]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        from demo_corpus import document
    finally:
        sys.path.remove(str(SCRIPTS))
    rng = random.Random(0)
    texts = (document(rng).lower() for _ in range(3000))
    return {word for text in texts if "write this" not in text for word in re.findall(r"[a-z]+", text)}
