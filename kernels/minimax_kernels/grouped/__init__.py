"""A linear layer of many experts, each on its own tokens. Read `interface.py` first."""
