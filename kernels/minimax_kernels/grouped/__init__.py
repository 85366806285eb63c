"""A linear layer of many experts, each on its own rows. Read `interface.py` first."""
