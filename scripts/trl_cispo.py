"""CISPO on the demo model's additions with TRL's GRPOTrainer.

    python scripts/trl_cispo.py --steps 160               the whole model, float32
    python scripts/trl_cispo.py --steps 160 --lora        adapters on the attention layers only
    python scripts/trl_cispo.py --steps 160 --bfloat16    bfloat16 body, float32 head (cast_lm_head_to_fp32)

Needs the extra `rl` (trl, peft, datasets). What TRL must be told for CISPO to be CISPO comes from
`grpo_settings`.
"""

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.rl.objective import CISPO
from minimax_hybrid.rl.plugins.trl_plugin import grpo_settings
from minimax_hybrid.rl.tasks import addition, draw
from minimax_hybrid.text import DEMO

ATTENTION = ["qkv_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), help="a folder with weights and tokenizer")
    parser.add_argument("--output", default="runs/trl")
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--steps", type=int, default=160, help="optimiser steps, 16 to a batch of rollouts")
    parser.add_argument("--responses", type=int, default=256, help="in a batch of rollouts, 8 to a prompt")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bfloat16", action="store_true")
    args = parser.parse_args()

    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    model = MiniMaxM1ForCausalLM.from_pretrained(args.model, dtype=dtype)
    problems = draw(addition, random.Random(0), difficulty=args.digits, count=2048)
    data = Dataset.from_list([{"prompt": problem.prompt} for problem in problems])
    by_prompt = {problem.prompt: problem for problem in problems}

    def is_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """TRL hands over more than this by name."""
        return [by_prompt[p].reward(text) for p, text in zip(prompts, completions, strict=True)]

    config = GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.responses // 16,
        steps_per_generation=16,
        num_generations=8,
        max_completion_length=2 * args.digits + 5,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        cast_lm_head_to_fp32=args.bfloat16,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=16,
        save_strategy="no",
        report_to=[],
        **grpo_settings(CISPO(ratio_max=5.0)),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=is_sum,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(r=8, target_modules=ATTENTION, task_type="CAUSAL_LM") if args.lora else None,
    )
    trainer.train()
    trainer.save_model(args.output)
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(f"reward {rewards[0]:.3f} in the first batch, {rewards[-1]:.3f} in the last of {len(rewards)}")


if __name__ == "__main__":
    main()
