"""Completion: rljax completion bash | zsh | fish

Prints a script that completes commands, their flags, the few values of flags, configs that ship,
fields behind --config. and the functions that a field may name. It holds all words: a press of the
key starts no Python.

    source <(rljax completion bash)           in ~/.bashrc
    source <(rljax completion zsh)            in ~/.zshrc, after compinit
    rljax completion fish | source            in ~/.config/fish/config.fish
"""

import shlex
from collections.abc import Iterable, Mapping

from rljax.command.commands import COMMANDS
from rljax.config.checks import components_of
from rljax.config.declare import option_words
from rljax.config.flags import shipped_configs
from rljax.config.run_options import SHELLS, CompletionOptions
from rljax.config.schema import FIELDS, NAMESPACES
from rljax.config.service_options import PodOptions


def main(options: CompletionOptions) -> None:
    """Prints the script of a shell."""
    script = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[options.shell]
    print(script.replace("@CASES@", _cases(words(), fish=options.shell == "fish")), end="")


def words() -> dict[str, list[str]]:
    """Returns {key: the words that may stand there}. The keys are "" for the first word, "data" for
    the second word of `rljax data`, "train -" for the flags of a command, "train +" for its
    words without a flag, "pod --api=" for the values of a flag, "--config." and "--config.seed="
    for fields."""
    groups = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
    table = {"": [*groups, "--help", "--version"]}
    for group in groups:
        if others := [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{group} ")]:
            table[group] = others
    configs = list(shipped_configs())
    for name, command in COMMANDS.items():
        flags = option_words(command.options)
        table |= {f"{name} {flag}": list(values) for flag, values in flags.items() if values}
        table[f"{name} -"] = [*flags, "--help"]
        if command.config:
            table[f"{name} -"] += ["--config=", "--config.", "--print_config"]
            table[f"{name} +"] = configs
    table |= {
        "config diff +": configs,
        "completion +": list(SHELLS),
        "pod +": [*PodOptions.READ_BY],
    }
    table["--config="] = configs
    table["--config."] = [f"--config.{field}=" for field in FIELDS]
    for field, spec in FIELDS.items():
        if spec.kind is bool:
            table[f"--config.{field}="] = ["true", "false"]
        elif spec.component:
            table[f"--config.{field}="] = components_of(NAMESPACES[spec.component])
    return table


def _cases(table: Mapping[str, Iterable[str]], fish: bool) -> str:
    """Returns the branches of a `case` of bash and zsh, or of a `switch` of fish, that print the
    words of a key, one a line."""
    lines = []
    for key, values in table.items():
        quoted = " ".join(shlex.quote(word) for word in values)
        if fish:
            lines.append(f"        case {shlex.quote(key)}\n            printf '%s\\n' {quoted}")
        else:
            lines.append(f"    {shlex.quote(key)}) printf '%s\\n' {quoted} ;;")
    return "\n".join(lines)


# The key that a shell asks for, by the words before the one that is typed, is the same in all of
# them:
#   flag with a value: "--config.FIELD=", "--config=", else "COMMAND --flag="
#   begins with --config.: the fields; begins with -: "COMMAND -"; else "COMMAND +", and files.
_BASH = """\
# Completion of rljax for bash: source <(rljax completion bash)
_rljax_words() {
  case "$1" in
@CASES@
  esac
}
_rljax() {
  local IFS=$' \\t\\n' line=${COMP_LINE:0:COMP_POINT} current command key typed
  local -a given
  read -ra given <<< "$line"
  [[ $line == *[[:space:]] ]] && given+=("")
  current=${given[${#given[@]}-1]}
  COMPREPLY=()
  if (( ${#given[@]} <= 2 )); then
    key="" typed=$current
  else
    command=${given[1]}
    if [[ -n $(_rljax_words "$command") ]] && (( ${#given[@]} == 3 )); then
      key=$command typed=$current
    else
      [[ -n $(_rljax_words "$command ${given[2]} -") ]] && command="$command ${given[2]}"
      typed=${current#*=}
      case "$current" in
        --config=*|--config.*=*) key="${current%%=*}=" ;;
        --*=*) key="$command ${current%%=*}=" ;;
        --config.*) key="--config." typed=$current ;;
        -*) key="$command -" typed=$current ;;
        *) key="$command +" typed=$current ;;
      esac
    fi
  fi
  local IFS=$'\\n'
  COMPREPLY=($(compgen -W "$(_rljax_words "$key")" -- "$typed"))
  case "$key" in
    *" -"|--config.|"") ;;
    *) [[ $key == *[+=] ]] && { compopt -o filenames; COMPREPLY+=($(compgen -f -- "$typed")); } ;;
  esac
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
  # Readline replaces what stands behind the last = or : alone, where these break words.
  local head=${typed%"${typed##*[=:]}"}
  [[ -n $head && $COMP_WORDBREAKS == *"${head: -1}"* ]] && COMPREPLY=("${COMPREPLY[@]#"$head"}")
  [[ $typed != "$current" && $COMP_WORDBREAKS != *=* ]] &&
    COMPREPLY=("${COMPREPLY[@]/#/"${current%%=*}="}")
}
complete -F _rljax rljax
"""

_ZSH = """\
#compdef rljax
# Completion of rljax for zsh: source <(rljax completion zsh), after compinit
_rljax_words() {
  case "$1" in
@CASES@
  esac
}
_rljax() {
  local current=$words[CURRENT] command key head=""
  local -a found
  if (( CURRENT == 2 )); then
    key=""
  else
    command=$words[2]
    if (( CURRENT == 3 )) && [[ -n "$(_rljax_words "$command")" ]]; then
      key=$command
    else
      [[ -n "$(_rljax_words "$command $words[3] -")" ]] && command="$command $words[3]"
      case "$current" in
        --config=*|--config.*=*) key="${current%%=*}=" head="${current%%=*}=" ;;
        --*=*) key="$command ${current%%=*}=" head="${current%%=*}=" ;;
        --config.*) key="--config." ;;
        -*) key="$command -" ;;
        *) key="$command +" ;;
      esac
    fi
  fi
  found=(${(f)"$(_rljax_words "$key")"})
  local -a open=(${(M)found:#*[=.]}) closed=(${found:#*[=.]})
  (( $#open )) && compadd -S '' -- $open
  (( $#closed )) && compadd -- $head$^closed
  if [[ $key == *[+=] ]]; then
    [[ -n $head ]] && compset -P '*='
    _files
  fi
}
(( $+functions[compdef] )) && compdef _rljax rljax
"""

_FISH = """\
# Completion of rljax for fish: rljax completion fish | source
function __rljax_words
    switch "$argv[1]"
@CASES@
    end
end
function __rljax_complete
    set -l given (commandline -opc)
    set -l current (commandline -ct)
    if test (count $given) -eq 1
        __rljax_words ''
        return
    end
    set -l command $given[2]
    if test (count $given) -eq 2; and test -n "$(__rljax_words $command)"
        __rljax_words $command
        return
    end
    if test (count $given) -ge 3; and test -n "$(__rljax_words "$command $given[3] -")"
        set command "$command $given[3]"
    end
    set -l head (string replace -r '=.*' '=' -- $current)
    switch "$current"
        case '--config=*' '--config.*=*'
            printf "$head%s\\n" (__rljax_words $head)
            printf "$head%s\\n" (__fish_complete_path (string replace -r '^[^=]*=' '' -- $current))
        case '--*=*'
            printf "$head%s\\n" (__rljax_words "$command $head")
            printf "$head%s\\n" (__fish_complete_path (string replace -r '^[^=]*=' '' -- $current))
        case '--config.*'
            __rljax_words --config.
        case '-*'
            __rljax_words "$command -"
        case '*'
            __rljax_words "$command +"
            __fish_complete_path $current
    end
end
complete -c rljax -f -a '(__rljax_complete)'
"""
