"""A good small checkpoint, shared by the tests of loading and conversion."""

from pathlib import Path

import pytest
from tiny import many_experts

from minimax_hybrid import MiniMaxM1ForCausalLM


@pytest.fixture(scope="session")
def small() -> MiniMaxM1ForCausalLM:
    return many_experts()


@pytest.fixture(scope="session")
def good(small: MiniMaxM1ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint in several shards; read only."""
    folder = tmp_path_factory.mktemp("good")
    small.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder
