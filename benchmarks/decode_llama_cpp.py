"""llama.cpp in a comparison of greedy decoding (real_decoding.py): its C interface, by
llama-cpp-python. All sequences are decoded in one batch, a token of each at a time."""

import ctypes
import os
from pathlib import Path

from peer_worker import Worker


def whole_weights(llama, source: str, target: Path) -> str:
    """A copy of a GGUF file with its weights written out as float32."""
    if not target.exists():
        parameters = llama.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = llama.LLAMA_FTYPE_ALL_F32, True
        draft = target.with_suffix(".part")
        if llama.llama_model_quantize(
            source.encode(), str(draft).encode(), ctypes.byref(parameters)
        ):
            raise SystemExit(f"llama.cpp cannot write {source} as float32")
        draft.rename(target)
    return str(target)


class Decoder:
    """A model with room for some sequences."""

    def __init__(self, llama, file: str, prompts: list[list[int]], tokens: int):
        self.llama, self.prompts, self.tokens = llama, prompts, tokens
        self.model = llama.llama_model_load_from_file(
            file.encode(), llama.llama_model_default_params()
        )
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = sum(map(len, prompts)) + len(prompts) * tokens
        parameters.n_seq_max, parameters.n_batch = len(prompts), max(sum(map(len, prompts)), 512)
        parameters.kv_unified = True  # sequences share the columns, whatever their lengths
        parameters.n_threads = parameters.n_threads_batch = os.cpu_count()
        self.context = llama.llama_init_from_model(self.model, parameters)
        if not self.model or not self.context:
            raise SystemExit(f"llama.cpp cannot read {file}")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(parameters.n_batch, 0, 1)

    def _read(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Reads (token, position, sequence, whether its next token is asked for) and returns the
        likeliest next tokens, in order."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_read) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, is_read
        if self.llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        next_tokens = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = self.llama.llama_get_logits_ith(self.context, i)
                next_tokens.append(int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()))
        return next_tokens

    def decode(self) -> list[list[int]]:
        """`tokens` greedy tokens of every prompt, from an empty cache."""
        llama, lengths = self.llama, [len(ids) for ids in self.prompts]
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        rows = [
            (token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(self.prompts)
            for position, token in enumerate(ids)
        ]
        newest = self._read(rows)
        generated = [[token] for token in newest]
        for step in range(self.tokens - 1):
            rows = [(token, lengths[i] + step, i, True) for i, token in enumerate(newest)]
            newest = self._read(rows)
            for ids, token in zip(generated, newest, strict=True):
                ids.append(token)
        return generated


def main() -> None:
    worker = Worker()
    options = worker.options
    try:
        import llama_cpp as llama
    except ImportError as error:
        worker.say({"ready": {"not_installed": str(error)}})
        return
    file = options["gguf"]
    if not Path(file).is_file():
        raise SystemExit(f"--gguf: no such file: {file!r}")
    if options["how"] == "float32":
        file = whole_weights(llama, file, Path(options["scratch"]) / "float32.gguf")
    decoder = Decoder(llama, file, options["prompts"], options["tokens"])
    worker.say({"ready": {"versions": {"llama_cpp_python": llama.__version__}}})
    while True:
        worker.wait()
        tokens = decoder.decode()
        worker.generated(sum(map(len, tokens)))
        worker.done(ids=tokens)


if __name__ == "__main__":
    main()
