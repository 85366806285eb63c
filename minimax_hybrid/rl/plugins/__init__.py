"""The objective inside other trainers, one file for each."""
