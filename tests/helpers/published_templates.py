"""Published chat templates, each with a small tokenizer that has its special tokens."""

import importlib.util
import json
import re
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<\|[a-z_]{1,20}>|<[a-z_]{1,20}\|>|</?s>|<sop>"
    r"|<(?:start_of_turn|end_of_turn|bos|eos|end_of_utterance)>|<SPECIAL_\d+>"
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|SYSTEM_PROMPT|gMASK)\]"
)


def published_templates() -> dict[str, Path]:
    """Name -> file: those of tests/helpers/templates, and those of trl where it is installed."""
    found = {path.stem: path for path in sorted((HERE / "templates").glob("*.jinja"))}
    trl = importlib.util.find_spec("trl")  # which is not imported
    if trl is not None:
        folder = Path(trl.origin).parent / "chat_templates"
        found |= {f"trl-{path.stem}": path for path in sorted(folder.glob("*.jinja"))}
    return found


def write_base_model(folder: Path, template: Path) -> Path:
    """A base model's tokenizer folder: its end-of-text token is none of the template's, and nothing
    else says where a turn ends."""
    text = template.read_text()
    # Some templates put the names of roles into their tokens.
    roles = ("user", "assistant", "system", "observation") if re.search(r"<\|['\"]", text) else ()
    named = [f"<|{role}|>" for role in roles]
    special = list(dict.fromkeys(["<|endoftext|>", "<s>", *_SPECIAL.findall(text), *named]))
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    library.train_from_iterator(
        ["two plus two is four ", "\n\nIt is sunny.\n"],
        trainers.BpeTrainer(
            vocab_size=320 + len(special),
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    library.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    config = dict(
        eos_token="<|endoftext|>",
        bos_token="<s>",
        pad_token="<|endoftext|>",
        chat_template=text,
        tokenizer_class="PreTrainedTokenizerFast",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
