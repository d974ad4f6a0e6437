"""Play: rljax play agents/guess_number --human [--row=3]

One episode of a config's environment, in this process: what the policy reads, and in [[ ]] (green
in a terminal) what it writes, which is what training learns from; then the outcome, its parts and
the tokens. Who plays: you (--human), a run or model folder (--policy=RUN), or a file of replies
parted by lines of --- (--script=FILE).
"""

from rljax.command.launch import ConfigSource
from rljax.config.checks import refuse_early
from rljax.config.policy_options import PlayOptions
from rljax.errors import InputError


def main(options: PlayOptions, source: ConfigSource) -> None:
    """Plays an episode and prints it. Raises InputError for a config without an environment."""
    config = source.config
    refuse_early(config)  # before JAX is imported
    if not config.environment.function:
        fix = 'set environment.function, such as --config.environment.function="guess_number()"'
        raise InputError("the config has no environment to play", fix=fix)
    from rljax.data.online.encoded import load_run_tokenizer
    from rljax.evaluation import play
    from rljax.files import read_text
    from rljax.policies import load_named_policy
    from rljax.tracking.screen import Terminal
    from rljax.validation import validate

    validate(config)
    console = Terminal()
    if options.policy:
        saved = load_named_policy(options.policy, trust_code=options.trust_code)
        tokenizer = saved.tokenizer
        player = play.of_policy(saved, config, greedy=options.greedy, seed=options.seed)
    else:
        tokenizer = load_run_tokenizer(config)
        player = play.by_hand(tokenizer, input, console)
    if options.script:
        player = play.scripted(play.replies_in(read_text(options.script)), tokenizer)
    record = play.row_of(config, tokenizer, options.row, options.split)
    play.play(config, tokenizer, record, player, console, seed=options.seed)
