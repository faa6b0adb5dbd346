"""`ggml-kvq completion SHELL`: completion of our subcommands and flags, of the launchers' too, generated from the
parser and the methods.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

HELP = "print shell completion for ggml-kvq and for the launchers' own flags (bash, zsh, fish)"


def register(subparsers: Any) -> None:
    """Add the `completion` parser."""
    p = subparsers.add_parser(
        "completion",
        help=HELP,
        description=HELP + '. In ~/.bashrc: eval "$(ggml-kvq completion bash)"; in ~/.config/fish/config.fish:'
        " ggml-kvq completion fish | source",
    )
    p.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads it")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry point."""
    if args.shell == "fish":
        print(fish_script())
        return 0
    print(("autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else "") + script())
    return 0


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Subcommand -> its parser."""
    from ..cli import build_parser

    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("the parser has no subcommands")


def script() -> str:
    """A bash script; zsh reads it through bashcompinit."""
    from .. import methods
    from ..launch.flags import OURS, OURS_RPC_SERVER

    table = methods.table()
    names = " ".join(row["name"] for row in table)
    commands = subcommands()
    cases, values = [], []
    for name, parser in commands.items():
        flags = [s for a in parser._actions for s in a.option_strings]
        words = [str(c) for a in parser._actions if not a.option_strings and a.choices for c in a.choices]
        words += names.split() if name == "methods" else []
        cases.append(f'        {name}) words="{" ".join([*flags, *words])}" ;;')
        for action in parser._actions:
            if action.option_strings and action.choices:
                choices = " ".join(map(str, action.choices))
                values += [f'        "{name} {flag}") words="{choices}" ;;' for flag in action.option_strings]
    options = "\n".join(
        f'        {row["name"]}) words="{" ".join(o["key"] + "=" for o in row["options"])}" ;;' for row in table
    )
    flags_text = " ".join(dict.fromkeys([*OURS, *OURS_RPC_SERVER]))
    return f"""\
# ggml-kvq: subcommands and flags; llama-*: the flags of the launchers, everything else is completed as files
_ggml_kvq() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} sub=${{COMP_WORDS[1]}} words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$cur"))
        return
    fi
    case "$sub $prev" in
{chr(10).join(values)}
        *" --cache") words="f16 upstream:q8_0 upstream:q4_0 {names}" ;;
    esac
    [ -n "$words" ] || case "$sub" in
{chr(10).join(cases)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
_ggml_kvq_launcher() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} words="" method="" i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        [ "${{COMP_WORDS[i]}}" = --kv-method ] && method=${{COMP_WORDS[i+1]}}
    done
    case "$prev" in
        --kv-method | --kv-method-draft) words="{names} none" ;;
        --kv-opt) case "$method" in
{options}
        esac ;;
        *) words="{flags_text}" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}}
complete -o default -o bashdefault -F _ggml_kvq ggml-kvq
for program in llama-cli llama-completion llama-server llama-bench llama-perplexity llama-rpc-server; do
    complete -o default -o bashdefault -F _ggml_kvq_launcher $program
done"""


def fish_script() -> str:
    """A fish script: one `complete` a subcommand, a flag and a list of values."""
    from .. import methods
    from ..launch.flags import OURS, OURS_RPC_SERVER

    table = methods.table()
    names = " ".join(row["name"] for row in table)
    commands = subcommands()

    def complete(program: str, when: str, what: str) -> str:
        return f"complete -c {program}" + (f" -n '{when}'" if when else "") + f" {what}"

    def flag_of(flag: str) -> str:
        return f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"

    lines = [
        "# ggml-kvq: subcommands and flags; llama-*: the flags of the launchers, everything else is completed as files",
        complete("ggml-kvq", "__fish_use_subcommand", f"-f -a '{' '.join(commands)}'"),
        complete("ggml-kvq", "__fish_use_subcommand", "-l version"),
        complete("ggml-kvq", "", "-l help"),
    ]
    for name, parser in commands.items():
        here = f"__fish_seen_subcommand_from {name}"
        words = [str(c) for a in parser._actions if not a.option_strings and a.choices for c in a.choices]
        words += names.split() if name == "methods" else []
        if words:
            lines.append(complete("ggml-kvq", here, f"-f -a '{' '.join(words)}'"))
        for action in parser._actions:
            choices = " ".join(map(str, action.choices or []))
            choices = f"f16 upstream:q8_0 upstream:q4_0 {names}" if "--cache" in action.option_strings else choices
            value = f" -x -a '{choices}'" if choices else "" if action.nargs == 0 else " -r"
            lines += [
                complete("ggml-kvq", here, flag_of(flag) + value) for flag in action.option_strings if flag != "--help"
            ]
    # the method that the line names decides which options there are
    lines += [
        "function __ggml_kvq_options",
        "    set -l words (commandline -opc)",
        "    set -l at (contains -i -- --kv-method $words); or return",
        "    switch $words[(math $at + 1)]",
    ]
    for row in table:
        keys = " ".join(o["key"] + "=" for o in row["options"])
        if keys:
            lines += [f"        case {row['name']}", f"            string split ' ' '{keys}'"]
    lines += ["    end", "end"]
    for program in ("llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity"):
        lines += _fish_flags(complete, program, list(OURS), names)
    lines += _fish_flags(complete, "llama-rpc-server", list(OURS_RPC_SERVER), names)
    return "\n".join(lines)


def _fish_flags(complete: Callable[[str, str, str], str], program: str, flags: list[str], names: str) -> list[str]:
    """The lines of a launcher's flags."""
    values = {
        "--kv-method": f"-x -a '{names} none'",
        "--kv-method-draft": f"-x -a '{names} none'",
        "--kv-opt": "-x -a '(__ggml_kvq_options)'",
    }
    return [complete(program, "", f"-l {flag[2:]} {values.get(flag, '-r')}") for flag in flags]
