"""TRL in a comparison (peers.py): `GRPOTrainer.train` on random weights, as it is, with generation
by transformers, beta 0 and no gradient checkpointing. On a CPU in float32; with PEER_DEVICE=gpu on
a GPU, in bfloat16 with float32 weights."""

import itertools
import os
import tempfile
from importlib.metadata import version

os.environ |= {"HF_HUB_OFFLINE": "1"} | (
    {}
    if os.environ.get("PEER_DEVICE") == "gpu"
    else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
)

import torch
from datasets import IterableDataset
from peer_worker import Worker, reward
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ON_GPU = os.environ.get("PEER_DEVICE") == "gpu"


def make_model(shape) -> Qwen3ForCausalLM:
    sizes = shape.decoder
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.embed,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=shape.columns,
        tie_word_embeddings=sizes.tie_embeddings,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = list(shape.stop_ids())
    return model


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Words are ids; its end of sequence is an id that the model does not have."""
    ids = {str(i): i for i in range(vocabulary)} | {"<eos>": vocabulary}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="0", eos_token="<eos>", padding_side="left"
    )


def prompts(shape):
    for i in itertools.count():
        yield {"prompt": " ".join(map(str, shape.prompt_ids(i)))}


def main() -> None:
    worker = Worker()
    shape = worker.shape

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            worker.generated(int(outputs["completion_mask"].sum()))
            return outputs

    class Laps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            worker.wait()

        def on_step_end(self, *_, **__):
            worker.done()
            worker.wait()

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not ON_GPU,
        bf16=ON_GPU,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        max_steps=10**6,
        beta=0.0,
        temperature=1.0,
        per_device_train_batch_size=shape.microbatch,
        num_generations=shape.samples,
        gradient_accumulation_steps=shape.rows // shape.microbatch,
        learning_rate=1e-5,
        max_completion_length=shape.response,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
    )
    trainer = Trainer(
        model=make_model(shape),
        processing_class=make_tokenizer(shape.decoder.vocabulary),
        reward_funcs=lambda completion_ids, **_: [reward(x) for x in completion_ids],
        args=settings,
        train_dataset=IterableDataset.from_generator(prompts, gen_kwargs={"shape": shape}),
        callbacks=[Laps()],
    )
    names = ("trl", "transformers", "torch")
    worker.say({"ready": {name: version(name) for name in names}})
    trainer.train()


if __name__ == "__main__":
    main()
