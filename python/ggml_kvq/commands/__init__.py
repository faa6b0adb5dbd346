"""Subcommands of `ggml-kvq`, one module each; see ggml_kvq.cli.build_parser for the contract."""
