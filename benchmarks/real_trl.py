"""TRL in a comparison on a real model (real.py): `GRPOTrainer.train`, as it is, with generation by
transformers."""

import os
import tempfile
from importlib.metadata import version

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

import real_rows
import torch
from datasets import Dataset
from real_worker import RealWorker
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def make_settings(options: dict, folder: str) -> GRPOConfig:
    """The trainer's settings: its defaults but for what real.py gives to both systems."""
    rows = options["prompts"] * options["samples"]
    microbatch = options["microbatch"] or rows
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        max_steps=options["steps"] + 1,
        seed=options["seed"],
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        bf16=options["dtype"] == "bfloat16",
        gradient_checkpointing=options["remat"] == "full",
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=rows // microbatch,
        num_generations=options["samples"],
        max_completion_length=options["max_response_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # The mean over all tokens of the batch, a clip of 0.2, no KL: rljax's config beside this.
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        learning_rate=options["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )


def main() -> None:
    worker = RealWorker()
    options, rewards = worker.options, []
    score = real_rows.reward_function(options["reward"])

    def reward(completions, ground_truth, **_):
        texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
        rewards[:] = [score(text, truth) for text, truth in zip(texts, ground_truth, strict=True)]
        return list(rewards)

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            masked_ids = zip(outputs["prompt_ids"], outputs["prompt_mask"].bool(), strict=True)
            worker.prompts = [tuple(ids[mask].tolist()) for ids, mask in masked_ids]
            worker.generated(int(outputs["completion_mask"].sum()))
            return outputs

    class Laps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            worker.wait()

        def on_step_end(self, *_, **__):
            worker.learned(worker.prompts, rewards)
            worker.wait()

    with tempfile.TemporaryDirectory() as folder:
        rows = real_rows.rows_of_seed(
            options["rows"], options["seed"], (options["steps"] + 1) * options["prompts"]
        )
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options["model"]),
            reward_funcs=reward,
            args=make_settings(options, folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Laps()],
        )
        versions = {name: version(name) for name in ("trl", "transformers", "torch")}
        worker.say({"ready": {**versions, "threads": torch.get_num_threads()}})
        trainer.train()


if __name__ == "__main__":
    main()
