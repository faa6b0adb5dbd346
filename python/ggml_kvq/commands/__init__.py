"""Subcommands of `ggml-kvq`; each module offers register(subparsers)."""
