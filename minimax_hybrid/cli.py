"""The command `minimax-hybrid`: generate, serve, inspect, convert, cost, bench, train.

A caller's mistake is said in words: exit code 2 for a wrong command line or prompt, 1 for a file or model
that cannot be used, 130 after Ctrl-C. Results go to standard output, all else to standard error.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from .checkpoint.headers import LAYOUTS

DTYPES = ("auto", "float32", "bfloat16", "float16")


class UsageError(Exception):
    """A command line that argparse lets pass and that cannot be followed."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not _bench:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        code = args.run(args, rest) if args.run is _bench else args.run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _say(error, code=2)
    except BrokenPipeError:
        # the reader of our output is gone; without this, Python reports a failed flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = error.filename and error.strerror
        return _say(f"{error.filename}: {error.strerror}" if named else error, code=1)
    except (ValueError, FloatingPointError) as error:
        return _say(error, code=1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _say(f"not enough memory: {str(error).splitlines()[0]}", code=1)
    except KeyboardInterrupt:
        return _say("interrupted", code=130)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    from torch import OutOfMemoryError

    return isinstance(error, OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _say(message: object, *, code: int) -> int:
    print(f"minimax-hybrid: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minimax-hybrid", description="Hybrid lightning-attention models (MiniMax-M1): use and measure."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    inspect = commands.add_parser("inspect", help="layers, parameters, tensors, memory needed")
    inspect.add_argument("folder", type=Path, help="folder of a checkpoint")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)
    convert = commands.add_parser("convert", help="write a checkpoint in another published layout")
    convert.add_argument("source", type=Path, metavar="SRC", help="folder of a checkpoint")
    convert.add_argument("target", type=Path, metavar="DST", help="new folder")
    convert.add_argument(
        "--layout", required=True, choices=LAYOUTS, help="minimax is transformers' own, with stacked experts"
    )
    convert.set_defaults(run=_convert)
    _add_cost(commands)
    train = commands.add_parser("train", help="reinforcement learning, from a settings file")
    train.add_argument("settings", type=Path, metavar="CONFIG.toml", help="see minimax_hybrid/rl/settings.py")
    train.set_defaults(run=_train)
    bench = commands.add_parser("bench", help="run benchmarks, in a clone; alone: list them", add_help=False)
    bench.set_defaults(run=_bench)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="continue prompts", description="Continue prompts. Several make one batch; one is "
        "shown as it comes. Without any, the prompt is read from standard input.",
    )  # fmt: skip
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the bundled demo)")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="one prompt, less a newline at its end; - is standard input; may be repeated",
    )
    parser.add_argument(
        "--chat",
        action="append",
        default=[],
        metavar="FILE|TEXT",
        help="a JSON file of messages, or what the user says; may be repeated",
    )
    parser.add_argument("--max-new-tokens", type=_count, default=256, metavar="N")
    parser.add_argument("--temperature", type=_positive, default=1.0, metavar="X")
    parser.add_argument("--top-p", type=_share, default=0.95, metavar="P")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--seed", type=_seed, metavar="N", help="makes sampling repeatable")
    parser.add_argument(
        "--repetition-stop",
        type=_count,
        nargs="?",
        const=3000,
        metavar="RUN",
        help="end a text after RUN tokens in a row (3000) above the threshold",
    )
    parser.add_argument("--repetition-threshold", type=_share, default=0.99, metavar="P")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as stored")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each text, at the end")
    parser.set_defaults(run=_generate)  # fmt: skip


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="an OpenAI-compatible server", description="Serve a model over HTTP, as OpenAI's API."
    )
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the bundled demo)")
    parser.add_argument("--name", help="what requests call the model (default: the folder's name)")
    parser.add_argument("--host", default="127.0.0.1", help="any but this machine's own needs a key")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="what requests must carry")
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="the same, out of others' sight")
    parser.add_argument("--max-batch", type=_count, default=32, metavar="N", help="requests that run at once")
    parser.add_argument(
        "--max-tokens", type=_count, default=65_536, metavar="N", help="tokens of all running requests"
    )
    parser.add_argument("--max-queue", type=_count, default=256, metavar="N", help="requests that may wait")
    parser.add_argument("--max-length", type=_count, metavar="N", help="tokens of a prompt and its answer")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as stored")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads")
    parser.set_defaults(run=_serve)


def _add_cost(commands: Any) -> None:
    parser = commands.add_parser("cost", help="parameters, FLOPs, bytes and time bounds of a configuration")
    parser.add_argument("config", metavar="DIR|CONFIG.json|m1|tiny")
    parser.add_argument(
        "--against",
        choices=("softmax", "r1", "qwen3"),
        default="softmax",
        help="the same model with softmax everywhere, DeepSeek-R1 or Qwen3-235B",
    )
    parser.add_argument("--lengths", type=_count, nargs="+", metavar="N", help="contexts in tokens")
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="add roofline bounds: h100, h800, h200, or cpu (measured now); may be repeated",
    )
    parser.add_argument("--dtype", default="bfloat16", help="type of weights, keys and values")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw it as well")
    parser.set_defaults(run=_cost)  # fmt: skip


def _generate(args: argparse.Namespace) -> int:
    given = [*args.prompt, *(_read_prompt(name) for name in args.prompt_file)]
    if not given and not args.chat:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt: give --prompt, --prompt-file or --chat, or pipe text in")
        given = [_read_prompt("-")]
    chats = [_read_chat(chat) for chat in args.chat]
    import torch

    from .chat import chat_text
    from .generation import RepetitionStop
    from .text import GenerationSettings, encode, generate_text

    folder, config, tokenizer = _open_checkpoint(args)
    try:
        prompts = [encode(tokenizer, text) for text in given]
        opened = [chat_text(tokenizer, messages, add_generation_prompt=True) for messages in chats]
        prompts += [encode(tokenizer, text, special_tokens=False) for text in opened]
    except ValueError as error:
        raise UsageError(error) from error
    model = _load_model(args, folder, config)
    stop = None
    if args.repetition_stop is not None:
        stop = RepetitionStop(run=args.repetition_stop, threshold=args.repetition_threshold)
    settings = GenerationSettings(
        max_new_tokens=args.max_new_tokens,
        temperature=None if args.greedy else args.temperature,
        top_p=args.top_p,
        repetition_stop=stop,
    )
    if args.seed is not None:
        torch.manual_seed(args.seed)
    streams = len(prompts) == 1 and not args.json
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    result = generate_text(model, tokenizer, prompts, settings, show=_show if streams else None)
    _print_texts([*given, *chats], result, args)
    print(result.summary(), file=sys.stderr)
    return 0


def _serve(args: argparse.Namespace) -> int:
    key = args.api_key_file.read_text(encoding="utf-8").strip() if args.api_key_file else args.api_key
    if key == "":
        raise UsageError("the API key is empty; leave it out or give one")
    if not key and not _is_this_machine(args.host):
        raise UsageError(f"--host {args.host} lets others in; give --api-key or --api-key-file as well")
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise UsageError("serving needs FastAPI and uvicorn; pip install 'minimax-hybrid[serve]'")
    from .serving.engine import Engine
    from .serving.server import ServerSettings, serve

    folder, config, tokenizer = _open_checkpoint(args)
    model = _load_model(args, folder, config)
    settings = ServerSettings(
        name=args.name or folder.resolve().name, host=args.host, port=args.port, api_key=key,
        max_length=min(args.max_length or config.max_position_embeddings, args.max_tokens),
        max_pending=args.max_batch + args.max_queue,
    )  # fmt: skip
    engine = Engine(model, tokenizer, max_batch=args.max_batch, max_tokens=args.max_tokens)
    serve(engine, tokenizer, settings)
    return 0


def _open_checkpoint(args: argparse.Namespace) -> tuple[Path, Any, Any]:
    """Folder, config and tokenizer of --model, before its weights are read."""
    import torch

    from .config import read_config
    from .text import DEMO, load_tokenizer

    _quiet_transformers()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = args.model or DEMO
    config = read_config(folder)
    return folder, config, load_tokenizer(folder, config=config)


def _load_model(args: argparse.Namespace, folder: Path, config: Any) -> Any:
    import torch

    from .text import load_model

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_model(folder, config=config, dtype=args.dtype, device=device)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _print_texts(asked: list[Any], result: Any, args: argparse.Namespace) -> None:
    texts = zip(asked, result.texts, result.reasons, result.new_tokens, strict=True)
    for i, (prompt, text, reason, count) in enumerate(texts, start=1):
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text, "reason": reason, "tokens": count}))
        elif len(asked) > 1:
            print(f"--- text {i}\n{text}")
    if len(asked) == 1 and not args.json:
        print()  # the text itself was shown as it came
    sys.stdout.flush()  # before the summary on standard error


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _inspect(args: argparse.Namespace) -> int:
    from .checkpoint.inspection import inspect_report, inspect_text

    _quiet_transformers()
    report = inspect_report(args.folder)
    print(json.dumps(report, indent=1) if args.json else inspect_text(report))
    return 0 if report["fits"] else 1


def _convert(args: argparse.Namespace) -> int:
    from .checkpoint.conversion import convert

    _quiet_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are the notes that it returns
        notes = convert(args.source, args.target, layout=args.layout)
    for note in notes:
        _say(f"note: {note}", code=0)
    return 0


def _cost(args: argparse.Namespace) -> int:
    from .config import MiniMaxM1Config, read_config
    from .cost.report import LENGTHS, cost_report, cost_text
    from .cost.roofline import named_devices

    sizes = {"m1": MiniMaxM1Config.m1, "tiny": MiniMaxM1Config.tiny}
    config = sizes[args.config]() if args.config in sizes else read_config(args.config)
    report = cost_report(
        config, lengths=args.lengths or LENGTHS, against=args.against, devices=named_devices(args.device),
        dtype=args.dtype,
    )  # fmt: skip
    print(json.dumps(report, indent=1) if args.json else cost_text(report))
    if args.plot:
        from .cost.plotting import cost_plot

        cost_plot(report, args.plot)
    return 0


def _train(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from .rl.trainer import train_from_file

    _quiet_transformers()
    logging.disable_progress_bar()  # the trainer's own bar is enough
    print(f"the last checkpoint is {train_from_file(args.settings)}", file=sys.stderr)
    return 0


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "run.py").is_file() or not (root / "pyproject.toml").is_file():
        raise UsageError(
            "the benchmarks are not part of an installed package; run this from a clone installed with pip "
            "install -e ."
        )
    command = [sys.executable, "-m", "benchmarks.run", *(rest or ["--list"])]
    return subprocess.run(command, cwd=root).returncode


def _read_prompt(name: str) -> str:
    data = sys.stdin.buffer.read() if name == "-" else _bytes_of(name)
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt in {name} is not UTF-8 text: {error}") from error


def _read_chat(given: str) -> list[Any]:
    """The messages in a JSON file (a list, or an object with "messages"); other text is a user's message."""
    if not (given.endswith(".json") or given == "-" or os.path.isfile(given)):
        if not given:
            raise UsageError("the chat message is empty")
        return [{"role": "user", "content": given}]
    try:
        found = json.loads(_read_prompt(given))
    except ValueError as error:
        raise UsageError(f"{given} is not JSON: {error}") from error
    return found["messages"] if isinstance(found, dict) and "messages" in found else found


def _bytes_of(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error


def _quiet_transformers() -> None:
    """Its remarks are for programmers; its progress bars stay where a person watches."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 2**63")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0; --greedy takes the likeliest token always")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
