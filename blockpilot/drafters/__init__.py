"""Drafters: one file and one YAML each; the network of a drafter lies beside it in *_net.py."""
