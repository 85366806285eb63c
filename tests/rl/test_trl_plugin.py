"""TRL's GRPOTrainer trains the model, with our objective, on its own code path."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import letters, letters_tokenizer

from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO, REINFORCE, Objective, policy_loss

pytest.importorskip("trl", reason="trl is not installed")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from minimax_hybrid.rl.plugins.trl_plugin import grpo_settings  # noqa: E402

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROMPTS = ["bcd", "e", "fbcde", "cc"]


def says_a(completions: list[str], **_: Any) -> list[float]:
    return [text.count("a") / max(1, len(text.replace(" ", ""))) for text in completions]


def trainer(
    folder: Path, objective: Objective, *, model: Any = None, peft: Any = None, **changes: Any
) -> GRPOTrainer:
    options = dict(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        steps_per_generation=2,
        max_completion_length=6,
        max_steps=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=0,
    )
    return GRPOTrainer(
        model=model or letters(),
        reward_funcs=says_a,
        args=GRPOConfig(**{**options, **grpo_settings(objective), **changes}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=letters_tokenizer(),
        peft_config=peft,
    )


def logged(run: GRPOTrainer, name: str) -> list[float]:
    return [line[name] for line in run.state.log_history if name in line]


def test_cispo_trains_and_the_reward_rises(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, CISPO(ratio_max=5.0), max_steps=32, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    assert run.epsilon_high == 5.0
    assert not run.aux_loss_enabled
    run.train()
    rewards = logged(run, "reward")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    group = run.optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-15)


def step_inputs(run: GRPOTrainer) -> dict[str, Any]:
    """A batch as TRL hands it to its loss, with old log-probs that are off-policy."""
    inputs = run._prepare_inputs(next(iter(run.get_train_dataloader())))
    make = torch.Generator().manual_seed(0)
    shape = inputs["completion_ids"].shape
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        now = run.model.log_probs(ids, attention_mask=mask)[:, -shape[1] :]
    inputs["old_per_token_logps"] = now + 0.5 * torch.randn(shape, generator=make)
    inputs["advantages"] = torch.randn(shape[0], generator=make)
    inputs["ours"] = ids, mask
    return inputs


@pytest.mark.parametrize("objective", [CISPO(ratio_max=1.2), DAPO(), GRPO()], ids=["cispo", "dapo", "grpo"])
def test_trls_gradient_is_that_of_our_objective(tmp_path: Path, objective: Objective) -> None:
    run = trainer(tmp_path, objective, steps_per_generation=1, num_iterations=2)
    run.current_gradient_accumulation_steps = 1
    inputs = step_inputs(run)
    ids, mask = inputs.pop("ours")
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    theirs = torch.autograd.grad(run.compute_loss(run.model, inputs), parameters)

    steps = inputs["completion_ids"].shape[1]
    log_probs = run.model.log_probs(ids, attention_mask=mask)[:, -steps:]
    loss = policy_loss(
        log_probs, inputs["old_per_token_logps"], inputs["advantages"], inputs["completion_mask"], objective
    )
    ours = torch.autograd.grad(loss, parameters)
    assert any(g.abs().max() > 1e-4 for g in ours)
    for a, b in zip(theirs, ours, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_left_padded_prompts_score_as_when_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, CISPO(ratio_max=5.0))
    inputs = run._prepare_inputs(next(iter(run.get_train_dataloader())))
    assert (inputs["prompt_mask"][:, 0] == 0).any()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    steps = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        theirs = run._get_per_token_logps_and_entropies(run.model, ids, mask, steps)[0]
        for i in range(len(ids)):
            alone = run.model.log_probs(ids[i][mask[i].bool()][None])[0]
            kept = int(inputs["completion_mask"][i].sum())
            assert torch.allclose(theirs[i, :kept], alone[-kept:], atol=1e-5)


def test_lora_trains_its_adapters_alone(tmp_path: Path) -> None:
    model = letters()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    targets = ["qkv_proj", "out_proj", "q_proj", "v_proj", "o_proj"]
    run = trainer(
        tmp_path,
        CISPO(ratio_max=5.0),
        model=model,
        peft=LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
    )
    run.train()
    after = run.model.state_dict()
    adapters = [name for name in after if "lora_B" in name]
    assert adapters
    assert all(after[name].abs().sum() > 0 for name in adapters)
    plain = {key.removeprefix("base_model.model.").replace(".base_layer.", "."): key for key in after}
    assert before.keys() <= plain.keys()
    for name, value in before.items():
        assert torch.equal(after[plain[name]], value), name


def test_a_bfloat16_model_with_a_float32_head_trains(tmp_path: Path) -> None:
    model = letters().to(torch.bfloat16)
    run = trainer(tmp_path, CISPO(ratio_max=5.0), model=model, cast_lm_head_to_fp32=True)
    run.train()
    assert run.model.lm_head.weight.dtype == torch.float32
    assert all(torch.isfinite(torch.tensor(value)) for value in logged(run, "grad_norm"))
    assert any(value > 0 for value in logged(run, "grad_norm"))


def test_without_our_settings_trl_would_clip_at_a_fifth_and_add_the_balance_loss(tmp_path: Path) -> None:
    options = GRPOConfig(output_dir=str(tmp_path), loss_type="cispo", report_to=[], use_cpu=True, bf16=False)
    run = GRPOTrainer(
        model=letters(),
        reward_funcs=says_a,
        args=options,
        processing_class=letters_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    assert run.epsilon_high == 0.2
    assert run.aux_loss_enabled


def test_what_trl_cannot_express_is_refused() -> None:
    cases = [
        (REINFORCE(), "needs a bound"),
        (CISPO(ratio_max=2.0, ratio_min=0.5), "no lower bound"),
        (CISPO(ratio_max=2.0, sample_share=1.0), "mean over tokens"),
        (DAPO(sample_share=0.5), "one mean or the other"),
        (Objective(ratio_max=2.0, trust_max=1.2), "not both"),
    ]
    for objective, message in cases:
        with pytest.raises(ValueError, match=message):
            grpo_settings(objective)


@pytest.mark.parametrize("kind", [[], ["--lora"], ["--bfloat16"]], ids=["plain", "lora", "bfloat16"])
def test_the_example_script_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, kind: list[str]
) -> None:
    words = ["trl_cispo.py", "--steps", "1", "--responses", "128", "--output", str(tmp_path), *kind]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(SCRIPTS / "trl_cispo.py"), run_name="__main__")
    assert "in the last of 1" in capsys.readouterr().out
    assert list(tmp_path.glob("*.safetensors"))
