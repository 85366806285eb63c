"""Test, then measure a case; append its rows as they are taken, and write pages and pictures.

python -m benchmarks.run                          what there is
python -m benchmarks.run --case native            rows go to benchmarks/results/<device>.csv
python -m benchmarks.run --case native --quick    a few rounds; prints, writes nothing
python -m benchmarks.run --case native --help     the case's own options
python -m benchmarks.run --quick                  every timed comparison, a few rounds each, within a minute
python -m benchmarks.run --pages                  pages and pictures from the committed rows
"""

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from .cases import CASES, about, load


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--case")
    parser = argparse.ArgumentParser(
        prog="benchmarks.run", description=__doc__.splitlines()[0], add_help=False
    )
    parser.add_argument("--case", choices=[*CASES, "all"], help="what to run; 'all': every timed comparison")
    parser.add_argument("--quick", action="store_true", help="a few rounds; writes nothing")
    parser.add_argument("--only", default="", help="tasks whose 'kind dtype length' contains this")
    parser.add_argument("--threads", type=int, help="CPU threads; all of the machine's by default")
    parser.add_argument("--out", type=Path, help="folder for the rows; no page or picture is written then")
    parser.add_argument("--pages", action="store_true", help="only write pages and pictures from the rows")
    parser.add_argument("--list", action="store_true", help="say what there is, as without a case")
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "INDEX"), help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(words)
    if args.list or not (args.case or args.quick or args.pages or rest):
        for name in CASES:
            print(f"{name:17} {about(name)}")
        return 0
    return _run(parser, args, rest)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> int:
    single = load(args.case) if args.case in CASES else None
    parser.add_argument("-h", "--help", action="help")
    if single and hasattr(single, "options"):
        single.options(parser)
    own = parser.parse_args(rest, args)
    own.words = shlex.join(rest)
    import torch

    from .harness import measure

    if own.threads:
        torch.set_num_threads(own.threads)
    if own.peak:
        print(measure.peak_of_task(single, own.peak[0], int(own.peak[1])))
        return 0
    comparisons = [name for name in CASES if hasattr(load(name), "SIDES")] if not own.pages else []
    for name in [args.case] if single else comparisons:
        if status := run_case(name, own):
            return status
    if not own.quick and own.out is None:
        write_pages()
    return 0


def run_case(name: str, options: argparse.Namespace) -> int:
    """Test and measure one case, print its table and, unless `quick`, append its rows as they come."""
    from .harness import measure, pages, rows

    case, start = load(name), time.perf_counter()
    measure.require_green(name, case.TESTS)
    found = []
    try:
        if hasattr(case, "run"):
            measured = case.run(options)
        else:
            measured = measure.timed(name, case, quick=options.quick, only=options.only)
        for row in measured:
            found.append(replace(row, options=options.words))
            if not options.quick:
                rows.append(rows.file_of(name, options.out or rows.RESULTS), found[-1:])
    except measure.Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.status
    print(f"\n{name}: {about(name)}\n")
    if found:
        print(pages.table(name, found))
    print(f"\n{time.perf_counter() - start:.0f} s on {rows.device_name()}")
    return 0


def write_pages() -> None:
    from .harness import pages, plot

    for path, text in pages.pages().items():
        path.write_text(text)
        print(f"wrote {path.name}")
    for path in plot.draw_all():
        print(f"wrote {path.name}")


if __name__ == "__main__":
    sys.exit(main())
