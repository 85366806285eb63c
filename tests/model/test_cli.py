"""The command line: the same text as the library's, and words for whatever cannot be done."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import checkpoint
from transformers.utils import logging

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM, cli
from minimax_hybrid.cost.counts import inference_bytes, parameters
from minimax_hybrid.text import GenerationSettings, encode, generate_text, load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
GREEDY = ["--greedy", "--max-new-tokens", "12"]


@pytest.fixture(autouse=True)
def transformers_speaks_as_before():
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model whose texts never end."""
    return checkpoint(tmp_path_factory.mktemp("endless"), ends=False)


@pytest.fixture
def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def run(capsys):
    """main(arguments) -> exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # argparse
            code = stopped.code
        return code, *capsys.readouterr()

    return run


def give_input(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def greedy_text(folder: Path, prompt: str) -> str:
    """What transformers' generate gives, without any of the command's code."""
    model, tokenizer = MiniMaxM1ForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    tokens = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_one_prompt_is_continued_and_its_speed_told(run, folder):
    code, out, err = run("generate", "--model", folder, "--prompt", "12+34=", *GREEDY)
    assert (code, out) == (0, greedy_text(folder, "12+34=") + "\n")
    assert err.startswith("prefill 6 tokens in ") and "\ndecode " in err and "tokens/s" in err
    assert "ended: " in err


def test_a_prompt_may_come_from_a_file_or_standard_input(run, folder, tmp_path, monkeypatch):
    file = tmp_path / "prompt"
    file.write_text("two\nlines\n")
    wanted = 0, greedy_text(folder, "two\nlines") + "\n"
    assert run("generate", "--model", folder, "--prompt-file", file, *GREEDY)[:2] == wanted
    for arguments in ([], ["--prompt-file", "-"]):
        give_input(monkeypatch, b"two\nlines\n")
        assert run("generate", "--model", folder, *arguments, *GREEDY)[:2] == wanted


def test_several_prompts_are_one_batch_each_as_if_alone(run, folder):
    prompts = ["a", "12+34=", "hello there"]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    code, out, err = run("generate", "--model", folder, *given, *GREEDY)
    texts = [greedy_text(folder, prompt) for prompt in prompts]
    assert code == 0 and out == "".join(f"--- text {i}\n{text}\n" for i, text in enumerate(texts, start=1))
    assert "prefill 18 tokens" in err and "text 3 ended: " in err
    rows = run("generate", "--model", folder, *given, *GREEDY, "--json")[1].splitlines()
    assert [json.loads(row)["text"] for row in rows] == texts
    assert [json.loads(row)["prompt"] for row in rows] == prompts


def test_a_chat_is_the_templates_text_with_the_assistants_turn_opened(run, folder, tmp_path):
    wanted = greedy_text(folder, "user: hi\nassistant: ")
    assert run("generate", "--model", folder, "--chat", "hi", *GREEDY)[:2] == (0, wanted + "\n")
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    for content in (messages, {"messages": messages}):
        file = tmp_path / "chat.json"
        file.write_text(json.dumps(content))
        assert run("generate", "--model", folder, "--chat", file, *GREEDY)[:2] == (0, wanted + "\n")


def test_sampling_has_the_reports_settings_and_repeats_with_a_seed(run, folder):
    first, again, other = (
        run("generate", "--model", folder, "--prompt", "ab", "--max-new-tokens", 30, "--seed", seed)[1]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = torch.tensor([tokenizer("ab")["input_ids"]])
    torch.manual_seed(1)
    tokens = model.generate(
        ids, do_sample=True, temperature=1.0, top_p=0.95, top_k=0, max_new_tokens=30, pad_token_id=0
    )
    assert first == tokenizer.decode(tokens[0, 2:], skip_special_tokens=True) + "\n"


def test_nothing_is_asked_of_a_network(run, folder, tmp_path, monkeypatch):
    asked = []

    def refuse(*address: object, **options: object) -> None:
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run("generate", "--model", folder, "--chat", "hi", *GREEDY)[0] == 0
    assert run("inspect", folder)[0] == 0
    assert run("convert", folder, tmp_path / "new", "--layout", "minimax")[0] == 0
    assert run("generate", "--model", "someone/some-model", "--prompt", "a")[0] == 1
    assert not asked


def test_why_a_text_ended_is_told(run, folder, endless):
    start = "generate", "--prompt", "ab", "--greedy"
    assert "length limit after 3 tokens" in run(*start, "--model", endless, "--max-new-tokens", 3)[2]
    stopped = run(*start, "--model", endless, "--repetition-stop", 4, "--repetition-threshold", 1e-9)[2]
    assert "repetition stop after 4 tokens" in stopped
    rows = [
        json.loads(run("generate", "--model", folder, "--prompt", "ab", "--seed", seed, "--json")[1])
        for seed in range(3)
    ]
    ended = [row for row in rows if row["reason"] == "end"]
    assert ended and all(row["tokens"] == len(row["text"]) + 1 for row in ended)


def test_streamed_pieces_make_the_text_and_no_character_is_split(folder):
    """Byte tokens: a character of several bytes appears once it is whole."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(43)} | {
        f"<0x{byte:02X}>": 43 + i for i, byte in enumerate("é€😀".encode())
    }
    backend = Tokenizer(models.BPE(vocab=byte_tokens, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    from minimax_hybrid.text import TokenStream

    pieces: list[str] = []
    watch = TokenStream(tokenizer, pieces.append)
    watch.put(torch.tensor([[1]]))
    for token in range(43, 43 + 9):
        watch.put(torch.tensor([token]))
    watch.end()
    assert pieces == ["é", "€", "😀"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", ""], 2, "the prompt is empty"),
        (["--chat", ""], 2, "the chat message is empty"),
        (["--prompt", "12 é ß"], 2, "does not know these characters of the prompt: 'ßé'"),
        (["--chat", "é"], 2, "does not know these characters"),
        (["--prompt", "a\udcff"], 2, "refuses the prompt"),
        (["--prompt-file", "absent.txt"], 2, "absent.txt cannot be read: No such file"),
        (["--chat", "absent.json"], 2, "absent.json cannot be read: No such file"),
        (["--prompt", "a", "--temperature", "0"], 2, "--greedy"),
        (["--prompt", "a", "--top-p", "1.5"], 2, "not above 0 and at most 1"),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "0 is less than 1"),
        (["--prompt", "a", "--max-new-tokens", "many"], 2, "invalid"),
        (["--prompt", "a", "--colour", "red"], 2, "unknown arguments: --colour red"),
        (["--prompt", "a", "--repetition-stop", "3", "--repetition-threshold", "1"], 1, "threshold is 1.0"),
        (["--prompt", "a", "--seed", str(2**70)], 2, "not between 0 and"),
        (["--prompt", "a", "--device", "meta"], 1, "device 'meta' cannot be used here"),
        (["--prompt", "a", "--device", "nowhere"], 1, "device 'nowhere' cannot be used here"),
        (["--prompt", "a", "--model", "absent"], 1, "there is no absent"),
    ],
)
def test_what_cannot_be_generated_is_told_in_words(run, folder, arguments, code, words):
    found, out, err = run("generate", "--model", folder, *arguments)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err


def test_no_prompt_at_all_is_told_and_not_waited_for(run, folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = run("generate", "--model", folder)
    assert code == 2 and "no prompt: give --prompt" in err
    give_input(monkeypatch, b"caf\xe9")
    code, _, err = run("generate", "--model", folder)
    assert code == 2 and "not UTF-8" in err


def _short_weights(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-5])


def _larger_tokenizer(copy: Path) -> None:
    config = MiniMaxM1Config.from_pretrained(copy, vocab_size=5, eos_token_id=0)
    MiniMaxM1ForCausalLM(config).save_pretrained(copy)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda copy: (copy / "config.json").unlink(), "holds no config.json"),
        (lambda copy: (copy / "config.json").write_text('{"model_type": "llama"}'), "of type 'llama'"),
        (lambda copy: (copy / "config.json").write_text("{"), "is no model's configuration"),
        (lambda copy: (copy / "tokenizer.json").unlink(), "holds no tokenizer (tokenizer.json)"),
        (lambda copy: (copy / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda copy: (copy / "model.safetensors").unlink(), "holds no weights"),
        (_short_weights, "not a whole safetensors file"),
        (_larger_tokenizer, "the model has 5"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_in_words(run, copy, spoil, words):
    spoil(copy)
    code, out, err = run("generate", "--model", copy, "--prompt", "xyz")
    assert (code, out) == (1, "") and words in err and "Traceback" not in err


def test_inspect_counts_without_reading_weights(run, folder):
    code, out, _ = run("inspect", folder, "--json")
    report, config = json.loads(out), MiniMaxM1Config.from_pretrained(folder)
    model = MiniMaxM1ForCausalLM.from_pretrained(folder)
    assert code == 0 and report["fits"] and report["layers"] == ["lightning", "softmax"]
    assert report["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert report["parameters"]["active"] == parameters(config).active
    assert report["weights"]["tensors"] == len(load_file(folder / "model.safetensors"))
    assert report["weights"]["bytes_by_dtype"] == {"F32": 4 * report["parameters"]["total"]}
    for length in (4096, 131072, 1048576):
        needed = report["inference_bytes"][str(length)]["total"]
        assert needed == inference_bytes(config, length, dtype="float32")
    text = run("inspect", folder)[1]
    assert "2: 1 lightning, 1 softmax (softmax: 1)" in text and "128K" in text and "1M" in text
    assert f"{report['parameters']['total']:,}" in text and "none is left over" in text


def test_inspect_names_tensors_that_do_not_fit(run, copy):
    file = copy / "model.safetensors"
    tensors = load_file(file)
    moved = tensors.pop("model.layers.0.input_layernorm.weight")
    tensors["model.layers.0.first_norm.weight"] = moved
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
    save_file(tensors, file, metadata={"format": "pt"})
    code, out, _ = run("inspect", copy)
    assert code == 1
    assert "missing     model.layers.0.input_layernorm.weight" in out
    assert "left over   model.layers.0.first_norm.weight (in model.safetensors)" in out
    assert "model.embed_tokens.weight (in model.safetensors) is [42, 32], the config asks for [43, 32]" in out
    report = json.loads(run("inspect", copy, "--json")[1])
    assert not report["fits"] and report["weights"]["missing"] == ["model.layers.0.input_layernorm.weight"]


def test_inspect_of_a_config_alone_says_that_weights_are_absent(run, copy):
    (copy / "model.safetensors").unlink()
    code, out, _ = run("inspect", copy)
    assert code == 1 and "holds no weights" in out and "parameters" in out
    code, out, err = run("inspect", copy / "absent")
    assert (code, out) == (1, "") and "there is no" in err


def test_cost_draws(run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "cost.svg"
    assert run("cost", "tiny", "--plot", picture)[0] == 0 and "<svg" in picture.read_text()
    code, _, err = run("cost", "m1", "--plot", "/proc/none/cost.svg")
    assert code == 1 and "/proc/none" in err and "Traceback" not in err


def test_cost_reads_names_folders_and_files(run, folder):
    config = MiniMaxM1Config.from_pretrained(folder)
    for source in (folder, folder / "config.json"):
        code, out, _ = run("cost", source, "--json", "--lengths", 1024, 2048)
        report = json.loads(out)
        assert code == 0 and report["parameters"]["total"] == parameters(config).total
        assert [row["length"] for row in report["lengths"]] == [1024, 2048]
    assert "456,089,655,296" in run("cost", "m1", "--against", "r1")[1]
    assert run("cost", "tiny", "--device", "h200")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m2"], "there is no m2"),
        (["m1", "--device", "abacus"], "device 'abacus' is unknown"),
        (["m1", "--dtype", "decimal"], "dtype is 'decimal'"),
    ],
)
def test_what_has_no_cost_is_told_in_words(run, arguments, words):
    code, _, err = run("cost", *arguments)
    assert code == 1 and words in err and "Traceback" not in err


def test_convert_there_and_back_gives_the_same_weights_and_text(run, folder, tmp_path):
    stacked, back = tmp_path / "stacked", tmp_path / "back"
    code, _, err = run("convert", folder, stacked, "--layout", "minimax")
    assert code == 0 and "note: transformers' MiniMaxForCausalLM computes another model" in err
    assert run("inspect", stacked)[0] == 0
    text = run("generate", "--model", stacked, "--prompt", "ab", *GREEDY)[1]
    assert text == greedy_text(folder, "ab") + "\n"
    assert run("convert", stacked, back, "--layout", "minimax_m1") == (0, "", "")
    first, last = (load_file(place / "model.safetensors") for place in (folder, back))
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    code, _, err = run("convert", folder, back, "--layout", "minimax_m1")
    assert code == 1 and str(back) in err
    assert run("convert", folder, tmp_path / "new", "--layout", "other")[0] == 2


def test_train_runs_a_settings_file(run, folder, tmp_path):
    settings = tmp_path / "train.toml"
    sizes = "batches = 1\nprompts = 2\nresponses = 2\nupdates = 1\nwindows = [4]\nevaluation_problems = 2\n"
    settings.write_text(
        f'model = "{folder}"\noutput = "{tmp_path / "run"}"\ntask = "addition"\ndifficulty = 1\n'
        f'learning_rate = 1e-5\n{sizes}[objective]\nname = "cispo"\nratio_max = 5.0\n'
    )
    code, _, err = run("train", settings)
    assert code == 0
    checkpoint = Path(err.strip().rpartition("the last checkpoint is ")[2])
    assert run("inspect", checkpoint)[0] == 0
    code, out, _ = run("generate", "--model", checkpoint, "--prompt", "1+2=", *GREEDY)
    assert code == 0 and out


def test_settings_that_cannot_be_trained_with_are_told_in_words(run, tmp_path):
    settings = tmp_path / "train.toml"
    settings.write_text("batches = 1\nspeed = 3\n")
    code, _, err = run("train", settings)
    assert code == 1 and "unknown settings ['speed']" in err
    code, _, err = run("train", tmp_path / "absent.toml")
    assert code == 1 and "absent.toml" in err and "Traceback" not in err


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "minimax_hybrid", *map(str, arguments)]


@pytest.mark.slow
def test_bench_hands_its_arguments_to_the_benchmarks():
    done, alone = (
        subprocess.run(command("bench", *arguments), capture_output=True, text=True)
        for arguments in (["--list"], [])
    )
    assert done.returncode == alone.returncode == 0 and done.stdout == alone.stdout != ""
    done = subprocess.run(command("bench", "--case", "absent"), capture_output=True, text=True)
    assert done.returncode == 2 and "absent" in done.stderr


def test_bench_of_an_installed_package_says_what_is_missing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "minimax_hybrid" / "cli.py"))
    code, _, err = run("bench", "--list")
    assert code == 2 and "not part of an installed package" in err


def _started(endless: Path) -> subprocess.Popen:
    """A generation that goes on for long, after its first characters."""
    arguments = "generate", "--model", endless, "--prompt", "ab", "--max-new-tokens", 1000000
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # a run of the tests in the background hands down an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.read(3)
    return process


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(endless):
    process = _started(endless)
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait(60) == 1 and error == ""


@pytest.mark.slow
def test_a_reader_that_reads_nothing_is_no_error_of_ours(folder):
    process = subprocess.Popen(
        command("inspect", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 1


def test_ctrl_c_ends_it_in_one_word(endless):
    process = _started(endless)
    os.kill(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130 and error.strip() == "minimax-hybrid: interrupted"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["python", "gpu", "cpu"],
)
def test_too_little_memory_is_said_in_words(run, monkeypatch, error):
    monkeypatch.setattr(cli, "_read_chat", lambda chat: (_ for _ in ()).throw(error))
    code, _, err = run("generate", "--chat", "x")
    assert code == 1 and f"not enough memory: {error}" in err


def test_an_illegal_memory_access_is_not_called_too_little_memory(run, monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(cli, "_read_chat", lambda chat: (_ for _ in ()).throw(error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run("generate", "--chat", "x")


def test_the_configuration_is_read_once(run, folder, monkeypatch):
    read, reads = MiniMaxM1Config.get_config_dict.__func__, []
    monkeypatch.setattr(
        MiniMaxM1Config,
        "get_config_dict",
        classmethod(lambda cls, *args, **kwargs: reads.append(args) or read(cls, *args, **kwargs)),
    )
    assert run("generate", "--model", folder, "--prompt", "12+34=", *GREEDY)[0] == 0
    assert len(reads) == 1


def test_a_command_is_asked_for(run):
    assert run()[0] == 2


def test_showing_as_it_comes_is_for_one_text(folder):
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompts = [encode(tokenizer, text) for text in ("a", "b")]
    with pytest.raises(ValueError, match="one prompt only, got 2"):
        generate_text(model, tokenizer, prompts, GenerationSettings(), show=print)


@pytest.mark.parametrize("prompts", [[], [[1], []]], ids=["none", "one of no tokens"])
def test_prompts_without_tokens_are_refused(folder, prompts):
    with pytest.raises(ValueError, match="give at least one prompt, and a token in each"):
        generate_text(load_model(folder), load_tokenizer(folder), prompts, GenerationSettings())
