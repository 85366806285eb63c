"""What a server with a bfloat16 head does to the importance ratio of a trainer with a float32 head.

    python scripts/head_precision.py                     the demo model, two minutes on one core

The engine samples answers and reports the log-probability of each token, as a server would; then the
trainer's forward computes them again with the float32 head. Both use the same bfloat16 body. The ratio is
exp(trainer - server): 1 if they agree, since the weights are the same.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.rl.tasks import addition, draw
from minimax_hybrid.serving import Engine, GenerationParams, Request
from minimax_hybrid.text import DEMO, encode, load_model, load_tokenizer

OPENINGS = ("The ", "Once upon a time ", "One sunny day ", "Count with me: ", "Today is ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, metavar="DIR")
    parser.add_argument("--answers", type=int, default=256, metavar="N")
    parser.add_argument("--tokens", type=int, default=160, metavar="N", help="of the longest answer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model, dtype="bfloat16")
    tokenizer = load_tokenizer(options.model)
    problems = draw(addition, random.Random(0), difficulty=2, count=options.answers)
    texts = [OPENINGS[i % 5] if i % 2 else problem.prompt for i, problem in enumerate(problems)]
    requests = [
        Request(encode(tokenizer, text), GenerationParams(seed=i, max_new_tokens=options.tokens))
        for i, text in enumerate(texts)
    ]
    print("heads of server and trainer | tokens | of a token: mean difference of log-probabilities, largest")
    print("    | ratio: mean abs(ratio - 1), largest | the same of a whole answer's ratio")
    for served, trained in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        found = differences(model, requests, served=served, trained=trained)
        print(f"{served}, {trained} | {summary(found)}")


def differences(
    model: MiniMaxM1ForCausalLM, requests: list[Request], *, served: str, trained: str
) -> list[Tensor]:
    """For each answer, its tokens' log-probabilities of the trainer less those of the server."""
    set_head(model, served)
    results = Engine(model).generate(requests)
    set_head(model, trained)
    found = []
    for request, result in zip(requests, results, strict=True):
        with torch.no_grad():
            again = model.log_probs(torch.tensor([request.prompt + result.tokens]))
        assert isinstance(again, Tensor)
        found.append(again[0, len(request.prompt) :] - torch.tensor(result.log_probs))
    return found


def set_head(model: MiniMaxM1ForCausalLM, dtype: str) -> None:
    model.lm_head.head_dtype, model.config.head_dtype = getattr(torch, dtype), dtype


def summary(differences: list[Tensor]) -> str:
    tokens = torch.cat(differences)
    ratio = tokens.exp().sub(1).abs()
    whole = torch.stack([answer.sum() for answer in differences]).exp().sub(1).abs()
    numbers = (tokens.abs().mean(), tokens.abs().max(), ratio.mean(), ratio.max(), whole.mean(), whole.max())
    return f"{len(tokens):,} | " + " | ".join(f"{float(number):.1e}" for number in numbers)


if __name__ == "__main__":
    main()
