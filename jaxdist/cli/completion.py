"""The command `completion`: a shell's script, which asks `jaxdist completion words` at each press of the key."""

import contextlib
import importlib
import io
import re
from collections.abc import Sequence

from jaxdist.cli.main import COMMANDS
from jaxdist.config.shipped import shipped, with_examples
from jaxdist.errors import CommandParser, reports_mistakes

SCRIPTS = {
    "bash": """_jaxdist() {
    local IFS=$'\\n'
    COMPREPLY=($(jaxdist completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
    [[ ${COMPREPLY-} == *= ]] && compopt -o nospace
    __ltrim_colon_completions "${COMP_WORDS[COMP_CWORD]}" 2> /dev/null || true
}
complete -o default -F _jaxdist jaxdist
""",
    "zsh": """#compdef jaxdist
_jaxdist() {
    local -a found
    found=(${(f)"$(jaxdist completion words -- "${(@)words[2,CURRENT]}" 2> /dev/null)"})
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
    _files
}
compdef _jaxdist jaxdist
""",
    "fish": """function __jaxdist
    jaxdist completion words -- (commandline -opc)[2..] (commandline -ct) 2> /dev/null
end
complete -c jaxdist -a '(__jaxdist)'
""",
}
CONFIGURED = ("train", "explain", "plan")  # commands that take a configuration, or its name
SETTING = (*CONFIGURED, "eval")  # commands that take settings after their first word
_EXAMPLES = (
    'eval "$(jaxdist completion bash)"    # in ~/.bashrc',
    "jaxdist completion fish > ~/.config/fish/completions/jaxdist.fish",
)


def flags_of(command: str) -> list[str]:
    """The options of a command, read from its help."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(COMMANDS[command].module), COMMANDS[command].function)(["--help"], "jaxdist")
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue().partition("\nexamples:")[0])))


def candidates(words: Sequence[str]) -> list[str]:
    """The words that may stand in place of the last one, which is not complete.

    >>> from jaxdist.cli.completion import candidates
    >>> candidates(["train", "quickstart", "optimizer.warm"])
    ['optimizer.warmup_steps=']
    """
    *before, last = words or [""]
    if "--" in before and before[0] == "launch":
        inner = before[before.index("--") + 1 :]
        return (
            candidates([*inner[1:], last])
            if inner[:1] == ["jaxdist"]
            else [each for each in ["jaxdist"] if each.startswith(last)]
        )
    if not before:
        found = list(COMMANDS)
    elif before[0] not in COMMANDS:
        found = []
    elif last.startswith("-"):
        found = flags_of(before[0])
    elif before[0] == "completion":
        found = list(SCRIPTS)
    elif before[0] in SETTING:
        from jaxdist.config.reader import key_names
        from jaxdist.config.schema import Config

        named = any(not word.startswith("-") for word in before[1:])
        names = list(shipped()) if before[0] in CONFIGURED else []
        found = [f"{key}=" for key in key_names(Config)] if named else names
    else:
        found = []
    return [each for each in found if each.startswith(last)]


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist completion") -> int:
    """Exit status: 0, or 2 for a shell that is not known."""
    if argv[:1] == ["words"]:  # asked by the scripts
        print("\n".join(candidates(argv[2:])))
        return 0
    parser = CommandParser(prog=prog, description="Print the completion script of a shell.", **with_examples(_EXAMPLES))
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="whose script is printed")
    print(SCRIPTS[parser.parse_args(argv).shell], end="")
    return 0
