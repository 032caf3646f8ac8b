"""``rl-coserve completion``: a static script that completes commands, their options, and the keys of a config.

Nothing of rl-coserve runs while a user types: the words are in the script. It is printed anew after an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from orchestrator.config import Config
from orchestrator.settings.config_mistakes import paths_of

_BASH = """# rl-coserve {version}: completion of commands, options and keys of a config.
#   bash: source <(rl-coserve completion bash)      zsh: source <(rl-coserve completion zsh)
_rl_coserve() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$command" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "$command" in
        {configured})
            case "$word" in
                -*) ;;
                *.*) COMPREPLY+=($(compgen -S = -W "{keys}" -- "$word")); compopt -o nospace 2>/dev/null ;;
            esac ;;
    esac
    COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -o filenames -F _rl_coserve rl-coserve
"""
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"


def completion_script(shell: str, commands: Mapping[str, argparse.ArgumentParser], version: str) -> str:
    """For ``bash`` or ``zsh``."""
    cases, configured = [], []
    for name, parser in sorted(commands.items()):
        options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        choices = [
            str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()
        ]
        runs = ["latest"] if any(action.metavar == "RUN" for action in parser._actions) else []
        cases.append(f'        {name}) words="{" ".join([*options, *choices, *runs])}" ;;')
        if any(action.dest == "overrides" for action in parser._actions):
            configured.append(name)
    text = _BASH.format(
        version=version,
        commands=" ".join(sorted(commands)),
        cases="\n".join(cases),
        configured="|".join(configured),
        keys=" ".join(".".join(path) for path in paths_of(Config) if len(path) > 1),
    )
    return _ZSH + text if shell == "zsh" else text
