"""The needle is where it is said to be, and only whole answers count."""

import pytest
import torch

from benchmarks.cases import passkey


@pytest.mark.parametrize("T", [16, 100])
def test_a_needle_lies_anywhere_and_its_digits_are_the_answer(T):
    ids, digits = passkey.needles(400, T, torch.Generator().manual_seed(0))
    assert ids.shape == (400, T) and digits.shape == (400, passkey.DIGITS)
    row, start = (ids == passkey.KEY).nonzero(as_tuple=True)
    assert torch.equal(row, torch.arange(400))
    hidden = ids.gather(1, start[:, None] + 1 + torch.arange(passkey.DIGITS))
    assert torch.equal(hidden, digits)
    assert (ids[:, -passkey.DIGITS] == passkey.ASK).all() and (ids == passkey.ASK).sum() == 400
    assert torch.equal(ids[:, T - passkey.DIGITS + 1 :], digits[:, :-1])
    latest = T - 2 * passkey.DIGITS - 2
    assert start.min() == 0 and start.max() == latest
    assert sorted(set(start.tolist())) == list(range(latest + 1))


def test_accuracy_is_one_for_a_model_that_knows_and_counts_whole_answers():
    ids, digits = passkey.needles(20, 64, torch.Generator().manual_seed(1))
    plan = passkey.Plan(samples=20)

    def oracle(inputs, **_):
        found = torch.stack([digits[(ids == one).all(1).nonzero()[0, 0]] for one in inputs])
        found[:, 0] = (found[:, 0] + (inputs[:, 0] % 2)) % 10  # wrong in the first digit for odd ones
        logits = torch.nn.functional.one_hot(found, passkey.VOCABULARY).float()
        return type("Output", (), {"logits": logits})

    right = passkey.accuracy(oracle, 64, plan)
    assert sum(right) == int((ids[:, 0] % 2 == 0).sum()) and 0 < sum(right) < 20


def test_passkey_models_differ_in_the_kinds_of_their_layers_only():
    configs = {kind: passkey.passkey_config(kind).to_dict() for kind in passkey.KINDS}
    kinds = {kind: config.pop("attn_type_list") for kind, config in configs.items()}
    assert configs["hybrid"] == configs["lightning"] == configs["softmax"]
    assert kinds["hybrid"].count(1) == 1 and set(kinds["lightning"]) == {0} and set(kinds["softmax"]) == {1}
