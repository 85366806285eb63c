"""The policy inside other trainers, one file for each."""
