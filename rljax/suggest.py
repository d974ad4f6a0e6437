"""Suggestions for a name that nothing has: what other trainers call differently, and near names.

`FIELDS` and `VALUES` say how the names of TRL, verl, Tunix, OpenRLHF and others are spelled here.
In backticks stand fields, fields with a value, and configs that ship; a test reads every one of
them, so that none outlives what it names. A text without backticks says why there is no such field.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping

_NEAR = 0.8  # similarity of two words, from which on one may be a misspelling of the other

_RESPONSE = "`sampler.max_response_tokens`"
_MICROBATCH = "`batch.tokens_per_microbatch` (tokens computed at a time; changes memory alone)"
_PAIR_TOKENS = "`offline.max_tokens` (prompt and completion of a row of a file)"


def _by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """Returns {name: ours} of {ours: names with spaces between them}."""
    return {name: ours for ours, names in names_of.items() for name in names.split()}


# Name, or the end of a dotted name -> what is written here; the rows have it the other way round.
# Dashes count as underscores.
FIELDS: dict[str, str] = _by_name(
    {
        # -- sizes --
        "`batch.samples_per_prompt`": "num_generations rollout.n n n_samples_per_prompt "
        "num_return_sequences group_size num_samples_per_prompt num_generations_per_prompt "
        "rollouts_per_example",
        "`evaluate.samples`": "num_generations_eval val_kwargs.n",
        _RESPONSE: "max_completion_length max_new_tokens max_response_length response_length "
        "generate_max_len max_tokens_to_generate total_generation_steps max_completion_tokens "
        "max_output_tokens sampling_params.max_tokens max_output_len max_gen_len",
        "`data.max_prompt_tokens`": "max_prompt_length prompt_max_len max_prompt_len max_input_len",
        f"{_RESPONSE} for responses, or {_PAIR_TOKENS}": "max_token max_tokens_per_response",
        _PAIR_TOKENS: "max_length max_seq_length max_seq_len max_len",
        "`batch.prompts_per_step` prompts x `batch.samples_per_prompt` samples are a step "
        "(`offline.examples_per_step` rows of a file); "
        f"{_MICROBATCH} for memory": "per_device_train_batch_size batch_size train_batch_size "
        "rollout_batch_size generation_batch_size steps_per_generation num_prompts_per_step "
        "full_batch_size gen_batch_size device_batch_size per_device_batch_size",
        "nothing: it follows from `batch.sequences_per_optimizer_step` and "
        "`batch.tokens_per_microbatch`": "gradient_accumulation_steps grad_accum "
        "grad_accum_steps gradient_accumulation grad_accumulation_steps accumulation_steps "
        "grad_acc_steps accumulate_grad_batches",
        "nothing: evaluation chooses its own batches; `evaluate.prompts` "
        "says how many prompts": "val_batch_size eval_batch_size validation_batch_size "
        "test_batch_size eval_bs",
        "`batch.sequences_per_optimizer_step` (sequences, not prompts)": "ppo_mini_batch_size "
        "mini_batch_size global_batch_size train_global_batch_size num_mini_batches",
        _MICROBATCH: "micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "micro_train_batch_size micro_rollout_batch_size train_micro_batch_size "
        "compute_logps_micro_batch_size rollout_micro_batch_size per_device_eval_batch_size "
        "max_tokens_per_microbatch use_dynamic_bsz",
        "`steps`: a run is counted in steps, and says how many epochs of "
        "the data they are": "num_train_epochs total_epochs epochs num_epochs num_episodes "
        "total_episodes max_num_epochs n_epochs n_epoch nb_epochs train_epochs num_training_epochs",
        "`steps`": "max_steps total_training_steps total_steps num_train_steps num_steps "
        "max_train_steps num_batches",
        "`batch.epochs` (passes over the samples of a step)": "num_iterations ppo_epochs "
        "num_ppo_epochs max_epochs update_epochs mu",
        # -- algorithm --
        "`algorithm.kl_in_loss` (of GRPO and PPO; 0 = off), or of pairs "
        '`algorithm.preference_loss="dpo(beta=0.1)"`': "beta",
        "`algorithm.kl_in_loss` (0 = off)": "kl_loss_coef kl_beta use_kl_loss kl_coeff "
        "reference_policy_kl_penalty kl_penalty_coef kl_penalty_coeff kl_penalty_weight "
        "kl_coefficient kl_weight kl_loss_weight use_kl use_kl_penalty kl_loss_coeff",
        "`algorithm.kl_in_reward` (0 = off)": "use_kl_in_reward init_kl_coef kl_ctrl.kl_coef",
        "`algorithm.kl_in_loss` or `algorithm.kl_in_reward`": "kl_coef",
        "`algorithm.kl_estimator`": "kl_loss_type kl_penalty",
        "`algorithm.kl_target`": "target_kl kl_ctrl.target_kl",
        "`algorithm.kl_horizon`": "kl_ctrl.horizon",
        "`algorithm.kl_target` (0 = a fixed coefficient)": "kl_ctrl.type",
        '`algorithm.policy_loss="ppo_clip(clip_low=0.2, clip_high=0.28)"`': "epsilon epsilon_low "
        "epsilon_high clip_ratio clip_ratio_low clip_ratio_high cliprange clip_range clip_eps "
        "eps_clip clip_epsilon clip_low clip_high eps_clip_low_high clip_eps_high",
        '`algorithm.policy_loss="ppo_clip(dual_clip=3.0)"`': "clip_ratio_c dual_clip delta",
        '`algorithm.value_loss="squared_error(clip=0.5)"`': "cliprange_value value_clip "
        "clip_value vf_clip",
        "`algorithm.policy_loss` and `algorithm.reduction`, or a preset: `presets/grpo`, "
        "`presets/dapo`, `presets/dr_grpo`, `presets/gspo`; for pairs "
        "`algorithm.preference_loss`": "loss_type loss_algo",
        "`algorithm.advantage`": "adv_estimator advantage_estimator",
        "`algorithm.reduction`": "loss_agg_mode loss_aggregation",
        '`algorithm.policy_loss="gspo()"`, or `presets/gspo`': "importance_sampling_level",
        "`algorithm.advantage=\"group_relative(std='none')\"` (sample, "
        "population or none)": "scale_rewards norm_adv_by_std_in_grpo normalize_advantage_std",
        '`algorithm.reward_shaping="normalised()"`': "whiten_rewards normalize_reward",
        '`algorithm.advantage="gae(whiten=True)"`': "whiten_advantages",
        '`algorithm.advantage="gae(gamma=1.0, lam=0.95)"`': "gamma lam lambd gae_lambda "
        "discount_factor",
        "nothing: the critic has an optimizer of its own, `critic_optimizer.lr`": "vf_coef "
        "value_loss_coef",
        "`algorithm.entropy_coef`": "entropy_coeff ent_coef entropy_loss_coef init_ent_coef",
        "`algorithm.entropy_target`": "use_adaptive_entropy use_adapt_ent adaptive_entropy "
        "target_entropy adaptive_entropy.target_entropy",
        "`algorithm.entropy_coef_step`": "entropy_coef_delta delta_ent_coef entropy_coeff_delta",
        "`algorithm.entropy_coef_max`": "max_ent_coef max_entropy_coeff",
        "`dataflow`": "algo",
        '`algorithm.collect="dynamic()"`': "dynamic_sampling filter_groups filter_groups.enable "
        "use_dynamic_sampling",
        '`algorithm.collect="dynamic(max_rounds=10)"`': "filter_groups.max_num_gen_batches",
        '`algorithm.filters="overlong()"`': "mask_truncated_completions overlong_filtering",
        '`algorithm.reward_shaping="soft_overlong(max_tokens=1024, cache_tokens=256)"`; see also '
        "`presets/dapo`": "overlong_buffer overlong_buffer.len overlong_buffer.enable "
        "soft_max_length",
        '`algorithm.correction="rollout_correction()"`': "vllm_importance_sampling_correction "
        "rollout_is use_importance_sampling_correction",
        '`algorithm.correction="rollout_correction(upper=2.0)"`': "vllm_importance_sampling_cap "
        "tis_imp_ratio_cap rollout_is_threshold",
        '`algorithm.correction="rollout_correction(lower=0.5)"`': "rollout_is_threshold_lower",
        "`algorithm.correction=\"rollout_correction(level='token')\"`": "rollout_is_level",
        "`algorithm.correction=\"rollout_correction(mode='truncate')\"`": "rollout_is_mode",
        '`algorithm.correction="rollout_correction(veto=0.0001)"`': "rollout_is_veto_threshold",
        "nothing: the sampler always records its log-probs": "calculate_log_probs",
        '`algorithm.preference_loss="dpo(label_smoothing=0.1)"`': "label_smoothing",
        "`algorithm.preference_loss=\"dpo(divergence='reverse_kl')\"`": "f_divergence_type",
        '`algorithm.preference_loss="kto(desirable_weight=1.0)"`': "desirable_weight",
        '`algorithm.preference_loss="kto(undesirable_weight=1.0)"`': "undesirable_weight",
        '`algorithm.preference_loss="simpo(gamma=1.0)"`': "simpo_gamma",
        "`offline.reference_logprobs` (a folder to keep them in)": "precompute_ref_log_probs",
        "nothing: the reference is the policy as the run begins, wherever a KL is "
        "on": "ref_model reference_model ref_model_path reference_model_path ref_policy "
        "reference_policy ref_model_name_or_path",
        # -- optimizer --
        "`actor_optimizer.lr` (also `critic_optimizer.lr`, `sft.optimizer.lr`)": "learning_rate",
        "`actor_optimizer.lr`": "actor_learning_rate actor_lr actor.optim.lr learning_rate_actor "
        "lr_actor policy_lr policy_learning_rate",
        "`critic_optimizer.lr`": "critic_learning_rate critic_lr critic.optim.lr "
        "learning_rate_critic lr_critic value_lr value_learning_rate",
        "`actor_optimizer.schedule`": "lr_scheduler_type lr_scheduler lr_schedule warmup_style",
        "`actor_optimizer.warmup_steps` (optimizer steps)": "warmup_ratio lr_warmup_steps "
        "lr_warmup_steps_ratio lr_warmup_ratio num_warmup_steps",
        '`actor_optimizer.schedule="cosine(final=0.1)"` (a share of lr)': "min_lr min_lr_ratio",
        "`actor_optimizer.clip_norm`": "max_grad_norm grad_clip clip_grad gradient_clipping "
        "max_norm grad_norm_clip",
        "`actor_optimizer.beta1`": "adam_beta1",
        "`actor_optimizer.beta2`": "adam_beta2",
        "`actor_optimizer.eps`": "adam_epsilon",
        "`actor_optimizer.beta1` and `actor_optimizer.beta2`": "adam_betas betas",
        "`actor_optimizer.weight_decay`": "l2",
        "`actor_optimizer.name`": "optim optimizer_type optimizer",
        # -- model --
        "`model`": "model_name_or_path model_name model_id pretrain model.path model_path "
        "base_model",
        "`tokenizer`": "tokenizer_name tokenizer_path tokenizer_name_or_path processing_class "
        "tokenizer_class",
        "`reward.model`": "reward_model_path reward_model.path reward_pretrain "
        "reward_model_name_or_path reward_model reward_model.enable use_reward_model "
        "reward_model_name",
        "`critic_model`": "critic_pretrain value_model_path critic.model.path",
        "`teacher_model`": "teacher_model_name_or_path teacher_model_path",
        "`algorithm.teacher_rate`": "teacher_update_rate teacher_ema_rate",
        "`algorithm.teacher_rate` (0 = base, 1 = live, between them ema)": "teacher_model_kind",
        "`algorithm.collect=\"with_hint(template='{prompt}\\n\\n{hint}')\"`": ""
        "teacher_prompt_template reprompt_template",
        "`algorithm.teacher_coef`": "distillation_coef opd_kl_coef opd_coef distill_coef",
        "`model_settings.dtype=bfloat16`": "bf16 fp16 torch_dtype mixed_precision precision",
        "`model_settings.remat` (none, dots, attention, full, offload)": "gradient_checkpointing "
        "enable_gradient_checkpointing activation_checkpointing",
        "`lora.rank`": "use_peft use_lora enable_lora lora_enable lora_r lora_rank lora_dim "
        "lora_config peft_config",
        "`lora.alpha`": "lora_alpha",
        "`lora.targets`": "lora_target_modules target_modules",
        "`lora.base=nf4`": "load_in_4bit use_qlora",
        "`lora.base=int8`": "load_in_8bit",
        "nothing: the fastest kernel for the device is taken by itself": "attn_implementation "
        "flash_attn use_liger_kernel use_liger_loss use_remove_padding torch_compile "
        "use_fused_kernels",
        "nothing: the sampler is a part of rljax and reads the trainer's own weights": "use_vllm "
        "vllm_mode vllm_gpu_memory_utilization rollout_engine gpu_memory_utilization "
        "vllm_server_host rollout.name vllm_num_engines free_cache_engine enforce_eager",
        "`memory.optimizer_on_host`": "adam_offload optimizer_offload",
        "`memory.reference_on_host`": "ref_offload ref.fsdp_config.param_offload",
        # -- devices --
        "`mesh.tensor`": "tensor_model_parallel_size tensor_parallel_size tp_size "
        "vllm_tensor_parallel_size",
        "`mesh.context`": "ulysses_sequence_parallel_size context_parallel_size cp_size "
        "ring_attn_size",
        "`mesh.expert`": "expert_model_parallel_size expert_parallel_size ep_size",
        "`mesh.fsdp`": "fsdp_size fsdp_config zero_stage deepspeed",
        "nothing: a run takes all devices that JAX has; `mesh.fsdp`, "
        "`mesh.tensor`, `mesh.data`": "n_gpus_per_node nnodes num_processes num_gpus num_nodes "
        "actor_num_gpus_per_node",
        "`mesh.data`, `mesh.fsdp`, `mesh.tensor` and the others of that section": "mesh_shape "
        "device_mesh mesh_axes mesh_config ici_mesh_shape",
        "`mesh.data`": "dp_size data_parallel_size",
        "`placement` (() = one mesh for all)": "colocate_all_models role_to_mesh",
        # -- data --
        "`data.train`": "dataset_name train_dataset train_files prompt_data dataset dataset_path "
        "train_file train_data train_path train_file_path training_data training_file",
        "`data.test`": "eval_dataset val_files test_files eval_data val_file validation_file "
        "validation_files valid_files valid_file eval_file eval_files test_file val_dataset "
        "validation_dataset test_dataset val_data validation_data test_data eval_path val_path",
        "`data.test_fraction`": "val_size test_size eval_split_ratio",
        "`data.overlong` (drop, error, left, right)": "truncation filter_overlong_prompts "
        "truncation_mode",
        "nothing: columns are recognised by their names (`data.train` may be a function of a file "
        "of yours that returns rows)": "prompt_key input_key label_key dataset_text_field "
        "reward_fn_key answer_key",
        "nothing: a list of messages is rendered by the tokenizer's "
        "chat template": "apply_chat_template input_template",
        "nothing: rows are drawn in a shuffled order of `seed`": "shuffle_dataset "
        "dataloader_shuffle shuffle",
        "`data.template_variables=enable_thinking=false`": "chat_template_kwargs enable_thinking",
        "`data.stream`": "streaming",
        "`batch.packing`": "packing_samples",
        # -- reward, environment --
        "`reward.function`": "reward_funcs reward_fn reward_func custom_reward_function "
        "compute_score reward_fns custom_reward_function.path remote_rm_url reward_function "
        "reward_functions reward_func_name reward_fn_name reward_module",
        "`reward.function` (to learn from) or `evaluate.reward` (of held-out answers)": "rewards",
        "`reward.function=\"mixture(rewards=('exact_match()', 'boxed()'), "
        'weights=(0.8, 0.2))"`': "reward_weights",
        "`environment.max_turns`": "max_assistant_turns max_user_turns "
        "max_tool_calling_iterations max_num_turns",
        '`environment.function="tools()"`': "tools tool_config_path multi_turn.enable",
        "nothing: a response ends with the tokenizer's own ids; "
        "`sampler.stop_strings` adds texts": "stop_token stop_token_id eos_token_id",
        'nothing: a response that is cut is not fined; `algorithm.filters="overlong()"` leaves it '
        'out of the loss, `algorithm.reward_shaping="soft_overlong(max_tokens=1024, '
        'cache_tokens=256)"` lowers the rewards of long ones': "missing_eos_penalty",
        "`sampler.stop_strings`": "stop stop_sequences stop_words stop_sequence stop_tokens "
        "stop_str",
        "`sampler.temperature`, `sampler.top_p`, `sampler.top_k`, `sampler.max_response_tokens` "
        "and `sampler.stop_strings`, each a field": "generation_kwargs generation_config "
        "gen_config gen_kwargs generate_kwargs sampling_params sampling_config sampling_kwargs",
        # -- the run --
        "nothing: every setting is a field of its own, such as `steps`, `actor_optimizer.lr` and "
        "`batch.samples_per_prompt`": "args training_args grpo_config config_args",
        "nothing: every step is logged; `trackers` says where to": "logging_steps log_freq "
        "log_interval logging_first_step",
        "`trackers`": "report_to logger use_wandb use_tensorboard log_with trainer.logger",
        "`checkpoint.every_steps`": "save_steps save_freq save_interval save_interval_steps "
        "save_strategy checkpoint_interval",
        "`checkpoint.keep`": "save_total_limit max_to_keep max_actor_ckpt_to_keep max_ckpt_num",
        "`evaluate.every_steps`": "eval_steps test_freq eval_every_n_steps eval_interval "
        "eval_strategy val_period eval_freq evaluation_strategy",
        "nothing: a run with held-out prompts is evaluated before and after": "val_before_train "
        "val_only eval_on_start",
        "`run_dir`": "output_dir default_local_dir ckpt_path save_path run_name save_dir "
        "output_path log_dir checkpoint_dir ckpt_dir work_dir out_dir output_folder save_folder "
        "output_directory save_directory log_folder experiment_name checkpoint_root_directory "
        "logging_dir resume_from_checkpoint resume_mode load_checkpoint",
        "`trackers=console,wandb(project='NAME')`": "project_name wandb_project",
        "`samples_every_steps`": "log_completions log_val_generations num_completions_to_print",
        "`checkpoint.best_metric`": "metric_for_best_model load_best_model_at_end",
        "`evaluate.patience`": "early_stopping_patience",
        "`seed`": "data_seed random_seed",
        "`rollouts.max_staleness`": "staleness_threshold max_head_offpolicyness "
        "num_off_policy_steps max_async_level off_policy_steps max_trajectory_age_steps",
    }
)

_OF_PAIRS = '`dataflow=preference` with `algorithm.preference_loss="{}()"`'
_OF_GRPO = '`dataflow=grpo` with `algorithm.policy_loss="{}()"`'

# Field -> a value that people bring -> what is written here; {} is that value, {field} the field.
VALUES: dict[str, dict[str, str]] = {
    field: _by_name(names_of)
    for field, names_of in {
        "dataflow": {
            _OF_PAIRS: "dpo simpo orpo cpo tpo spin",
            "`dataflow=preference` with "
            "`algorithm.preference_loss=\"dpo(losses=('ipo',))\"`": "ipo",
            _OF_GRPO: "gspo cispo sapo gmpo gvpo vespo clip_cov kl_cov fipo topr m2po real",
            "the preset `presets/dapo`: it is GRPO with other parts": "dapo",
            "the preset `presets/dr_grpo`: it is GRPO with other parts": "dr_grpo",
            '`dataflow=grpo` with `algorithm.advantage="rloo()"`, or `presets/rloo`': "rloo",
            '`dataflow=grpo` with `algorithm.advantage="opo()"`, or `presets/opo`': "opo",
            '`dataflow=grpo` with `algorithm.advantage="maxrl()"`': "maxrl",
            '`dataflow=grpo` with `algorithm.advantage="pkpo(k=4)"`': "pkpo",
            '`dataflow=grpo` with `algorithm.advantage="reinforce_plus_plus()"`, or '
            "`presets/reinforce_pp`": "reinforce_plus_plus",
            "`dataflow=on_policy_distil`": "gkd",
            "`dataflow=reward_model`": "reward rm",
            "`dataflow=process_reward_model`": "prm",
            "`dataflow=raft`": "rejection_sampling",
        },
        "algorithm.policy_loss": {
            '`algorithm.policy_loss="ppo_clip()"`; what else differs is `algorithm.advantage` and '
            "`algorithm.reduction`": "grpo vanilla ppo clip rloo bnpo dr_grpo regular",
            '`algorithm.policy_loss="ppo_clip(clip_high=0.28)"`; all of it is '
            "`presets/dapo`": "dapo",
            '`algorithm.policy_loss="policy_gradient()"`': "reinforce",
            '`algorithm.policy_loss="negative_log_likelihood()"`': "nll sft cross_entropy",
            '`algorithm.policy_loss="dynamic_fine_tuning()"`': "dft",
            _OF_PAIRS: "dpo",
        },
        "algorithm.preference_loss": {
            "`algorithm.preference_loss=\"dpo(losses=('sigmoid',))\"`, whose losses "
            "may name it": "sigmoid hinge ipo exo_pair robust apo_zero"
        },
        "algorithm.advantage": {
            '`algorithm.advantage="group_relative()"`': "grpo group_norm",
            "`algorithm.advantage=\"group_relative(std='none')\"`": "dr_grpo",
            '`algorithm.advantage="best_of_group()"`': "grpo_passk",
            '`algorithm.advantage="pass_at_k(k=4)"`': "passk pass_k pass@k",
            '`algorithm.advantage="reinforce_plus_plus_baseline()"`': "reinforce_baseline",
        },
        "algorithm.reduction": {
            "`algorithm.reduction=token_mean`": "dapo bnpo token mean",
            "`algorithm.reduction=seq_mean_token_mean`": "grpo sequence seq_mean",
            '`algorithm.reduction="seq_mean_token_sum_norm(max_tokens=1024)"`': "dr_grpo",
        },
        "reward.function": {
            "`reward.function=math_verify`": "accuracy_reward accuracy math "
            "reasoning_accuracy_reward",
            "`reward.function=format_tags`": "format_reward think_format_reward format "
            "tag_count_reward",
            "`reward.function=repetition`": "repetition_penalty_reward "
            "get_repetition_penalty_reward",
            '`reward.function="soft_overlong(max_tokens=1024, '
            'cache_tokens=256)"`': "soft_overlong_punishment get_soft_overlong_punishment",
            "`reward.function=code_tests`": "code_reward code",
        },
        **dict.fromkeys(
            ("actor_optimizer.name", "critic_optimizer.name", "sft.optimizer.name"),
            {
                "`{field}=adamw`": "adam adamw_torch adamw_hf adamw_torch_fused paged_adamw_8bit "
                "adamw_8bit adamw_bnb_8bit"
            },
        ),
        **dict.fromkeys(
            ("actor_optimizer.schedule", "critic_optimizer.schedule", "sft.optimizer.schedule"),
            {
                "`{field}=constant`; warmup_steps beside it warms up": "constant_with_warmup",
                '`{field}="cosine(final=0.1)"`, where final is min_lr / lr': "cosine_with_min_lr",
                "`{field}=cosine`; final=SHARE in brackets ends above 0": "cosine_annealing",
                "`{field}=\"wsd(decay=0.1, shape='cosine')\"`, where decay is the share of "
                "steps in which the learning rate falls": "warmup_stable_decay",
                "`{field}=cosine`, the same with num_cycles=1, its default; no schedule here "
                "restarts": "cosine_with_restarts",
                "`{field}=linear`, the same with power=1, its default": "polynomial",
            },
        ),
        "trackers": {
            "`trackers=` (an empty list)": "none no",
            "`trackers=console`": "stdout",
            "`trackers=wandb`": "weights_and_biases",
        },
    }.items()
}


def plain(name: str) -> str:
    """A name as the tables have it: without the dashes and the + of other command lines."""
    return name.strip().lstrip("+-").lower().replace("-", "_")


def elsewhere(name: str) -> str:
    """Returns what stands for a field of another trainer, "" for one that is not known. Of a dotted
    name the longest end counts: "actor_rollout_ref.rollout.n" is "rollout.n"."""
    parts = plain(name).split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    return next((FIELDS[end] for end in ends if end in FIELDS), "")


def other_value(field: str, name: str) -> str:
    """Returns our value for one of another trainer in a field of ours, "" for one not known."""
    text = VALUES.get(field, {}).get(plain(name), "")
    return text.replace("{}", plain(name)).replace("{field}", field)


def near_elsewhere(name: str) -> str:
    """Returns what stands for the field of another trainer that a name misspells, "" where it
    misspells none. The whole name counts, not its beginning alone: `enable` may be that of any."""
    words = _words(plain(name))
    likeness, other = max((_likeness(words, others), other) for other, others in _field_words())
    return FIELDS[other] if likeness > _NEAR else ""


def near_names(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Those of the known names that `name` may be a misspelling of, the likeliest first; none where
    it resembles none. Names are compared word by word: `min_tokens` is not `max_tokens`."""
    words = _words(name)
    scored = [(_likeness(words, _words(other)), other) for other in dict.fromkeys(known)]
    scored = [(score, other) for score, other in scored if score >= _NEAR]
    return [other for _, other in sorted(scored, key=lambda pair: -pair[0])[:n]]


@functools.cache
def _field_words() -> list[tuple[str, list[str]]]:
    """Returns each of FIELDS with its words."""
    return [(field, _words(field)) for field in FIELDS]


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^0-9a-z]+", name.lower()) if word]


def _likeness(words: list[str], others: list[str]) -> float:
    """From 0 to 1: that of the two words that differ most; where one name has more words, that of
    the names without their underscores, or _NEAR where it begins with the other."""
    joined, other = "".join(words), "".join(others)
    if len(words) == len(others):
        least = min(1.0, len(words))
        for pair in zip(words, others, strict=True):
            if (least := min(least, _likeness_of_words(*pair))) < _NEAR:
                break  # nobody asks how far below
        return least
    if others[: len(words)] == words and len(joined) >= 3:
        return _NEAR
    return _likeness_of_words(joined, other) if abs(len(joined) - len(other)) <= 1 else 0.0


def _likeness_of_words(word: str, other: str) -> float:
    if word == other:
        return 1.0
    if len(word) > 2 and sorted(word) == sorted(other):  # two letters changed their places
        return 0.9
    begins = len(word) > 2 and other.startswith(word)
    # Nobody asks for a likeness below _NEAR, and these bounds of it take a tenth of its time.
    letters = len(word) + len(other)
    if 2 * min(len(word), len(other)) / letters < _NEAR:
        return _NEAR * begins
    if 2 * sum(min(word.count(c), other.count(c)) for c in set(word)) / letters < _NEAR:
        return _NEAR * begins
    likeness = difflib.SequenceMatcher(None, word, other).ratio()
    return max(likeness, _NEAR) if begins else likeness
