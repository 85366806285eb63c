"""The report's Figure 1 (right) is reproduced at every marker; the exact counts stand apart."""

import json
from pathlib import Path

import pytest

from minimax_hybrid.config import MiniMaxM1Config
from minimax_hybrid.cost.counts import flops, generation_flops
from minimax_hybrid.cost.plotting import cost_plot
from minimax_hybrid.cost.published import QWEN3, R1, R1_ABSORBED, figure_curves
from minimax_hybrid.cost.report import cost_report, cost_text
from minimax_hybrid.cost.roofline import named_devices

FIGURE = json.loads((Path(__file__).parent.parent / "goldens" / "figure1_right.json").read_text())


@pytest.mark.parametrize("name", list(FIGURE["series"]))
def test_every_marker_lies_on_the_formula(name):
    curve = figure_curves()[name]
    fitted = FIGURE["fit"]["coef"][name]
    assert (curve.linear, curve.quadratic) == (fitted["linear_b"], fitted["quad_c"])
    assert len(FIGURE["series"][name]) == 17
    for marker in FIGURE["series"][name]:
        drawn = curve(marker["gen_len_tokens"])
        assert drawn / 1e16 == pytest.approx(marker["formula_1e16"], rel=1e-15)
        # the markers were read to seven decimals of 1e16
        assert drawn / 1e16 == pytest.approx(marker["flops_1e16"], abs=1e-7)


@pytest.mark.parametrize("label", list(FIGURE["ratios"]))
def test_the_curves_give_the_figure_s_ratios(label):
    expected, curves = FIGURE["ratios"][label], figure_curves()
    T = expected["T"]
    ratio = curves["MiniMax-M1"](T) / curves["DeepSeek R1"](T)
    assert ratio == pytest.approx(expected["M1_over_R1"], rel=1e-12)
    ratio = curves["MiniMax-M1"](T) / curves["Qwen3-235B-A22B"](T)
    assert ratio == pytest.approx(expected["M1_over_Qwen3"], rel=1e-12)


def test_a_quarter_at_100k_is_more_than_a_quarter():
    m1, r1 = (figure_curves()[name] for name in ("MiniMax-M1", "DeepSeek R1"))
    assert f"{m1(102_400) / r1(102_400):.1%} {m1(100_000) / r1(100_000):.1%}" == "28.8% 29.2%"


@pytest.mark.parametrize("peer, form", [(R1, "mla_naive"), (R1_ABSORBED, "mla_absorbed")])
def test_the_exact_ratios_of_the_true_architectures(peer, form):
    expected = FIGURE["corrected_true_architecture_ratio_M1_over_R1"][form]
    for label, T in (("64K", 65536), ("100K(102400)", 102_400), ("128K", 131_072)):
        assert round(generation_flops(MiniMaxM1Config.m1(), T) / peer(T), 4) == expected[label]


def test_a_generation_is_the_sum_of_its_steps():
    config = MiniMaxM1Config.m1()
    assert generation_flops(config, 50) == sum(flops(config, n, "decode").total for n in range(1, 51))
    assert QWEN3(50) - QWEN3(49) == 2 * QWEN3.layers * QWEN3.score_width * 50 + (QWEN3(1) - 2 * 94 * 64 * 256)


@pytest.mark.parametrize("against, expected", [("softmax", "122.3%"), ("r1", "29.0%"), ("qwen3", "47.4%")])
def test_the_report_speaks_and_draws(tmp_path, against, expected):
    config = MiniMaxM1Config.m1()
    report = cost_report(config, against=against, devices=named_devices(["h200"]))
    assert json.loads(json.dumps(report))["parameters"]["total"] == 456_089_655_296
    assert expected in cost_text(report) and "7 x H200" in cost_text(report)
    cost_plot(report, tmp_path / "cost.svg")
    cost_plot(report, tmp_path / "again.svg")
    drawn = (tmp_path / "cost.svg").read_bytes()
    assert drawn.startswith(b"<?xml") and drawn == (tmp_path / "again.svg").read_bytes()


def test_only_m1_itself_is_set_beside_the_figure():
    assert "figure1" in cost_report(MiniMaxM1Config.m1(), against="r1")["lengths"][0]["against"]
    assert "figure1" not in cost_report(MiniMaxM1Config.tiny(), against="r1")["lengths"][0]["against"]


def test_unknown_names_are_refused_in_words():
    with pytest.raises(ValueError, match="'gpt'.*'qwen3'"):
        cost_report(MiniMaxM1Config.tiny(), against="gpt")
    with pytest.raises(ValueError, match="'b300'.*H200"):
        named_devices(["b300"])
