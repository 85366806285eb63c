"""Experiments with the policy: each module is one experiment, run by name; README.md is what they found."""
